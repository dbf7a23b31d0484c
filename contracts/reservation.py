"""A reservation: room for one life of a session on one worker, an entry of the worker's `sessions` hash."""

from __future__ import annotations

from dataclasses import dataclass

from contracts.errors import CorruptDataError, InvalidArgumentError
from contracts.events import loads
from contracts.identity import check_index, check_text_id


@dataclass(frozen=True, slots=True)
class Reservation:
    """Which life has room, and since when.

    Args:
        life: the life; a reset reserves again for the new one.
        reserved_at_ms: broker time.
    """

    life: str
    reserved_at_ms: int

    @classmethod
    def from_json(cls, text: bytes | str, session_id: str) -> Reservation:
        """CorruptDataError where no script of ours can have written it."""
        try:
            value = loads(text, "reservation")
            life = check_text_id(value["life"], "life")
            return cls(life, check_index(value["reserved_at_ms"], "reserved_at_ms"))
        except (InvalidArgumentError, TypeError, KeyError) as error:
            raise CorruptDataError(
                f"reservation of {session_id} is corrupt: {error}", field="sessions"
            ) from None
