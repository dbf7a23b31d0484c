"""Close and disconnect: CLOSING with a release in flight, then CLOSED, or a tombstone that a later close retries."""

from __future__ import annotations

from actors.session_core import Resync, SessionCore, answer_text
from contracts import failpoints
from contracts.commands import Command, Condition
from contracts.errors import SessionStateError, WorldlineError
from contracts.lifecycle import Status, Trigger
from contracts.messages import InFlight, WorkerReply
from contracts.session_scripts import Outcome


class Closing:
    """Closes of one session; those that come while one runs join it."""

    def __init__(self, core: SessionCore) -> None:
        self.core = core
        self._joined: list[str] = []

    async def begin(self, command: Command) -> None:
        """Puts the release in flight, joins the running one, or answers at once where the session is CLOSED."""
        core, state, command_id = self.core, self.core.held, command.command_id
        life = command.args.get("life")
        if life is not None and life != state.life:
            raise SessionStateError(
                f"session {core.session_id} lives another life, {state.life}", field="life"
            )
        if state.status is Status.CLOSED:
            await core.answer(command_id, {"status": Status.CLOSED})
            return
        if state.status is Status.CLOSING and state.inflight is not None:
            if state.inflight.command_id != command_id:
                self._joined.append(command_id)
            return
        await core.read_to_tail()
        await self._begin(command)

    async def _begin(self, command: Command) -> None:
        core, state = self.core, self.core.held
        reason = command.args.get("reason") or str(command.op)
        only_if = Condition(command.args["only_if"]) if command.args.get("only_if") else None
        record = core.release_record(command.command_id)
        gone = await core.services.placement.is_gone(state.worker)
        request = None if gone else core.request(record)

        async def script() -> Outcome:
            failpoints.hit("host.close.begin.before")
            outcome = await core.services.scripts.begin_close(
                state, record, request, state.worker, reason, only_if=only_if
            )
            failpoints.hit("host.close.begin.after")
            return outcome

        if state.status is Status.CLOSING:
            core.log.error("closing with nothing in flight; the release is sent")
            outcome = await script()
            await core.reload()
        else:
            outcome = await core.move(Trigger.CLOSE_REQUESTED, script, Outcome.BEGUN)
        if outcome is Outcome.KEPT:
            raise SessionStateError(f"session {core.session_id} is not {only_if} any more", field="only_if")
        if outcome is Outcome.ANSWERED:
            core.finish(command.command_id)
        elif outcome is not Outcome.BEGUN:
            raise Resync
        elif gone:
            await self.released(record)

    def forget_joined(self) -> None:
        """After the state was read again, commands that wait are looked at anew, and join anew."""
        self._joined.clear()

    async def finish(self, record: InFlight, reply: WorkerReply) -> None:
        """The worker has answered the release."""
        if reply.error is None:
            await self.released(record)
        else:
            await self._not_released(record, reply.error)

    async def released(self, record: InFlight) -> None:
        """Nothing of the session is left on the worker: it becomes CLOSED."""
        core, state = self.core, self.core.held
        answer = answer_text(record.command_id or "", {"status": Status.CLOSED})

        async def script() -> Outcome:
            failpoints.hit("host.close.finish.before")
            outcome = await core.services.scripts.finish_close(state, record.request_id, answer)
            failpoints.hit("host.close.finish.after")
            return outcome

        await core.services.placement.unreserve(state.worker, core.session_id, state.life)
        if await core.move(Trigger.CLEANUP_SUCCEEDED, script, Outcome.CLOSED) is not Outcome.CLOSED:
            raise Resync
        await self._answer_all(record, {"status": Status.CLOSED})

    async def _not_released(self, record: InFlight, error: WorldlineError) -> None:
        core, state = self.core, self.core.held
        error.message = (
            f"the release failed, the session is cleanup_failed until a close succeeds: {error.message}"
        )
        error.retryable = True
        answer = answer_text(record.command_id or "", error)

        async def script() -> Outcome:
            outcome, *_ = await core.services.scripts.fail_close(state, record.request_id, str(error), answer)
            return outcome

        # Before the state says so: whoever sees the tombstone also finds when it is due, and does not take it for due now.
        pause_ms = core.services.close_retry.pause_ms(state.close_attempts + 1)
        store = core.services.store
        await store.retry_due(core.session_id, await store.now_ms() + pause_ms)

        if (
            await core.move(Trigger.CLEANUP_FAILED, script, Outcome.CLEANUP_FAILED)
            is not Outcome.CLEANUP_FAILED
        ):
            raise Resync
        await self._answer_all(record, error)

    async def _answer_all(self, record: InFlight, result: dict[str, object] | WorldlineError) -> None:
        if record.command_id:
            self.core.finish(record.command_id)
        while self._joined:
            await self.core.answer(self._joined[0], result)
            self._joined.pop(0)
