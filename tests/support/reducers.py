"""A control reducer that fails where a test wants it to."""

from typing import Any

from actors.reducers.base import PreparedControls
from actors.reducers.latest import LatestValueReducer
from contracts.errors import InvalidArgumentError
from contracts.events import ARDiffusionSessionEvent

NAME = "scripted"


class ScriptedReducer(LatestValueReducer):
    """Remembers how many events it has reduced. `fails_in` names the method that raises; `returns` what prepare gives."""

    fails_in = ""
    returns: Any = None
    calls: list[str] = []  # noqa: RUF012 - all sessions of a test share it on purpose

    def __init__(self) -> None:
        self.count = 0

    def prepare(self, current_controls: Any, events: Any, chunk_index: int) -> PreparedControls:
        self._called("prepare")
        if type(self).returns is not None:
            return type(self).returns
        reduced = super().prepare(current_controls, events, chunk_index)
        return PreparedControls(reduced.controls, {"count": self.count + len(events)})

    def commit(self, prepared: PreparedControls) -> None:
        self._called("commit")
        self.load_state(prepared.private_state)

    def check(self, event: ARDiffusionSessionEvent) -> None:
        """Refuses prompts that say so."""
        self._called("check")
        if event.prompt == "refuse me":
            raise InvalidArgumentError("this one is not understood", field="prompt")

    def load_state(self, state: object) -> None:
        self.count = 0 if state is None else state["count"]  # type: ignore[index]

    def _called(self, name: str) -> None:
        type(self).calls.append(name)
        if type(self).fails_in == name:
            raise RuntimeError(f"{name} broke \ud800")
