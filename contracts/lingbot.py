"""Camera keys and trajectories of LingBot worlds: what a producer sends, and what a tick carries to the pipeline.

    event  lingbot.camera_actions.v1     {"mode": "state", "transitions": [{"actions": ["w"], "client_ts_ms": 5}, ...]}
    event  lingbot.camera_actions.v1     {"mode": "script", "frames": [["w"], ["w", "l"], [], ...]}
    tick   lingbot.camera_actions.v1     {"mode": "frames", "frames": [["w"], ["w"], []]}
    both   lingbot.camera_trajectory.v1  {"poses": [4x4, ...], "intrinsics": [[fx, fy, cx, cy], ...]}

The reducer turns the first two into the third; the pipeline reads the last two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from contracts.errors import InvalidArgumentError
from contracts.events import ARDiffusionControlInput
from contracts.identity import check_index

CAMERA_TRACK: Final = "camera"
CAMERA_ACTIONS_SCHEMA: Final = "lingbot.camera_actions.v1"
CAMERA_TRAJECTORY_SCHEMA: Final = "lingbot.camera_trajectory.v1"
CAMERA_SCHEMAS: Final = (CAMERA_ACTIONS_SCHEMA, CAMERA_TRAJECTORY_SCHEMA)

CAMERA_KEYS: Final = ("w", "a", "s", "d", "i", "j", "k", "l")
"""Move with w, a, s, d; look with i, j, k, l. Also the canonical order."""

STATE_MODE: Final = "state"
SCRIPT_MODE: Final = "script"
FRAMES_MODE: Final = "frames"

FRAMES_PER_CHUNK: Final = 3
"""Latent frames of one chunk, each with its own list of held keys."""

MAX_SCRIPT_FRAMES: Final = 4096

POSES_PER_CHUNK: Final = 9
"""Poses that a chunk goes along, one a pixel frame of its own; what a trajectory holds beyond them is not used."""

_MAX_FLOAT32: Final = 3.4028234663852886e38

HeldKeys = tuple[str, ...]
"""The keys that are down during one latent frame, in canonical order."""


@dataclass(frozen=True, slots=True)
class StateActions:
    """What was held after each transition, oldest first; the last one stays held."""

    held: tuple[HeldKeys, ...]


@dataclass(frozen=True, slots=True)
class ScriptActions:
    """Keys of coming latent frames, one entry a frame."""

    frames: tuple[HeldKeys, ...]


@dataclass(frozen=True, slots=True)
class CameraTrajectory:
    """Camera-to-world poses [F][4][4] and intrinsics [F][4] (fx, fy, cx, cy at 832 x 480)."""

    poses: tuple[tuple[tuple[float, ...], ...], ...]
    intrinsics: tuple[tuple[float, ...], ...]


def parse_keys(value: object, field: str = "actions") -> HeldKeys:
    """Held keys in canonical order, each once; upper and lower case mean the same."""
    keys: set[object] = {key.lower() if isinstance(key, str) else None for key in _list(value, field)}
    if not keys <= set(CAMERA_KEYS):
        raise InvalidArgumentError(
            f"{field} may hold the keys W/A/S/D/I/J/K/L only, got {value!r:.80}", field=field
        )
    return tuple(key for key in CAMERA_KEYS if key in keys)


def parse_actions(data: Mapping[str, Any]) -> StateActions | ScriptActions:
    """The data of a camera action event, in mode "state" or "script"."""
    mode = data.get("mode")
    if mode == STATE_MODE:
        _only(data, ("mode", "transitions"), "camera actions")
        return StateActions(_transitions(data.get("transitions")))
    if mode == SCRIPT_MODE:
        _only(data, ("mode", "frames"), "camera actions")
        frames = _frames(data.get("frames"))
        if not 0 < len(frames) <= MAX_SCRIPT_FRAMES:
            raise InvalidArgumentError(
                f"a camera script has 1 to {MAX_SCRIPT_FRAMES} frames, got {len(frames)}", field="frames"
            )
        return ScriptActions(frames)
    raise InvalidArgumentError(
        f'camera actions have mode "state" or "script", got {mode!r:.80}', field="mode"
    )


def _transitions(value: object) -> tuple[HeldKeys, ...]:
    held, last_ms = [], 0
    for index, item in enumerate(_list(value, "transitions")):
        where = f"transitions[{index}]"
        if not isinstance(item, Mapping):
            raise InvalidArgumentError(f"{where} must be an object", field=where)
        _only(item, ("actions", "client_ts_ms"), where)
        held.append(parse_keys(item.get("actions"), f"{where}.actions"))
        if "client_ts_ms" in item:
            at_ms = check_index(item["client_ts_ms"], f"{where}.client_ts_ms")
            if at_ms < last_ms:
                raise InvalidArgumentError(
                    f"{where}.client_ts_ms must not decrease", field=f"{where}.client_ts_ms"
                )
            last_ms = at_ms
    if not held:
        raise InvalidArgumentError("transitions must not be empty", field="transitions")
    return tuple(held)


def actions_control(frames: Sequence[HeldKeys]) -> ARDiffusionControlInput:
    """The control that a tick carries: one list of held keys a latent frame."""
    data = {"mode": FRAMES_MODE, "frames": [list(held) for held in frames]}
    return ARDiffusionControlInput(CAMERA_TRACK, CAMERA_ACTIONS_SCHEMA, data)


def parse_action_frames(data: Mapping[str, Any], frame_count: int = FRAMES_PER_CHUNK) -> tuple[HeldKeys, ...]:
    """The keys of each latent frame, from the control that a tick carries."""
    if data.get("mode") != FRAMES_MODE:
        raise InvalidArgumentError(
            f"camera actions of a tick must have mode='frames', got {data.get('mode')!r:.80}", field="mode"
        )
    _only(data, ("mode", "frames"), "camera actions")
    frames = _frames(data.get("frames"))
    if len(frames) != frame_count:
        raise InvalidArgumentError(
            f"camera actions need exactly one action list per latent frame: {frame_count}, got {len(frames)}",
            field="frames",
        )
    return frames


def parse_action_script(
    value: object, field: str = "camera_action_script"
) -> tuple[tuple[HeldKeys, ...], ...]:
    """A whole script, chunk by chunk: `[[["w"], ["w"], []], ...]`."""
    chunks = [_frames(chunk, f"{field}[{index}]") for index, chunk in enumerate(_list(value, field))]
    if not chunks:
        raise InvalidArgumentError(f"{field} must not be empty", field=field)
    for index, frames in enumerate(chunks):
        if len(frames) != FRAMES_PER_CHUNK:
            raise InvalidArgumentError(
                f"{field}[{index}] must have exactly {FRAMES_PER_CHUNK} per-latent-frame action lists, got {len(frames)}",
                field=field,
            )
    return tuple(chunks)


def parse_trajectory(data: Mapping[str, Any]) -> CameraTrajectory:
    """Finite poses and intrinsics of equal, positive length."""
    _only(data, ("poses", "intrinsics"), "a camera trajectory")
    poses = tuple(
        tuple(_numbers(row, 4, f"poses[{i}]") for row in _list(pose, f"poses[{i}]", 4))
        for i, pose in enumerate(_list(data.get("poses"), "poses"))
    )
    intrinsics = tuple(
        _numbers(item, 4, f"intrinsics[{i}]")
        for i, item in enumerate(_list(data.get("intrinsics"), "intrinsics"))
    )
    if not poses or len(poses) != len(intrinsics):
        raise InvalidArgumentError(
            f"poses and intrinsics must have equal, positive length, got {len(poses)} and {len(intrinsics)}",
            field="poses",
        )
    return CameraTrajectory(poses, intrinsics)


def check_trajectory(data: Mapping[str, Any]) -> CameraTrajectory:
    """A trajectory that a chunk can go along: long enough, of float32 numbers, and with focal lengths."""
    trajectory = parse_trajectory(data)
    if len(trajectory.poses) < POSES_PER_CHUNK:
        raise InvalidArgumentError(
            f"a trajectory needs at least {POSES_PER_CHUNK} poses a chunk, got {len(trajectory.poses)}",
            field="poses",
        )
    for index, (pose, lens) in enumerate(zip(trajectory.poses, trajectory.intrinsics, strict=True)):
        for name, numbers in (("poses", (number for row in pose for number in row)), ("intrinsics", lens)):
            if any(abs(number) > _MAX_FLOAT32 for number in numbers):
                where = f"{name}[{index}]"
                raise InvalidArgumentError(f"{where} must hold finite float32 numbers", field=where)
        if not all(lens[:2]):
            where = f"intrinsics[{index}]"
            raise InvalidArgumentError(f"{where}: fx and fy must not be 0", field=where)
    return trajectory


def check_camera_schema(schema: str) -> str:
    """`schema` if it is one that the camera track knows."""
    if schema not in CAMERA_SCHEMAS:
        raise InvalidArgumentError(
            f"the camera track takes {' or '.join(CAMERA_SCHEMAS)}, got {schema!r:.80}", field="schema"
        )
    return schema


def camera_control(controls: Sequence[ARDiffusionControlInput]) -> ARDiffusionControlInput:
    """The one camera control of a tick, its schema checked."""
    found = [control for control in controls if control.track == CAMERA_TRACK]
    if len(found) != 1:
        raise InvalidArgumentError(
            f"a tick needs exactly one camera control, got {len(found)}", field="controls"
        )
    check_camera_schema(found[0].schema)
    return found[0]


def _frames(value: object, field: str = "frames") -> tuple[HeldKeys, ...]:
    return tuple(parse_keys(item, f"{field}[{index}]") for index, item in enumerate(_list(value, field)))


def _numbers(value: object, count: int, field: str) -> tuple[float, ...]:
    items = _list(value, field, count)
    if any(isinstance(item, bool) or not isinstance(item, int | float) for item in items):
        raise InvalidArgumentError(f"{field} must hold numbers only", field=field)
    try:
        numbers = tuple(float(item) for item in items)
    except OverflowError:
        numbers = (math.inf,)
    if not all(map(math.isfinite, numbers)):
        raise InvalidArgumentError(f"{field} must be finite", field=field)
    return numbers


def _list(value: object, field: str, length: int | None = None) -> Sequence[Any]:
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Sequence):
        raise InvalidArgumentError(f"{field} must be a list, got {type(value).__name__}", field=field)
    if length is not None and len(value) != length:
        raise InvalidArgumentError(f"{field} must have {length} items, got {len(value)}", field=field)
    return value


def _only(value: Mapping[str, Any], allowed: tuple[str, ...], what: str) -> None:
    unknown = sorted(set(value) - set(allowed))
    if unknown:
        raise InvalidArgumentError(f"{what}: unknown field {unknown[0]!r:.80}", field=unknown[0][:80])
