"""Held keys to camera poses: one pose a latent frame, in float64, from where the last chunk left the camera.

Camera axes: x right, y down, z ahead. Poses are camera-to-world, [4, 4]. Per frame, looking before walking:

    R' = Ry(yaw) R Rx(pitch)          yaw = 6 deg * (l - j), pitch = 4 deg * (i - k)
    t' = t + 0.05 * ((w - s) * ahead + (d - a) * right)

with `ahead` and `right` the camera's z and x axes, laid flat: one looks up and down, one walks level.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from contracts.errors import InvalidArgumentError
from contracts.lingbot import HeldKeys

Array = NDArray[np.float64]

YAW_DEG: Final = 6.0
PITCH_DEG: Final = 4.0
MAX_PITCH_DEG: Final = 85.0
STEP: Final = 0.05
"""Way of one latent frame, in world units."""

REFERENCE_WIDTH: Final = 832
REFERENCE_HEIGHT: Final = 480
"""The picture that stored intrinsics refer to."""

_FOCAL: Final = 500.0
_FLAT_EPS: Final = 1e-6


def identity() -> Array:
    """The pose at the origin, looking along z."""
    return np.eye(4)


@dataclass(frozen=True, slots=True, eq=False)
class CameraState:
    """Where the camera stands between two chunks.

    Args:
        pose: [4, 4] camera-to-world.
        pitch_deg: how far it looks up. It is kept beside the pose because the limit counts what was asked for.
    """

    pose: Array = field(default_factory=identity)
    pitch_deg: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "pose", check_pose(self.pose))
        if isinstance(self.pitch_deg, bool) or not math.isfinite(self.pitch_deg):
            raise InvalidArgumentError(f"pitch must be finite, got {self.pitch_deg!r:.80}", field="pitch")


def check_pose(value: Any, name: str = "pose") -> Array:
    """`value` as a finite float64 [4, 4], a copy; InvalidArgumentError otherwise."""
    try:
        pose = np.array(value, dtype=np.float64)
    except (TypeError, ValueError):
        pose = np.empty(0)
    if pose.shape != (4, 4) or not np.isfinite(pose).all():
        raise InvalidArgumentError(f"{name} must be a finite 4x4 matrix", field=name)
    return pose


def integrate(frames: Sequence[HeldKeys], start: CameraState | None = None) -> tuple[Array, CameraState]:
    """The poses that held keys lead to.

    Args:
        frames: the keys of each latent frame, at least one frame.
        start: where the camera stood before; None is the origin.

    Returns:
        Poses [frames, 4, 4], and where the camera stands now.
    """
    if not frames:
        raise InvalidArgumentError("frames must not be empty", field="frames")
    state = CameraState() if start is None else start
    poses = []
    for keys in frames:
        state = moved(state, keys)
        poses.append(state.pose)
    return np.stack(poses), state


def moved(state: CameraState, keys: HeldKeys) -> CameraState:
    """The camera one latent frame later."""
    pitch_deg = PITCH_DEG * _axis(keys, "i", "k")
    if abs(state.pitch_deg + pitch_deg) > MAX_PITCH_DEG:
        pitch_deg = 0.0  # the step is dropped, not shortened: the camera stops where whole steps end
    yaw_deg = YAW_DEG * _axis(keys, "l", "j")
    rotation = _about_y(yaw_deg) @ state.pose[:3, :3] @ _about_x(pitch_deg)
    pose = identity()
    pose[:3, :3] = rotation
    pose[:3, 3] = (
        state.pose[:3, 3]
        + STEP * _axis(keys, "w", "s") * _flat(rotation[:, 2])
        + STEP * _axis(keys, "d", "a") * _flat(rotation[:, 0])
    )
    return CameraState(pose, state.pitch_deg + pitch_deg)


def action_intrinsics(width: int, height: int) -> Array:
    """[4] (fx, fy, cx, cy) of a camera that keys move, as stored: referring to the reference picture.

    Scaled to `width` x `height` its focal lengths become 500 pixels each, whatever the size.
    """
    _check_side("width", width)
    _check_side("height", height)
    return np.array(
        [
            _FOCAL * REFERENCE_WIDTH / width,
            _FOCAL * REFERENCE_HEIGHT / height,
            REFERENCE_WIDTH / 2,
            REFERENCE_HEIGHT / 2,
        ]
    )


def _check_side(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise InvalidArgumentError(f"resolution must be positive, got {name} {value!r:.80}", field=name)


def _axis(keys: HeldKeys, plus: str, minus: str) -> float:
    return float(plus in keys) - float(minus in keys)  # opposite keys cancel


def _flat(direction: Array) -> Array:
    level = np.array([direction[0], 0.0, direction[2]])
    return level / (np.linalg.norm(level) + _FLAT_EPS)


def _about_y(degrees: float) -> Array:
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return np.array([[c, 0.0, s], [0.0, 1.0, 0.0], [-s, 0.0, c]])


def _about_x(degrees: float) -> Array:
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return np.array([[1.0, 0.0, 0.0], [0.0, c, -s], [0.0, s, c]])
