"""What a session does when it hears that its memory on a worker is gone: evicted, or lost with the worker."""

from __future__ import annotations

from actors.closing import Closing
from actors.reset import Reset
from actors.session_core import Resync, SessionCore
from contracts.errors import NoCapacityError, WorldlineError
from contracts.lifecycle import Status, Trigger
from contracts.messages import NO_INCARNATION, InFlight, Kind, Notice, NoticeKind
from contracts.session_scripts import Failure, Outcome
from contracts.state import SessionState


class WorkerNews:
    """Notices about one session."""

    def __init__(self, core: SessionCore, reset: Reset, closing: Closing) -> None:
        self.core = core
        self.reset = reset
        self.closing = closing

    async def notice(self, notice: Notice) -> bool:
        """Acts on a notice about the present life and placement; ignores any other.

        Returns whether what is in flight has to be sent again, because the session was placed elsewhere.
        """
        state = self.core.state
        if state is None or notice.worker != state.worker or not _concerns(state, notice):
            return False
        if notice.kind is NoticeKind.EVICTED:
            await self._evicted(state, notice)
            return False
        if state.worker_incarnation is not None and notice.incarnation == state.worker_incarnation:
            return False  # the session already runs on the new start
        message = notice.message or f"worker {notice.worker} is gone"
        return await self.lost(state, message, restarted=notice.incarnation != NO_INCARNATION)

    async def _evicted(self, state: SessionState, notice: Notice) -> None:
        if state.inflight is not None and state.inflight.kind is Kind.RESET:
            return  # the reset drops the memory anyway, and the new life has none yet
        if state.status is Status.ACTIVE and notice.incarnation == (
            state.worker_incarnation or notice.incarnation
        ):
            text = notice.message or "another session needed the room"
            await self.core.fail(Failure(Trigger.EVICTED, "evicted", text), release=False)

    async def lost(self, state: SessionState, message: str, *, restarted: bool = False) -> bool:
        """The worker's memory is gone for good; returns as `notice` does. A worker that restarted is there again."""
        record = state.inflight
        if record is not None and record.kind is Kind.RELEASE:
            await (self.closing.released(record) if state.status is Status.CLOSING else self.released(record))
            return False
        nothing_to_lose = state.status is Status.ACTIVE and state.chunk_index == 0
        if nothing_to_lose or (record is not None and record.kind is Kind.RESET):
            return await self._again(state, record, restarted)
        if state.status is Status.ACTIVE:
            await self._fail(message)
        return False

    async def released(self, record: InFlight, error: WorldlineError | None = None) -> None:
        """The release after a failure was answered, or the worker is gone: nothing is left in flight.

        With an `error` the worker may still hold the memory, so the room stays reserved until a reset or a close.
        """
        core, state = self.core, self.core.held
        if await core.services.scripts.end_inflight(state, record.request_id) is not Outcome.ENDED:
            raise Resync
        core.state = state.changed(inflight=None)
        if error is None:
            await core.services.placement.unreserve(state.worker, core.session_id, state.life)
        else:
            core.log.warning("release after a failure failed", error=str(error))

    async def _again(self, state: SessionState, record: InFlight | None, restarted: bool) -> bool:
        """At chunk 0 and in a reset there is nothing to lose: the session is placed again."""
        core, placement = self.core, self.core.services.placement
        worker = state.worker
        if worker is None or not (restarted and await self._may_stay(worker, state.model)):
            life = record.life if record else state.life
            await placement.unreserve(worker, core.session_id, life)
            try:
                worker = await placement.place(state.model, core.session_id, life)
            except NoCapacityError as error:
                await self._fail(f"worker {state.worker} is gone, and {error}")
                return False
        await core.services.scripts.place(state, worker)
        await core.reload()
        return record is not None

    async def _may_stay(self, worker: str, model: str) -> bool:
        """Whether a worker that restarted serves the session again, or will once it has loaded its model."""
        info = await self.core.services.placement.info(worker)
        return info is None or info.model == model

    async def _fail(self, message: str) -> None:
        record = self.core.held.inflight
        trigger = Trigger.RESET_FAILED if record and record.kind is Kind.RESET else Trigger.WORKER_LOST
        await self.core.fail(Failure(trigger, "worker_lost", message), release=False)


def _concerns(state: SessionState, notice: Notice) -> bool:
    return notice.life == state.life or (state.inflight is not None and notice.life == state.inflight.life)
