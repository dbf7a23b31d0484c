"""Reset: the worker drops what it holds, then the session starts again at chunk 0 in a new life."""

from __future__ import annotations

from actors.intake import EventQueue
from actors.session_core import MAX_MESSAGE, Resync, SessionCore
from contracts import failpoints
from contracts.errors import SessionStateError
from contracts.fields import dumps
from contracts.identity import new_request_id
from contracts.lifecycle import LIVE, Status, Trigger
from contracts.messages import InFlight, Kind, WorkerReply
from contracts.session_scripts import Failure, Outcome
from contracts.worker_scripts import ReserveResult


class Reset:
    """Resets of one session."""

    def __init__(self, core: SessionCore) -> None:
        self.core = core

    async def begin(self, command_id: str) -> None:
        """Puts the reset in flight; SessionStateError outside ACTIVE and FAILED, NoCapacityError without room."""
        core, state = self.core, self.core.held
        if state.status not in LIVE:
            raise SessionStateError(
                f"session {core.session_id} is {state.status.lower()}, a reset needs active or failed",
                field="status",
            )
        await core.read_to_tail()
        record = InFlight(
            request_id=(life := new_request_id(core.session_id, "reset")),
            kind=Kind.RESET,
            fence=state.fence + 1,
            life=life,
            command_id=command_id,
        )
        worker = await self.place(life)
        failpoints.hit("host.reset.begin.before")
        outcome = await core.services.scripts.begin_reset(state, record, core.request(record), worker)
        failpoints.hit("host.reset.begin.after")
        if outcome is Outcome.BEGUN:
            core.put_in_flight(record, worker)
        elif outcome is Outcome.ANSWERED:
            core.finish(command_id)
        else:
            raise Resync

    async def place(self, life: str) -> str:
        """Room for the new life: where the old one is, unless nothing of it can be there any more."""
        core, state, placement = self.core, self.core.held, self.core.services.placement
        worker = state.worker
        if worker is None or await placement.is_gone(worker):
            return await placement.place(state.model, core.session_id, life)
        reserved = await placement.reserve(worker, core.session_id, life)
        released = state.inflight is None and state.status is Status.FAILED
        if reserved is not ReserveResult.RESERVED and released:
            return await placement.place(state.model, core.session_id, life)
        # A worker that is silent but not lost may still hold the old life: only it can drop that.
        return worker

    async def finish(self, record: InFlight, reply: WorkerReply) -> None:
        """Begins the new life, or fails the session where the worker could not reset."""
        core, state = self.core, self.core.held
        if reply.error is not None:
            # The room was reserved for the life that now never begins; the present one has to be released from it.
            if state.worker is not None:
                await core.services.placement.reserve(state.worker, core.session_id, state.life)
            message = f"{reply.error.code}: {reply.error}"[:MAX_MESSAGE]
            await core.fail(Failure(Trigger.RESET_FAILED, "reset_failed", message), release=True)
            return
        head = dumps(
            {
                "command_id": record.command_id,
                "ok": True,
                "result": {"life": record.request_id, "chunk_index": 0},
            }
        )

        async def script() -> Outcome:
            failpoints.hit("host.reset.finish.before")
            outcome = await core.services.scripts.finish_reset(
                state, record.request_id, reply.incarnation, head.removesuffix("}}") + ',"event_floor":'
            )
            failpoints.hit("host.reset.finish.after")
            return outcome

        outcome = await core.move(Trigger.RESET_SUCCEEDED, script, Outcome.RESET)
        if outcome is not Outcome.RESET:
            raise Resync
        core.queue = EventQueue(limit=state.max_pending_events)
        if record.command_id:
            core.finish(record.command_id)
