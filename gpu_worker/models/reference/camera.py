"""Camera keys to world points: w a s d move, i j k l look."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from contracts.errors import InvalidArgumentError
from contracts.events import ARDiffusionControlInput
from contracts.lingbot import CAMERA_ACTIONS_SCHEMA, CAMERA_TRACK, HeldKeys, parse_action_frames
from gpu_worker.models.reference.spec import FRAMES, GRID

MOTION_SIZE: Final = 4
"""Forward, right, yaw and pitch of one frame, each -1, 0 or 1."""

_MOVE: Final = 0.15
_YAW: Final = math.radians(7)
_PITCH: Final = math.radians(5)
_MAX_PITCH: Final = math.radians(80)


@dataclass(frozen=True, slots=True)
class CameraPose:
    """Where a session's camera is: position in world units, angles in radians."""

    x: float = 0.0
    y: float = 0.0
    z: float = 0.0
    yaw: float = 0.0
    pitch: float = 0.0

    def moved(self, motion: Sequence[float]) -> CameraPose:
        """The pose one latent frame later. Looking comes first, then walking in the direction of view."""
        forward, right, turn, tilt = motion
        yaw = self.yaw + _YAW * turn
        pitch = min(_MAX_PITCH, max(-_MAX_PITCH, self.pitch + _PITCH * tilt))
        x = self.x + _MOVE * (forward * math.sin(yaw) + right * math.cos(yaw))
        z = self.z + _MOVE * (forward * math.cos(yaw) - right * math.sin(yaw))
        return CameraPose(x, self.y, z, yaw, pitch)


def held_keys(controls: Sequence[ARDiffusionControlInput]) -> tuple[HeldKeys, ...]:
    """The keys of each latent frame; none are held where the tick has no camera control. Other tracks are not ours.

    Raises InvalidArgumentError naming the field.
    """
    for control in controls:
        if control.track == CAMERA_TRACK:
            if control.schema != CAMERA_ACTIONS_SCHEMA:
                raise InvalidArgumentError(
                    f"the camera track takes schema {CAMERA_ACTIONS_SCHEMA}, got {control.schema!r:.80}",
                    field="schema",
                )
            return parse_action_frames(control.data, FRAMES)
    return ((),) * FRAMES


def motion_of(keys: HeldKeys) -> tuple[float, float, float, float]:
    """(forward, right, yaw, pitch) of held keys; opposite keys cancel."""

    def axis(plus: str, minus: str) -> float:
        return float(plus in keys) - float(minus in keys)

    return axis("w", "s"), axis("d", "a"), axis("l", "j"), axis("i", "k")


def patch_points(pose: CameraPose) -> torch.Tensor:
    """World points [3, GRID, GRID] that the patches look at: a picture plane one unit before the camera."""
    centres = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID * 2 - 1
    down, right = torch.meshgrid(centres, centres, indexing="ij")
    sin_p, cos_p = math.sin(pose.pitch), math.cos(pose.pitch)
    sin_y, cos_y = math.sin(pose.yaw), math.cos(pose.yaw)
    up = cos_p * -down + sin_p
    ahead = cos_p + sin_p * down
    points = torch.stack(
        (
            pose.x + cos_y * right + sin_y * ahead,
            pose.y + up,
            pose.z - sin_y * right + cos_y * ahead,
        )
    )
    return points.float()
