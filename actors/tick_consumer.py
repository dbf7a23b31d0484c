"""One chunk: snapshot, speculative reduction, begin; then check of what came back, and commit.

Nothing of a tick lives only here. What the commit needs stands in the in-flight record, so the host that finishes a
tick need not be the one that began it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actors.intake import EventQueue, PendingEvent, entry_ms
from actors.reducers.base import PreparedControls, check_prepared
from actors.session_core import MAX_MESSAGE, Resync, SessionCore, answer_text, plain_text
from contracts import failpoints
from contracts.creation import recording_limit
from contracts.errors import (
    FAILURE_CODES,
    ChunkMetadataError,
    CommandExpiredError,
    SessionStateError,
    WorldlineError,
)
from contracts.events import controls_from_json, controls_to_json, loads
from contracts.fields import dumps
from contracts.identity import new_request_id
from contracts.lifecycle import Status, Trigger
from contracts.messages import ChunkOutput, InFlight, Kind, WorkerReply
from contracts.session_scripts import Committed, Entry, Failure, Outcome
from contracts.tick import ARDiffusionTickRequest, metadata_from_envelope

_FULL_TRIES = 3
"""So often the whole queue is tried before the tick takes only what lies below the newcomers."""


class TickConsumer:
    """Ticks of one session."""

    def __init__(self, core: SessionCore) -> None:
        self.core = core

    async def begin(self, command_id: str | None) -> None:
        """Puts the next tick in flight; SessionStateError outside ACTIVE."""
        core = self.core
        state = core.held
        if state.status is not Status.ACTIVE or state.worker is None:
            status = state.status.lower()
            raise SessionStateError(
                f"session {core.session_id} is {status}, a chunk needs active", field="status"
            )
        tries, below = 0, None
        while True:
            try:
                record, tick = self._prepare(command_id, core.queue.snapshot(below))
            except Exception as error:  # noqa: BLE001 - a reducer is foreign code
                failure = Failure(Trigger.TICK_FAILED, "reducer_failed", plain_text(error))
                await core.fail(failure, release=True, command_id=command_id)
                return
            failpoints.hit("host.begin.before")
            outcome, newer = await core.services.scripts.begin_tick(
                state,
                record,
                core.request(record, tick=tick),
                state.worker,
                cursor=core.queue.cursor,
                strict=tries == 0,
            )
            failpoints.hit("host.begin.after")
            if outcome is not Outcome.NEWER:
                self._begun(outcome, record, command_id)
                return
            tries += 1
            below = await self._below_newcomers(newer, tries)

    async def _below_newcomers(self, newer: Sequence[Entry], tries: int) -> int | None:
        """Takes newcomers in; returns the bound below which the next try takes events, None for all."""
        core = self.core
        known = set(core.queue.pending)
        await core.admit(newer)
        if len(newer) == core.services.scripts.limits.batch:
            await core.read_to_tail()
        if tries < _FULL_TRIES:
            return None
        return min(set(core.queue.pending) - known, default=0) if tries == _FULL_TRIES else 0

    def _begun(self, outcome: Outcome, record: InFlight, command_id: str | None) -> None:
        if outcome is Outcome.BEGUN:
            self.core.put_in_flight(record)
        elif outcome is Outcome.ANSWERED and command_id is not None:
            self.core.finish(command_id)
        else:
            raise Resync

    def _prepare(
        self, command_id: str | None, events: tuple[PendingEvent, ...]
    ) -> tuple[InFlight, ARDiffusionTickRequest]:
        core, state = self.core, self.core.held
        plain = tuple(item.event for item in events)
        prepared = check_prepared(core.reducer.prepare(state.controls, plain, state.chunk_index))
        prompts = [event.prompt for event in plain if event.prompt is not None]
        tick = ARDiffusionTickRequest(
            session_id=core.session_id,
            request_id=new_request_id(core.session_id, state.chunk_index),
            chunk_index=state.chunk_index,
            applied_event_ids=tuple(event.event_id for event in plain),
            prompt=prompts[-1] if prompts else state.prompt,
            controls=prepared.controls,
        )
        record = InFlight(
            request_id=tick.request_id,
            kind=Kind.TICK,
            fence=state.fence + 1,
            life=state.life,
            command_id=command_id,
            chunk_index=tick.chunk_index,
            event_ids=tick.applied_event_ids,
            entries=tuple(item.entry_id for item in events),
            prompt=tick.prompt,
            controls=controls_to_json(prepared.controls),
            reducer_state=None if prepared.private_state is None else dumps(prepared.private_state),
        )
        return record, tick

    def rebuild(self, record: InFlight) -> ARDiffusionTickRequest:
        """The tick that is in flight, from its record."""
        return ARDiffusionTickRequest(
            session_id=self.core.session_id,
            request_id=record.request_id,
            chunk_index=record.chunk_index if record.chunk_index is not None else 0,
            applied_event_ids=record.event_ids,
            prompt=record.prompt,
            controls=controls_from_json(record.controls),
        )

    async def finish(self, record: InFlight, reply: WorkerReply) -> None:
        """Commits what came back if it equals the tick exactly, else fails the session."""
        core = self.core
        if isinstance(reply.error, CommandExpiredError):
            await self._expired(record, reply.error)
            return
        if reply.error is not None:
            await core.fail(_failure(reply.error), release=True)
            return
        try:
            output = self._checked(record, reply)
        except WorldlineError as error:
            await core.fail(Failure(Trigger.TICK_FAILED, "metadata_mismatch", str(error)), release=True)
            return
        prepared = _prepared(record)
        failpoints.hit("host.reduce.before")
        try:
            core.reducer.commit(prepared)
        except Exception as error:  # noqa: BLE001 - a reducer is foreign code
            await core.fail(Failure(Trigger.TICK_FAILED, "reducer_failed", plain_text(error)), release=True)
            return
        failpoints.hit("host.reduce.after")
        await self._commit(record, reply, output, prepared)

    def _checked(self, record: InFlight, reply: WorkerReply) -> ChunkOutput:
        if reply.output is None:
            raise ChunkMetadataError("the worker answered a tick without an output", field="output")
        metadata_from_envelope(reply.output.metadata).check_equals(self.rebuild(record))
        return reply.output

    async def _expired(self, record: InFlight, error: CommandExpiredError) -> None:
        core = self.core
        answer = answer_text(record.command_id, error) if record.command_id else ""
        if (
            await core.services.scripts.end_inflight(core.held, record.request_id, answer)
            is not Outcome.ENDED
        ):
            raise Resync
        core.state = core.held.changed(inflight=None)
        # Its events are pending again; after a takeover they have not been read here, so the queue is read anew.
        core.queue = EventQueue(limit=core.held.max_pending_events)
        if record.command_id:
            core.finish(record.command_id)

    async def _commit(
        self, record: InFlight, reply: WorkerReply, output: ChunkOutput, prepared: PreparedControls
    ) -> None:
        core, state = self.core, self.core.held
        result = _result(state.life, record, reply, output)
        failpoints.hit("host.commit.before")
        committed = await core.services.scripts.commit(
            state,
            _entry_fields(result),
            _answer_head(record.command_id or "", result),
            incarnation=reply.incarnation,
            accepted_ms=min(map(entry_ms, record.entries), default=None),
            cursor=core.queue.cursor,
            ticks_kept=recording_limit(state.recording),
        )
        failpoints.hit("host.commit.after")
        if committed.outcome is not Outcome.COMMITTED:
            raise Resync
        await self._committed(record, reply, prepared, committed)
        if record.command_id:
            core.finish(record.command_id)

    async def _committed(
        self, record: InFlight, reply: WorkerReply, prepared: PreparedControls, committed: Committed
    ) -> None:
        core, state = self.core, self.core.held
        core.state = state.changed(
            inflight=None,
            chunk_index=state.chunk_index + 1,
            event_floor=record.event_ids[-1] if record.event_ids else state.event_floor,
            prompt=record.prompt,
            controls=prepared.controls,
            reducer_state=prepared.private_state,
            last_request_id=record.request_id,
            worker_incarnation=reply.incarnation,
        )
        core.queue.applied(record.event_ids)
        if committed.newer:
            await core.admit(committed.newer)


def _failure(error: WorldlineError) -> Failure:
    """A worker's error as the session's failure; a code that is none of the failure codes is the model's."""
    code, message = (
        (error.code, error.message)
        if error.code in FAILURE_CODES
        else ("model_error", f"{error.code}: {error}")
    )
    return Failure(Trigger.TICK_FAILED, code, message[:MAX_MESSAGE], error.field)


def _prepared(record: InFlight) -> PreparedControls:
    state = None if record.reducer_state is None else loads(record.reducer_state, "reducer_state")
    return PreparedControls(controls_from_json(record.controls), state)


def _result(life: str, record: InFlight, reply: WorkerReply, output: ChunkOutput) -> dict[str, Any]:
    return {
        "life": life,
        "chunk_index": record.chunk_index,
        "request_id": record.request_id,
        "applied_event_ids": list(record.event_ids),
        "payload": output.payload,
        "content_type": output.content_type,
        "sha256": output.sha256,
        "bytes": output.bytes,
        "frames": output.frames,
        "queued_ms": reply.queued_ms,
        "executed_ms": reply.executed_ms,
    }


def _entry_fields(result: dict[str, Any]) -> dict[str, str]:
    """The flat fields of the `chunks` entry; lists are JSON, what is None is left out."""
    return {
        name: dumps(value) if isinstance(value, list) else str(value)
        for name, value in result.items()
        if value is not None
    }


def _answer_head(command_id: str, result: dict[str, Any]) -> str:
    """The answer without its end: the commit script adds the values that only it knows, and closes it."""
    return dumps({"command_id": command_id, "ok": True, "result": result}).removesuffix("}}") + ","
