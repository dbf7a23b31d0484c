"""Camera keys of LingBot worlds: what was pressed between two ticks becomes one list of held keys a latent frame.

Three ways to drive the `camera` track; an event of one kind replaces what an earlier one of another kind set up:

    state       keys are held until they change; what changed since the last tick is spread over its frames
    script      keys of coming frames, first in first out; pieces append; neutral once used up
    trajectory  poses pass through as they are
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from actors.reducers.base import PreparedControls
from contracts.errors import InvalidArgumentError, InvalidTypeError
from contracts.events import ARDiffusionControlInput, ARDiffusionSessionEvent
from contracts.identity import MAX_INTEGER
from contracts.lingbot import (
    CAMERA_KEYS,
    CAMERA_TRACK,
    CAMERA_TRAJECTORY_SCHEMA,
    FRAMES_PER_CHUNK,
    MAX_SCRIPT_FRAMES,
    SCRIPT_MODE,
    STATE_MODE,
    HeldKeys,
    ScriptActions,
    StateActions,
    actions_control,
    check_camera_schema,
    check_trajectory,
    parse_actions,
    parse_keys,
)

_FIELDS: Final = frozenset({"mode", "held", "script", "last_event_id"})


@dataclass(frozen=True, slots=True)
class _State:
    """What outlives a chunk.

    Args:
        mode: "state", "script", or None while no keys drive the camera.
        held: keys that are down, in mode "state".
        script: frames not yet used, in mode "script".
        last_event_id: of the last event applied, -1 at first.
    """

    mode: str | None = None
    held: HeldKeys = ()
    script: tuple[HeldKeys, ...] = ()
    last_event_id: int = -1

    def to_json(self) -> dict[str, Any] | None:
        """Frames are letters closed by ";" ("w;wl;;"), because a long script as nested lists is slow to carry."""
        if self == _State():
            return None
        script = "".join(f"{''.join(keys)};" for keys in self.script)
        return {
            "mode": self.mode,
            "held": "".join(self.held),
            "script": script,
            "last_event_id": self.last_event_id,
        }

    @classmethod
    def from_json(cls, value: object) -> _State:
        """InvalidTypeError for what `to_json` did not write."""
        if value is None:
            return cls()
        try:
            state = cls._decode(value)
        except (AttributeError, KeyError, TypeError, ValueError):
            state = None
        if state is None or state.to_json() != value:
            raise InvalidTypeError(
                f"no state of the LingBot camera reducer: {value!r:.120}", field="private_state"
            )
        return state

    @classmethod
    def _decode(cls, value: Any) -> _State | None:
        last = value["last_event_id"]
        known = set(value) == _FIELDS and value["mode"] in (None, STATE_MODE, SCRIPT_MODE)
        if not known or isinstance(last, bool) or not isinstance(last, int) or not -1 <= last <= MAX_INTEGER:
            return None
        script = tuple(parse_keys(list(letters)) for letters in value["script"].split(";")[:-1])
        return cls(value["mode"], parse_keys(list(value["held"])), script, last)


@dataclass(slots=True)
class _Draft:
    """The state while one chunk's events are applied to it."""

    mode: str | None
    held: HeldKeys
    script: list[HeldKeys]
    transitions: list[HeldKeys] = field(default_factory=list)

    def apply(self, actions: StateActions | ScriptActions) -> None:
        if isinstance(actions, ScriptActions):
            self.switch(SCRIPT_MODE)
            self.script += actions.frames
            _check_script_length(len(self.script))
        else:
            self.switch(STATE_MODE)
            self.transitions += actions.held

    def switch(self, mode: str | None) -> None:
        """Another mode starts from nothing."""
        if mode != self.mode:
            self.mode, self.held, self.script, self.transitions = mode, (), [], []

    def frames(self) -> tuple[HeldKeys, ...]:
        """The keys of each latent frame of this chunk."""
        if self.mode == SCRIPT_MODE:
            neutral: list[HeldKeys] = [()] * FRAMES_PER_CHUNK
            return tuple((self.script + neutral)[:FRAMES_PER_CHUNK])
        return _spread(self.transitions or [self.held])

    def after(self, last_event_id: int) -> _State:
        """The state once the chunk is committed."""
        held = self.transitions[-1] if self.transitions else self.held
        return _State(self.mode, held, tuple(self.script[FRAMES_PER_CHUNK:]), last_event_id)


def _spread(transitions: Sequence[HeldKeys]) -> tuple[HeldKeys, ...]:
    """Transitions shared out evenly over the frames of a chunk.

    A frame that covers several holds every key that was down during any of them, so that a quick tap is never lost.
    """
    frames, count = [], len(transitions)
    for index in range(FRAMES_PER_CHUNK):
        first = index * count // FRAMES_PER_CHUNK
        last = max(first + 1, (index + 1) * count // FRAMES_PER_CHUNK)
        down = {key for held in transitions[first:last] for key in held}
        frames.append(tuple(key for key in CAMERA_KEYS if key in down))
    return tuple(frames)


def _check_script_length(frames: int) -> None:
    if frames > MAX_SCRIPT_FRAMES:
        raise InvalidArgumentError(
            f"{frames} scripted frames would wait, the limit is {MAX_SCRIPT_FRAMES}", field="frames"
        )


class LingBotCameraControlReducer:
    """Reduces the `camera` track to frames of held keys; every other track keeps its latest value."""

    def __init__(self) -> None:
        self._state = _State()
        # Scripted frames of events that were checked and wait: event id -> frames. Several scripts may wait for one
        # tick, and together they must fit, or a tick would fail over what had been accepted.
        self._waiting: dict[int, int] = {}

    def check(self, event: ARDiffusionSessionEvent) -> None:
        """InvalidArgumentError for a camera control that is not understood, and for a script that has no room."""
        for control in event.controls:
            if control.track != CAMERA_TRACK:
                continue
            actions = _parse_camera(control)
            if isinstance(actions, ScriptActions):
                others = sum(frames for waiting, frames in self._waiting.items() if waiting != event.event_id)
                _check_script_length(len(self._state.script) + others + len(actions.frames))
                self._waiting[event.event_id] = len(actions.frames)

    def prepare(
        self,
        current_controls: tuple[ARDiffusionControlInput, ...],
        events: tuple[ARDiffusionSessionEvent, ...],
        chunk_index: int,  # noqa: ARG002 - part of the protocol
    ) -> PreparedControls:
        """Three frames of held keys on `camera` once keys have come; or the trajectory that holds; or nothing."""
        state = self._state
        draft = _Draft(state.mode, state.held, list(state.script))
        by_track = {control.track: control for control in current_controls}
        for control in (control for event in events for control in event.controls):
            actions = _parse_camera(control) if control.track == CAMERA_TRACK else None
            if actions is not None:
                draft.apply(actions)
                continue
            by_track[control.track] = control
            if control.track == CAMERA_TRACK:
                draft.switch(None)
        if draft.mode is not None:
            by_track[CAMERA_TRACK] = actions_control(draft.frames())
        last_event_id = events[-1].event_id if events else state.last_event_id
        controls = tuple(by_track[track] for track in sorted(by_track))
        return PreparedControls(controls, draft.after(last_event_id).to_json())

    def commit(self, prepared: PreparedControls) -> None:
        """Takes over the private state that `prepare` returned."""
        if not isinstance(prepared, PreparedControls):
            raise InvalidTypeError(
                f"commit takes PreparedControls, got {type(prepared).__name__}", field="prepared"
            )
        self.load_state(prepared.private_state)

    def reset(self) -> None:
        """No key is held, no script waits."""
        self._state = _State()
        self._waiting = {}

    def load_state(self, state: object) -> None:
        """Adopts a state from the broker; strict."""
        self._state = _State.from_json(state)
        applied = self._state.last_event_id
        self._waiting = {event_id: frames for event_id, frames in self._waiting.items() if event_id > applied}


def _parse_camera(control: ARDiffusionControlInput) -> StateActions | ScriptActions | None:
    """The actions of a camera control; None for a trajectory, which is only checked."""
    if check_camera_schema(control.schema) == CAMERA_TRAJECTORY_SCHEMA:
        check_trajectory(control.data)
        return None
    return parse_actions(control.data)
