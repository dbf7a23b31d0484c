"""The event queue of one session as its actor sees it: entries in, a snapshot out, what can't be applied rejected.

The broker's stream is the queue; this is the actor's reading of it up to `cursor`. Of equal ids the first in stream
order wins.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from contracts.errors import InvalidArgumentError
from contracts.events import ARDiffusionSessionEvent, RejectReason
from contracts.session_scripts import Entry, Rejection

START: Final = "0-0"

_MESSAGE_LENGTH: Final = 300
_KEEPS_ID: Final = frozenset({RejectReason.DUPLICATE, RejectReason.STALE})
"""Reasons for which the id stays taken: another event has it, or has had it."""

Check = Callable[[ARDiffusionSessionEvent], None]


@dataclass(frozen=True, slots=True)
class PendingEvent:
    """An accepted event and the stream entry that carried it."""

    entry_id: str
    event: ARDiffusionSessionEvent

    @property
    def accepted_ms(self) -> int:
        """Broker time at which it was accepted: the first half of the entry id."""
        return entry_ms(self.entry_id)


def entry_ms(entry_id: str) -> int:
    """Broker time in milliseconds at which a stream entry was added."""
    return int(entry_id.partition("-")[0])


@dataclass(frozen=True, slots=True)
class Decoded:
    """One entry after decoding: an event, or the reason why it is none."""

    entry_id: str
    raw_id: str
    event: ARDiffusionSessionEvent | None
    error: str = ""


def decode(entries: Iterable[Entry]) -> list[Decoded]:
    """Reads entries as any producer may have written them; nothing raises."""
    decoded = []
    for entry_id, fields in entries:
        raw_id = fields.get(b"event_id", b"")[:80].decode(errors="replace")
        try:
            decoded.append(Decoded(entry_id, raw_id, ARDiffusionSessionEvent.from_entry(fields)))
        except InvalidArgumentError as error:
            decoded.append(Decoded(entry_id, raw_id, None, str(error)))
    return decoded


@dataclass(slots=True)
class EventQueue:
    """Accepted events that no committed tick has applied.

    Args:
        limit: as many may be pending.
        cursor: id of the last stream entry that was read.
    """

    limit: int
    cursor: str = START
    pending: dict[int, PendingEvent] = field(default_factory=dict)

    def admit(
        self,
        entries: Sequence[Decoded],
        *,
        floor: int,
        recent: Collection[int],
        check: Check,
        active: bool = True,
    ) -> list[Rejection]:
        """Takes in what can be applied and returns the rest with its reasons.

        Args:
            floor: the highest id that is applied or in flight.
            recent: those ids among the entries' that the broker knows as accepted.
            check: raises for an event that the reducer can't understand.
            active: outside ACTIVE only what was accepted before is kept.
        """
        rejections = []
        for item in entries:
            reason, message = self._judge(item, floor, recent, check, active)
            if reason is None and item.event is not None:
                self.pending[item.event.event_id] = PendingEvent(item.entry_id, item.event)
            elif reason is not None:
                forget = item.event is not None and reason not in _KEEPS_ID
                text = message[:_MESSAGE_LENGTH].encode(errors="replace").decode()  # reducers say anything
                rejections.append(Rejection(item.entry_id, item.raw_id, reason, text, forget))
            self.cursor = item.entry_id
        return rejections

    def _judge(
        self, item: Decoded, floor: int, recent: Collection[int], check: Check, active: bool
    ) -> tuple[RejectReason | None, str]:
        if item.event is None:
            return RejectReason.INVALID, item.error
        event_id = item.event.event_id
        if event_id in self.pending:
            return RejectReason.DUPLICATE, f"event {event_id} is pending"
        if event_id <= floor:
            if event_id in recent:
                return RejectReason.DUPLICATE, f"event {event_id} was accepted before"
            return RejectReason.STALE, f"event {event_id} is stale: the event floor is {floor}"
        if not active and event_id not in recent:
            return RejectReason.NOT_ACTIVE, "the session is not active"
        if len(self.pending) >= self.limit:
            return RejectReason.QUEUE_FULL, f"the event queue is full ({self.limit} pending)"
        try:
            check(item.event)
        except Exception as error:  # noqa: BLE001 - a reducer is foreign code; this is about the event
            return RejectReason.INVALID_CONTROL, str(error)
        return None, ""

    def snapshot(self, below: int | None = None) -> tuple[PendingEvent, ...]:
        """Pending events in id order; with `below` only those with a smaller id."""
        ids = sorted(self.pending) if below is None else sorted(i for i in self.pending if i < below)
        return tuple(self.pending[event_id] for event_id in ids)

    def applied(self, event_ids: Iterable[int]) -> None:
        """Drops what a commit has applied."""
        for event_id in event_ids:
            self.pending.pop(event_id, None)
