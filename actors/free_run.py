"""Free running: one chunk after the other without being asked, at a pace."""

from __future__ import annotations

from actors.placement import monotonic_ms
from actors.session_core import Resync, SessionCore, answer_text
from contracts.commands import Command, Op
from contracts.errors import SessionStateError
from contracts.lifecycle import Status
from contracts.session_scripts import Outcome


class FreeRun:
    """Pace of one session."""

    def __init__(self, core: SessionCore) -> None:
        self.core = core
        self._next_ms = 0.0
        self.found = False
        """It ran free when it was adopted, and has begun no tick by itself since."""

    def wait_ms(self) -> float | None:
        """How long until the next tick is due, at most 0 if it is; None where the session doesn't run free."""
        state = self.core.state
        if state is None or state.status is not Status.ACTIVE or state.pace_ms is None:
            return None
        return self._next_ms - monotonic_ms()

    def began(self) -> None:
        """A tick begins now."""
        state = self.core.state
        pace_ms = state.pace_ms if state and state.pace_ms is not None else 0
        self._next_ms = monotonic_ms() + pace_ms

    async def set_pace(self, command: Command) -> None:
        """Run and pause; SessionStateError outside ACTIVE."""
        core, state = self.core, self.core.held
        if state.status is not Status.ACTIVE:
            status = state.status.lower()
            raise SessionStateError(
                f"session {core.session_id} is {status}, {command.op} needs active", field="status"
            )
        pace_ms = command.args.get("pace_ms", 0) if command.op is Op.RUN else None
        if pace_ms is not None:
            # Before the answer: from then on the next owner must find it.
            await core.services.partitions.set_live(core.partition, core.epoch, core.session_id, live=True)
        answer = answer_text(command.command_id, {"pace_ms": pace_ms})
        outcome = await core.services.scripts.set_pace(state, command.command_id, pace_ms, answer)
        if outcome is Outcome.STATUS:
            raise Resync
        await core.reload()
        self._next_ms = 0.0
        await core.update_live()
        core.finish(command.command_id)
