"""What the event queue of a session must do, written once more as plain lists. It imports nothing of ours."""

from dataclasses import dataclass, field


@dataclass
class Sent:
    """One entry of the events stream as its producer meant it.

    Args:
        wire: what stands in the stream.
        event_id: the id where the entry is a proper event, else None.
        understood: whether the reducer can read it.
    """

    wire: dict[bytes, bytes]
    event_id: int | None
    understood: bool = True


@dataclass
class Oracle:
    """The queue.

    `held` are (id, entry id) of what may be applied, in order of arrival; `known` are ids that were accepted and are
    still remembered.
    """

    limit: int
    floor: int = -1
    active: bool = True
    held: list[tuple[int, str]] = field(default_factory=list)
    known: list[int] = field(default_factory=list)

    def take(self, entry_id: str, sent: Sent) -> str | None:
        """Takes an entry in, or says why not."""
        number = sent.event_id
        if number is None:
            return "invalid"
        if number in [held for held, _ in self.held]:
            return "duplicate"
        if number <= self.floor:
            return "duplicate" if number in self.known else "stale"
        if not self.active and number not in self.known:
            return "not_active"
        if len(self.held) == self.limit:
            return "queue_full"
        if not sent.understood:
            return "invalid_control"
        self.held.append((number, entry_id))
        return None

    def in_order(self, below: int | None = None) -> list[tuple[int, str]]:
        """What a tick takes."""
        return sorted(pair for pair in self.held if below is None or pair[0] < below)

    def apply(self, numbers: list[int]) -> None:
        """A tick with these ids was committed."""
        self.held = [pair for pair in self.held if pair[0] not in numbers]
        self.known += numbers
        if numbers:
            self.floor = numbers[-1]
