"""The lifecycle machine, built from the one table in `contracts/lifecycle.py`.

One shared, synchronous machine serves all sessions. It keeps no model between transitions: a session is in it only
while it moves. The broker is written first and memory follows, so that memory never runs ahead: check that the trigger
is legal, await the script (which checks the stored status again), then fire. The `before` callback only verifies that
the script agreed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from transitions import Machine

from contracts.errors import SessionStateError
from contracts.lifecycle import INITIAL, TRANSITIONS, Status, Trigger, destination


@dataclass(eq=False)
class _Mover:
    """A session while it moves; `stored` is the status that the script says it wrote."""

    status: str
    stored: Status | None = None
    target: Status | None = None

    def verify(self) -> None:
        if self.stored is not self.target:
            raise SessionStateError(f"the broker stored {self.stored}, not {self.target}", field="status")


class Lifecycle:
    """Moves sessions from state to state; nothing else assigns one."""

    def __init__(self) -> None:
        self._machine = Machine(
            model=None,
            states=[str(status) for status in Status],
            initial=str(INITIAL),
            model_attribute="status",
            auto_transitions=False,
            queued=False,
        )
        for row in TRANSITIONS:
            for source in row.sources:
                self._machine.add_transition(str(row.trigger), str(source), str(row.dest), before="verify")

    def check(self, status: Status, trigger: Trigger) -> Status:
        """Where `trigger` leads from `status`; SessionStateError naming the state where it is illegal."""
        target = destination(trigger, status)
        if target is None:
            raise SessionStateError(
                f"the session is {status.lower()}: {trigger} is not allowed", field="status"
            )
        return target

    async def move(
        self, status: Status, trigger: Trigger, persist: Callable[[], Awaitable[Status]]
    ) -> Status:
        """Fires `trigger`; returns the new state.

        Args:
            status: the state in memory.
            persist: runs the script; returns the status that it stored.

        Raises SessionStateError for an illegal trigger, and whatever `persist` raises; memory is then unchanged.
        """
        target = self.check(status, trigger)
        mover = _Mover(status=str(status), target=target)
        self._machine.add_model(mover, initial=str(status))
        try:
            mover.stored = await persist()
            self._machine.events[str(trigger)].trigger(mover)
            return Status(mover.status)
        finally:
            self._machine.remove_model(mover)
