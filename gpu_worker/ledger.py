"""What a worker remembers of each session, so that a request acts once and a late one not at all.

For each session: the highest fence seen, the last request that ran and its reply, the life that the worker holds, and
the request id of the last chunk it completed for that life. A record outlives the session's release for a while,
because a request that was overtaken may still arrive.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from contracts.errors import NotResidentError, TickFailedError
from contracts.messages import WorkerReply, WorkerRequest


class Verdict(Enum):
    """What is to be done with a request."""

    DROP = "a newer request of the session was seen: nobody waits for this one"
    REPEAT = "it ran already: answer from the record"
    RUN = "new"


@dataclass(frozen=True, slots=True)
class Holding:
    """A life that the worker holds, as of the fence at which it was looked at."""

    life: str
    fence: int


@dataclass(slots=True)
class _Record:
    touched_s: float
    fence: int = -1
    last_reply: WorkerReply | None = None
    life: str | None = None
    completed: str | None = None
    """Request id of the last chunk of `life`; None before chunk 0, and after a failure: then nothing can follow."""


class Ledger:
    """Records of all sessions that this start of the worker has seen. Pure: no broker, no engine.

    Args:
        keep_s: how long a record outlives the session's release.
        clock: monotonic seconds.
    """

    def __init__(self, keep_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._keep_s = keep_s
        self._clock = clock
        self._records: dict[str, _Record] = {}

    def __len__(self) -> int:
        return len(self._records)

    def admit(self, request: WorkerRequest) -> Verdict:
        """Judges a request by fence and request id, and remembers its fence."""
        now = self._clock()
        record = self._records.setdefault(request.session_id, _Record(now))
        if request.fence < record.fence:
            return Verdict.DROP
        record.fence = request.fence
        record.touched_s = now
        if record.last_reply is not None and record.last_reply.request_id == request.request_id:
            return Verdict.REPEAT
        return Verdict.RUN

    def repeat(self, request: WorkerRequest) -> WorkerReply:
        """The recorded reply under the fence of this delivery; only after the verdict REPEAT."""
        reply = self._records[request.session_id].last_reply
        assert reply is not None, "repeat() follows the verdict REPEAT"
        return replace(reply, fence=request.fence)

    def record(self, reply: WorkerReply) -> None:
        """Remembers a request as run."""
        self._records[reply.session_id].last_reply = reply

    def refusal(self, request: WorkerRequest) -> TickFailedError | None:
        """Why a tick can't follow what the worker holds, or None."""
        assert request.tick is not None, "only ticks have a parent"
        record = self._records[request.session_id]
        completed = record.completed if record.life == request.life else None
        index = request.tick.chunk_index
        if index > 0 and completed is None:
            return NotResidentError(
                f"session {request.session_id} is not resident, so chunk {index} can't continue it",
                field="session_id",
            )
        if request.parent_request_id == (completed or request.life):
            return None
        return TickFailedError(
            f"chunk {index} follows {request.parent_request_id!r:.200}, "
            f"the worker's last is {completed or request.life!r:.200}",
            field="parent_request_id",
            code="parent_mismatch",
        )

    def holds(self, session_id: str, life: str) -> bool:
        """Whether this life of the session has, or may have, memory here."""
        return self.life_of(session_id) == life

    def life_of(self, session_id: str) -> str | None:
        """The life of the session that has, or may have, memory here."""
        record = self._records.get(session_id)
        return None if record is None else record.life

    def began(self, request: WorkerRequest) -> None:
        """A tick is about to run: whatever becomes of it, its life has to be released, and nothing follows it yet."""
        record = self._records[request.session_id]
        record.life, record.completed = request.life, None

    def completed(self, request: WorkerRequest) -> None:
        """The tick made its chunk."""
        self._records[request.session_id].completed = request.request_id

    def released(self, session_id: str) -> str | None:
        """The session's memory is gone; returns the life that it was of."""
        record = self._records.get(session_id)
        if record is None:
            return None
        life, record.life, record.completed = record.life, None, None
        record.touched_s = self._clock()
        return life

    def holdings(self) -> dict[str, Holding]:
        """Every session that has, or may have, memory here."""
        return {
            session_id: Holding(record.life, record.fence)
            for session_id, record in self._records.items()
            if record.life is not None
        }

    def forget_old(self) -> None:
        """Drops records of sessions that have had no memory here, and no request, for `keep_s`."""
        limit = self._clock() - self._keep_s
        old = [
            session_id
            for session_id, record in self._records.items()
            if record.life is None and record.touched_s < limit
        ]
        for session_id in old:
            del self._records[session_id]
