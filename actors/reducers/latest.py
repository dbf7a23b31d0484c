"""The default reducer: the latest value of each track holds until a newer one comes."""

from __future__ import annotations

from actors.reducers.base import PreparedControls
from contracts.errors import InvalidTypeError
from contracts.events import ARDiffusionControlInput, ARDiffusionSessionEvent


class LatestValueReducer:
    """Keeps nothing of its own: what holds is in the session's controls already."""

    def prepare(
        self,
        current_controls: tuple[ARDiffusionControlInput, ...],
        events: tuple[ARDiffusionSessionEvent, ...],
        chunk_index: int,  # noqa: ARG002 - part of the protocol
    ) -> PreparedControls:
        """Per track the value of the event with the highest id, else the current one."""
        by_track = {control.track: control for control in current_controls}
        for event in events:
            by_track.update((control.track, control) for control in event.controls)
        return PreparedControls(tuple(by_track[track] for track in sorted(by_track)))

    def commit(self, prepared: PreparedControls) -> None:
        """Nothing to adopt."""
        self.load_state(prepared.private_state)

    def reset(self) -> None:
        """Nothing to forget."""

    def load_state(self, state: object) -> None:
        """None is the only state it has."""
        if state is not None:
            raise InvalidTypeError("the latest-value reducer has no private state", field="private_state")
