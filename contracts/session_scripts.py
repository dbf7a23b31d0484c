"""The scripts that change a session: one typed function a Lua file. Only the owner of its partition calls them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from contracts.broker import Client, map_exceptions
from contracts.commands import Condition
from contracts.errors import OwnershipLostError
from contracts.keys import Keys
from contracts.lifecycle import Status, Trigger
from contracts.messages import InFlight, WorkerRequest
from contracts.scripts import Argument, ScriptRunner
from contracts.state import SessionState

Entry = tuple[str, dict[bytes, bytes]]
"""A stream entry: its id and its fields."""


class Outcome(StrEnum):
    """What a script says it did, or why it did nothing."""

    CREATED = "CREATED"
    ANSWERED = "ANSWERED"
    EXISTS = "EXISTS"
    BEGUN = "BEGUN"
    NEWER = "NEWER"
    STATUS = "STATUS"
    BUSY = "BUSY"
    KEPT = "KEPT"
    COMMITTED = "COMMITTED"
    DUP = "DUP"
    STALE = "STALE"
    FAILED = "FAILED"
    RESET = "RESET"
    CLOSED = "CLOSED"
    CLEANUP_FAILED = "CLEANUP_FAILED"
    ENDED = "ENDED"
    SENT = "SENT"
    DONE = "DONE"


@dataclass(frozen=True, slots=True)
class Limits:
    """Lengths of the capped streams, and times in milliseconds.

    Args:
        answers, chunks, rejected, history: entries kept.
        batch: entries read at once.
        orphan_ttl_ms: how long the answers about a session that does not exist are kept.
        closed_retention_ms: how long the keys of a CLOSED session are kept.
        queue_limit_ms: how long a tick may wait at the worker.
    """

    answers: int = 1_000
    chunks: int = 1_000
    rejected: int = 10_000
    history: int = 1_000
    batch: int = 512
    orphan_ttl_ms: int = 3_600_000
    closed_retention_ms: int = 3_600_000
    queue_limit_ms: int = 60_000


@dataclass(frozen=True, slots=True)
class Rejection:
    """One entry of the events stream that is not applied; `forget` frees its id for another event."""

    entry_id: str
    event_id: str
    reason: str
    message: str
    forget: bool


@dataclass(frozen=True, slots=True)
class Committed:
    """What `commit` did; `newer` are events that came meanwhile."""

    outcome: Outcome
    now_ms: int = 0
    accepted_to_applied_ms: int | None = None
    newer: tuple[Entry, ...] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """What makes a session FAILED: the trigger, a failure code, a message for a person, and the field at fault."""

    trigger: Trigger
    code: str
    message: str
    field: str | None = None


def parse_entries(reply: Sequence[Any]) -> tuple[Entry, ...]:
    """Stream entries of a raw reply, as a script or a plain read gives them."""
    return tuple((entry[0].decode(), _fields(entry[1])) for entry in reply)


def _fields(raw: Any) -> dict[bytes, bytes]:
    return raw if isinstance(raw, dict) else dict(zip(raw[::2], raw[1::2], strict=True))


def _flat(pairs: Mapping[str, str]) -> list[str]:
    return [part for pair in pairs.items() for part in pair]


class SessionScripts(ScriptRunner):
    """Scripts on the slot of one session.

    Args:
        by: who acts, for the history.
        cluster: the worker's stream lies on another slot, so a request is sent after the script that records it; whoever
            adopts the session sends again what a crash in between left unsent.

    Each raises OwnershipLostError when a newer epoch owns the session, or it is gone.
    """

    def __init__(self, client: Client, keys: Keys, limits: Limits, *, by: str, cluster: bool = False) -> None:
        super().__init__(client, keys)
        self.limits = limits
        self.by = by
        self.cluster = cluster

    async def _owned(self, name: str, keys: Sequence[str], args: Sequence[Argument]) -> list[Any]:
        reply = await self.run(name, keys, args)
        if reply[0] in ("FENCED", "NONE"):
            raise OwnershipLostError(
                f"{name} was refused: the session has another owner ({reply[0].lower()})"
            )
        return reply

    async def adopt(self, session_id: str, epoch: int) -> SessionState | None:
        """Takes the session over; None if there is none."""
        reply = await self.run("adopt", [self.keys.session(session_id).state], [epoch])
        if reply[0] == "NONE":
            return None
        if reply[0] == "FENCED":
            raise OwnershipLostError(f"session {session_id} belongs to epoch {int(reply[1])}")
        return SessionState.from_hash(session_id, _fields(reply[1]))

    async def create(
        self, session_id: str, epoch: int, command_id: str, answer: str, fields: Mapping[str, str]
    ) -> Outcome:
        """Writes a new session's state: CREATED, ANSWERED or EXISTS."""
        k = self.keys.session(session_id)
        keys = [k.state, k.events, k.ids, k.chunks, k.ticks, k.rejected, k.answers, k.answered, k.history]
        args: list[Argument] = [
            epoch,
            command_id,
            answer,
            self.limits.answers,
            self.limits.history,
            self.by,
            *_flat(fields),
        ]
        return Outcome((await self._owned("create", keys, args))[0])

    async def begin_tick(
        self,
        state: SessionState,
        record: InFlight,
        request: WorkerRequest,
        worker: str,
        *,
        cursor: str,
        strict: bool,
    ) -> tuple[Outcome, tuple[Entry, ...]]:
        """Records a tick as in flight and sends it: BEGUN, NEWER (with the entries), ANSWERED, STATUS, BUSY or STALE."""
        k = self.keys.session(state.session_id)
        args: list[Argument] = [state.epoch, record.command_id or "", record.to_json(), record.fence, cursor]
        args += ["strict" if strict else "floor", self.limits.batch, self.limits.queue_limit_ms]
        keys = [k.state, k.events, k.ids, k.answers, k.answered]
        reply = await self._sending("begin_tick", keys, args, request, worker)
        outcome = Outcome(reply[0])
        return outcome, parse_entries(reply[1]) if outcome is Outcome.NEWER else ()

    async def commit(
        self, state: SessionState, chunk: Mapping[str, str], answer_head: str, *, incarnation: str, accepted_ms: int | None,
        cursor: str, ticks_kept: int | None,
    ) -> Committed:  # fmt: skip
        """Commits the tick in flight: COMMITTED, DUP or STALE.

        Args:
            chunk: fields of the `chunks` entry that the host knows.
            answer_head: the command's answer, open at its end for the values that only the script knows.
            accepted_ms: broker time at which the oldest applied event was accepted.
            cursor: id of the last event entry that was read.
            ticks_kept: length of the recording, None for all.
        """
        k = self.keys.session(state.session_id)
        keys = [k.state, k.events, k.ids, k.chunks, k.ticks, k.answers, k.answered]
        accepted: Argument = "" if accepted_ms is None else accepted_ms
        args: list[Argument] = [
            state.epoch,
            chunk["request_id"],
            incarnation,
            accepted,
            answer_head,
            self.limits.answers,
        ]
        args += [
            self.limits.chunks,
            -1 if ticks_kept is None else ticks_kept,
            cursor,
            self.limits.batch,
            *_flat(chunk),
        ]
        reply = await self._owned("commit", keys, args)
        if reply[0] != "COMMITTED":
            return Committed(Outcome(reply[0]))
        waited = int(reply[2]) if reply[2] else None
        return Committed(Outcome.COMMITTED, int(reply[1]), waited, parse_entries(reply[3]))

    async def fail(
        self, state: SessionState, failure: Failure, *, allowed: Sequence[Status], command_id: str, answer: str,
        release: tuple[InFlight, WorkerRequest, str] | None,
    ) -> Outcome:  # fmt: skip
        """Makes the session FAILED, ends the command and sends the release, if one is due: FAILED, STATUS or STALE."""
        k = self.keys.session(state.session_id)
        record, request, worker = release if release else (None, None, None)
        args: list[Argument] = [state.epoch, state.inflight.request_id if state.inflight else "", state.life]
        args += [failure.trigger, ",".join(allowed), failure.code, failure.message]
        args += [record.to_json() if record else "", record.fence if record else 0, command_id, answer]
        args += [self.limits.answers, self.limits.history, self.by]
        reply = await self._sending(
            "fail", [k.state, k.answers, k.answered, k.history], args, request, worker
        )
        return Outcome(reply[0])

    async def begin_reset(
        self, state: SessionState, record: InFlight, request: WorkerRequest, worker: str
    ) -> Outcome:
        """Records a reset as in flight and sends it: BEGUN, ANSWERED, STATUS, BUSY or STALE."""
        k = self.keys.session(state.session_id)
        args: list[Argument] = [state.epoch, record.command_id or "", record.to_json(), record.fence, worker]
        reply = await self._sending("begin_reset", [k.state, k.answers, k.answered], args, request, worker)
        return Outcome(reply[0])

    async def finish_reset(
        self, state: SessionState, request_id: str, incarnation: str, answer_head: str
    ) -> Outcome:
        """Begins the new life: RESET, DUP or STALE. `answer_head` is open at its end for the floor."""
        k = self.keys.session(state.session_id)
        keys = [k.state, k.events, k.ids, k.rejected, k.answers, k.answered, k.history]
        args: list[Argument] = [state.epoch, request_id, incarnation, answer_head]
        args += [self.limits.answers, self.limits.history, self.limits.rejected, self.by]
        return Outcome((await self._owned("finish_reset", keys, args))[0])

    async def begin_close(
        self, state: SessionState, record: InFlight, request: WorkerRequest | None, worker: str | None, reason: str,
        *, only_if: Condition | None = None,
    ) -> Outcome:  # fmt: skip
        """Makes the session CLOSING and sends the release (none to a worker that is gone): BEGUN or why not.

        Under a condition that does not hold it is KEPT.
        """
        k = self.keys.session(state.session_id)
        args: list[Argument] = [state.epoch, record.command_id or "", record.to_json(), record.fence]
        args += [self.limits.history, self.by, reason, only_if or ""]
        looked_at = {None: [], Condition.ABSENT: [k.presence], Condition.IDLE: [k.events, k.chunks]}
        keys = [k.state, k.answers, k.answered, k.history, *looked_at[only_if]]
        return Outcome((await self._sending("begin_close", keys, args, request, worker))[0])

    async def finish_close(self, state: SessionState, request_id: str, answer: str) -> Outcome:
        """Makes the session CLOSED: CLOSED or STALE."""
        k = self.keys.session(state.session_id)
        keys = [k.state, k.events, k.ids, k.rejected, k.answers, k.answered, k.history, k.chunks, k.ticks]
        args: list[Argument] = [state.epoch, request_id, answer, self.limits.answers, self.limits.history]
        args += [self.limits.rejected, self.by, self.limits.closed_retention_ms]
        return Outcome((await self._owned("finish_close", keys, args))[0])

    async def fail_close(
        self, state: SessionState, request_id: str, error: str, answer: str
    ) -> tuple[Outcome, int, int]:
        """Makes the session a tombstone: (CLEANUP_FAILED or STALE, attempts so far, now ms)."""
        k = self.keys.session(state.session_id)
        args: list[Argument] = [
            state.epoch,
            request_id,
            error,
            answer,
            self.limits.answers,
            self.limits.history,
            self.by,
        ]
        reply = await self._owned("fail_close", [k.state, k.answers, k.answered, k.history], args)
        return (
            (Outcome(reply[0]), int(reply[1]), int(reply[2])) if len(reply) > 1 else (Outcome(reply[0]), 0, 0)
        )

    async def end_inflight(self, state: SessionState, request_id: str, answer: str = "") -> Outcome:
        """Clears what is in flight and changes no status: ENDED or STALE."""
        k = self.keys.session(state.session_id)
        args: list[Argument] = [state.epoch, request_id, answer, self.limits.answers]
        return Outcome((await self._owned("end_inflight", [k.state, k.answers, k.answered], args))[0])

    async def resend(
        self, state: SessionState, record: InFlight, request: WorkerRequest, worker: str
    ) -> Outcome:
        """Sends what is in flight again under the fence of `record`: SENT or STALE."""
        expires: Argument = self.limits.queue_limit_ms if request.tick else ""
        args: list[Argument] = [
            state.epoch,
            record.request_id,
            record.to_json(),
            record.fence,
            worker,
            expires,
        ]
        reply = await self._sending(
            "resend", [self.keys.session(state.session_id).state], args, request, worker
        )
        return Outcome(reply[0])

    async def set_pace(
        self, state: SessionState, command_id: str, pace_ms: int | None, answer: str
    ) -> Outcome:
        """Starts (or with None stops) free running: DONE, ANSWERED or STATUS."""
        k = self.keys.session(state.session_id)
        pace: Argument = "" if pace_ms is None else pace_ms
        args: list[Argument] = [state.epoch, command_id, pace, answer, self.limits.answers]
        return Outcome((await self._owned("set_pace", [k.state, k.answers, k.answered], args))[0])

    async def free_attempt(self, state: SessionState) -> int:
        """Counts that a claim begins free running anew; returns how often at this chunk."""
        reply = await self._owned("free_attempt", [self.keys.session(state.session_id).state], [state.epoch])
        return int(reply[1])

    async def place(self, state: SessionState, worker: str) -> None:
        """Writes another placement of a session at chunk 0."""
        await self._owned("place", [self.keys.session(state.session_id).state], [state.epoch, worker])

    async def answer(self, session_id: str, epoch: int, command_id: str, answer: str) -> Outcome:
        """Ends a command that changes nothing: DONE or ANSWERED."""
        k = self.keys.session(session_id)
        args: list[Argument] = [epoch, command_id, answer, self.limits.answers, self.limits.orphan_ttl_ms]
        return Outcome((await self._owned("answer", [k.state, k.answers, k.answered], args))[0])

    async def reject_events(self, state: SessionState, rejections: Sequence[Rejection]) -> int:
        """Moves entries from `events` to `rejected`; returns how many were still there."""
        k = self.keys.session(state.session_id)
        args: list[Argument] = [state.epoch, self.limits.rejected]
        for item in rejections:
            args += [item.entry_id, item.event_id, item.reason, item.message, int(item.forget)]
        reply = await self._owned("reject_events", [k.state, k.events, k.ids, k.rejected], args)
        return int(reply[1])

    async def _sending(
        self,
        name: str,
        keys: list[str],
        args: list[Argument],
        request: WorkerRequest | None,
        worker: str | None,
    ) -> list[Any]:
        """Runs a script that sends `request`; on a cluster the request follows in a second step."""
        if request is None or worker is None:
            return await self._owned(name, keys, args)
        stream, fields = self.keys.worker(worker).requests, request.to_entry()
        if not self.cluster:
            return await self._owned(name, [*keys, stream], [*args, *_flat(fields)])
        reply = await self._owned(name, keys, args)
        if reply[0] in ("BEGUN", "SENT", "FAILED"):
            if request.tick is not None:
                fields["expires_at_ms"] = str(int(reply[1]) + self.limits.queue_limit_ms)
            with map_exceptions(stream):
                await self.client.xadd(stream, fields)  # type: ignore[arg-type]
        return reply
