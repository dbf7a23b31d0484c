"""What a control reducer is.

A reducer belongs to one session. `prepare` is speculative: it may be called several times for one chunk, and its result
counts only once `commit` got it. What it has to remember between chunks is plain JSON, because it lives in the broker:
it goes out as `PreparedControls.private_state` and comes back through `load_state`, maybe in another process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from contracts.errors import InvalidArgumentError, InvalidTypeError
from contracts.events import ARDiffusionControlInput, ARDiffusionSessionEvent, freeze


@dataclass(frozen=True, slots=True)
class PreparedControls:
    """The controls of one tick, and what the reducer remembers once that tick is committed.

    Args:
        controls: at most one value a track.
        private_state: a JSON value that only the reducer reads; None where it remembers nothing.
    """

    controls: tuple[ARDiffusionControlInput, ...]
    private_state: Any = None


@runtime_checkable
class ControlReducer(Protocol):
    """Turns events into controls. See also `ChecksEvents`, which is optional."""

    def prepare(
        self,
        current_controls: tuple[ARDiffusionControlInput, ...],
        events: tuple[ARDiffusionSessionEvent, ...],
        chunk_index: int,
    ) -> PreparedControls:
        """The controls of the next tick; changes nothing.

        Args:
            current_controls: those of the last committed tick.
            events: what the tick applies, in id order.
            chunk_index: index of the chunk.
        """
        ...

    def commit(self, prepared: PreparedControls) -> None:
        """Adopts what `prepare` returned; a private state that is not its own raises TypeError."""
        ...

    def reset(self) -> None:
        """Back to the initial state."""
        ...

    def load_state(self, state: object) -> None:
        """Adopts a private state from the broker, None being the initial one; any other kind raises TypeError."""
        ...


@runtime_checkable
class ChecksEvents(Protocol):
    """What a reducer may offer as well."""

    def check(self, event: ARDiffusionSessionEvent) -> None:
        """Raises InvalidArgumentError for an event that `prepare` would not understand.

        Called once for each event that arrives, before it may become part of a tick.
        """
        ...


def check_prepared(prepared: object) -> PreparedControls:
    """What a reducer's `prepare` returned, verified, with its controls in order of track.

    Raises:
        InvalidTypeError: it is no PreparedControls, or its controls are not control objects.
        InvalidArgumentError: two values for one track, or a private state that JSON does not carry.
    """
    if not isinstance(prepared, PreparedControls):
        raise InvalidTypeError(
            f"prepare must return PreparedControls, got {type(prepared).__name__}", field="prepared"
        )
    controls: object = prepared.controls
    if not isinstance(controls, tuple | list):
        raise InvalidTypeError(f"controls must be a tuple, got {type(controls).__name__}", field="controls")
    for control in controls:
        if not isinstance(control, ARDiffusionControlInput):
            raise InvalidTypeError(
                f"controls must hold ARDiffusionControlInput only, got {type(control).__name__}",
                field="controls",
            )
    in_order = tuple(sorted(controls, key=lambda control: control.track))
    if len({control.track for control in in_order}) != len(in_order):
        raise InvalidArgumentError("a reducer emits at most one value per track", field="controls")
    freeze(prepared.private_state, "private_state")
    return PreparedControls(in_order, prepared.private_state)
