"""The camera of a session: what a tick's control says, where the last chunk left off, and the rays that follow.

Rays are steps from one frame to the next, so the first frame of a chunk needs the pose before it. That pose, the
*tail*, is put in front as an anchor, and the anchor's own ray frame is dropped.

Keys move a camera of our own, in a world that begins level at the origin; a trajectory comes in its producer's world,
whose axes nobody here knows: recorded ones have their ground anywhere, thousands of units from their origin. A tail is
therefore only used for the kind of control that it comes from. A chunk of keys behind a trajectory starts level from a
new origin; the first frame of a trajectory behind keys does not move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch

from contracts.events import ARDiffusionControlInput
from contracts.lingbot import (
    CAMERA_ACTIONS_SCHEMA,
    FRAMES_PER_CHUNK,
    HeldKeys,
    camera_control,
    parse_action_frames,
    parse_trajectory,
)
from gpu_worker.models.lingbot_world.actions import STEP, Array, CameraState, action_intrinsics, integrate
from gpu_worker.models.lingbot_world.rays import fold, pluecker_rays
from gpu_worker.models.lingbot_world.resolution import latent_frames
from gpu_worker.models.lingbot_world.trajectories import CameraPath, latent_path

PIXEL_FRAMES: Final = 4 * (FRAMES_PER_CHUNK - 1) + 1
"""Pixel frames of one block alone, and so the poses of a tick's trajectory: 9."""

LIVE_SCALE: Final = STEP
"""What live key presses divide translations by, so that one step is one whatever else the chunk does."""


@dataclass(frozen=True, slots=True, eq=False)
class CameraTail:
    """What a session's camera leaves behind a chunk. A new session has the default.

    Args:
        moved_by_keys: pose and pitch that keys go on from.
        trajectory_pose: [4, 4], the last pose of a trajectory, or None where the last chunk had none.
    """

    moved_by_keys: CameraState = field(default_factory=CameraState)
    trajectory_pose: Array | None = None


@dataclass(frozen=True, slots=True)
class PictureSize:
    """Height and width of a session's pictures, in pixels."""

    height: int
    width: int


def tick_camera(
    controls: Sequence[ARDiffusionControlInput],
    tail: CameraTail,
    size: PictureSize,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, CameraTail]:
    """The camera of one tick.

    Args:
        controls: the tick's; exactly one is a camera control.
        tail: of the chunk before. It is not changed: a chunk that fails leaves no trace.
        size: of the pictures.
        device: where to compute.
        dtype: of the result.

    Returns:
        [1, 384, 3, H/8, W/8] for the transformer, and the tail to keep once the chunk has succeeded.

    Raises:
        InvalidArgumentError: the control is not what its schema says; names the field.
    """
    control = camera_control(controls)
    if control.schema == CAMERA_ACTIONS_SCHEMA:
        path, left = action_path(parse_action_frames(control.data), tail.moved_by_keys, size)
        anchored, tail = True, CameraTail(left)
    else:
        path = latent_path(
            CameraPath.of_inline(parse_trajectory(control.data)), PIXEL_FRAMES, FRAMES_PER_CHUNK
        )
        anchored = tail.trajectory_pose is not None
        if tail.trajectory_pose is not None:
            path = _behind(tail.trajectory_pose, path)
        tail = CameraTail(trajectory_pose=path.poses[-1])
    return _folded(path, size, anchored=anchored, device=device, dtype=dtype), tail


def action_path(
    frames: Sequence[HeldKeys], start: CameraState, size: PictureSize
) -> tuple[CameraPath, CameraState]:
    """The path of held keys, its anchor in front: one pose more than `frames`; and where the camera stands then."""
    poses, left = integrate(frames, start)
    intrinsics = np.tile(action_intrinsics(size.width, size.height), (len(poses) + 1, 1))
    return CameraPath(np.concatenate((start.pose[None], poses)), intrinsics), left


def action_camera(
    frames: Sequence[HeldKeys],
    start: CameraState,
    size: PictureSize,
    *,
    translation_scale: float | None,
    device: torch.device | str,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, CameraState]:
    """The camera of held keys outside a tick: a whole script (scale None), or a live chunk (`LIVE_SCALE`).

    Returns [1, 384, frames, H/8, W/8], and where the camera stands then.
    """
    path, left = action_path(frames, start, size)
    rays = _folded(path, size, anchored=True, translation_scale=translation_scale, device=device, dtype=dtype)
    return rays, left


def trajectory_camera(
    path: CameraPath,
    num_frames: int,
    size: PictureSize,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The camera of a whole trajectory, embedded at once so that all its blocks have one scale.

    Args:
        path: one pose a pixel frame, at least `num_frames`.
        num_frames: pixel frames to generate, whole blocks.
        size: of the pictures.
        device: where to compute.
        dtype: of the result.

    Returns:
        [1, 384, latent frames, H/8, W/8], to be sliced block by block.
    """
    whole = latent_path(path, num_frames, latent_frames(num_frames))
    return _folded(whole, size, anchored=False, device=device, dtype=dtype)


def _behind(pose: Array, path: CameraPath) -> CameraPath:
    return CameraPath(
        np.concatenate((pose[None], path.poses)), np.concatenate((path.intrinsics[:1], path.intrinsics))
    )


def _folded(
    path: CameraPath,
    size: PictureSize,
    *,
    anchored: bool,
    translation_scale: float | None = None,
    device: torch.device | str,
    dtype: torch.dtype,
) -> torch.Tensor:
    rays = pluecker_rays(
        path, size.height, size.width, translation_scale=translation_scale, device=device, dtype=dtype
    )
    return fold(rays[1:] if anchored else rays)
