"""Which residents and reservations a worker may let go of, judged by the sessions' state. Pure decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from contracts.errors import CorruptDataError
from contracts.identity import parse_index
from contracts.lifecycle import Status
from contracts.messages import InFlight, Kind
from contracts.reservation import Reservation

STATE_FIELDS: Final = ("status", "life", "worker", "inflight", "chunk_index", "worker_incarnation")
"""What `SessionView.read` needs of the state hash, in this order."""

RESERVATION_GRACE_MS: Final = 60_000
"""A reservation is made before the session's state, so a young one without a state is none of our business."""


@dataclass(frozen=True, slots=True)
class SessionView:
    """The part of a session's state that says where its memory belongs."""

    status: Status
    life: str
    worker: str | None
    inflight: InFlight | None
    chunk_index: int = 0
    worker_incarnation: str | None = None

    @classmethod
    def read(cls, session_id: str, values: Sequence[bytes | None]) -> SessionView | None:
        """From the values of STATE_FIELDS; None without a state. Raises CorruptDataError."""
        status, life, worker, inflight, chunk_index, incarnation = values
        if status is None:
            return None
        try:
            return cls(
                Status(status.decode()),
                (life or b"").decode(),
                None if worker is None else worker.decode(),
                None if inflight is None else InFlight.from_json(inflight),
                0 if chunk_index is None else parse_index(chunk_index.decode(), "chunk_index"),
                None if incarnation is None else incarnation.decode(),
            )
        except (ValueError, TypeError, KeyError) as error:
            raise CorruptDataError(
                f"session {session_id}: the state is corrupt: {error}", field="state"
            ) from error

    @property
    def in_use(self) -> bool:
        """Whether a tick or a reset is in flight, which will decide over the memory itself."""
        return self.inflight is not None and self.inflight.kind in {Kind.TICK, Kind.RESET}


def reason_to_release(view: SessionView | None, life: str, worker_id: str) -> str | None:
    """Why a worker that holds `life` of a session should let go of it, or None to keep it."""
    if view is None:
        return "there is no such session"
    if view.worker not in {None, worker_id}:
        return f"it was placed on {view.worker}"
    if view.status is Status.CLOSED:
        return "it is CLOSED"
    if view.in_use:
        return None
    if view.status is Status.FAILED:
        return "it is FAILED"
    if view.life != life:
        return "another life of it has begun"
    return None


def memory_is_lost(
    view: SessionView | None, reservation: Reservation, worker_id: str, incarnation: str
) -> bool:
    """Whether a session waits here for memory that an earlier start of the worker had.

    Such a session was passed over when this start was announced, because it had a request in flight; and that was
    answered by the earlier start, whose last reply nobody had read yet.
    """
    return (
        view is not None
        and view.status is Status.ACTIVE
        and view.inflight is None
        and view.chunk_index > 0
        and (view.worker, view.life) == (worker_id, reservation.life)
        and view.worker_incarnation not in {None, incarnation}
    )


def reservation_is_stale(
    view: SessionView | None, reservation: Reservation, worker_id: str, now_ms: int
) -> bool:
    """Whether a reservation keeps room for nobody: over a minute old, and its session is gone, ended or elsewhere."""
    if now_ms - reservation.reserved_at_ms <= RESERVATION_GRACE_MS:
        return False
    if view is None or view.status is Status.CLOSED or view.worker not in {None, worker_id}:
        return True
    return view.status is Status.FAILED and not view.in_use
