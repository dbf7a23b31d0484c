"""Camera poses to Pluecker rays: what the transformer gets to see of a camera.

    relative   Q_i = inv(P_0) P_i
    step       D_0 = I,  D_i = inv(Q_(i-1)) Q_i          [R | t] each; t divided by the longest, or by a given scale
    pixel      x = (column + 0.5) * W / w, y likewise
    ray        direction = normalise(R normalise((x - cx) / fx, (y - cy) / fy, 1)), origin = t

Channels are (ox, oy, oz, dx, dy, dz).
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from contracts.errors import InvalidArgumentError
from gpu_worker.models.lingbot_world.actions import REFERENCE_HEIGHT, REFERENCE_WIDTH, Array
from gpu_worker.models.lingbot_world.trajectories import CameraPath

CHANNELS: Final = 6
FOLD: Final = 8
"""Pixels along each side of a latent pixel."""


def rigid_inverse(pose: Array) -> Array:
    """The inverse of rigid transforms [..., 4, 4]: (R^T, -R^T t)."""
    rotation = np.swapaxes(pose[..., :3, :3], -1, -2)
    inverse = np.zeros_like(pose)
    inverse[..., :3, :3] = rotation
    inverse[..., :3, 3:] = -rotation @ pose[..., :3, 3:]
    inverse[..., 3, 3] = 1
    return inverse


def frame_steps(poses: Array, translation_scale: float | None = None) -> Array:
    """What each frame moves by, [F, 4, 4]; the first one by nothing.

    Args:
        poses: [F, 4, 4] camera-to-world.
        translation_scale: what translations are divided by; None is the longest of them.
    """
    relative = rigid_inverse(poses[:1]) @ poses
    relative[0] = np.eye(4)
    steps = relative.copy()
    steps[1:] = rigid_inverse(relative[:-1]) @ relative[1:]
    if translation_scale is None:
        scale = float(np.linalg.norm(steps[:, :3, 3], axis=-1).max())
    else:
        scale = _positive_scale(translation_scale)
    if scale > 0:
        steps[:, :3, 3] /= scale
    return steps


def scaled_intrinsics(intrinsics: Array, height: int, width: int) -> Array:
    """[F, 4] for a picture of that size, from what refers to 832 x 480."""
    sides = np.array([width, height], np.float64)
    scaled = intrinsics * np.tile(sides, 2) / _REFERENCE
    # The largest (x - cx) / fx of the picture: what is that far from the axis has no direction in float32.
    with np.errstate(divide="ignore", invalid="ignore"):
        slopes = (np.abs(scaled[:, 2:]) + sides) / np.abs(scaled[:, :2])
    if not (slopes < _MAX_SLOPE).all():
        raise InvalidArgumentError(
            "intrinsics: fx and fy must not be 0, nor next to nothing beside the picture", field="intrinsics"
        )
    return scaled


_MAX_SLOPE: Final = 1e18
"""Its square is still a float32."""


_REFERENCE: Final[NDArray[np.float64]] = np.array(
    [REFERENCE_WIDTH, REFERENCE_HEIGHT, REFERENCE_WIDTH, REFERENCE_HEIGHT], np.float64
)


def pluecker_rays(
    path: CameraPath,
    height: int,
    width: int,
    *,
    rays_height: int | None = None,
    rays_width: int | None = None,
    translation_scale: float | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The rays of a path.

    Args:
        path: one pose a latent frame.
        height, width: the picture that the intrinsics are scaled to, in pixels.
        rays_height, rays_width: how many rays to take from it; None is one a pixel.
        translation_scale: see `frame_steps`.
        device: where to compute.
        dtype: of the result; it is computed in float32 at least.

    Returns:
        [F, 6, rays_height, rays_width].
    """
    steps = frame_steps(path.poses.astype(np.float64), translation_scale)
    intrinsics = scaled_intrinsics(path.intrinsics.astype(np.float64), height, width)
    exact = torch.promote_types(dtype, torch.float32)

    def on_device(values: Array) -> torch.Tensor:
        return torch.from_numpy(values).to(device=device, dtype=exact, non_blocking=True)

    fx, fy, cx, cy = on_device(intrinsics).view(-1, 4, 1, 1).unbind(1)  # [F, 1, 1] each
    y = _sample_points(height, rays_height or height, device, exact).unsqueeze(1)  # [h, 1]
    x = _sample_points(width, rays_width or width, device, exact)  # [w]
    u, v = torch.broadcast_tensors((x - cx) / fx, (y - cy) / fy)  # [F, h, w] each
    seen = F.normalize(torch.stack((u, v, torch.ones_like(u)), dim=1), dim=1)  # [F, 3, h, w]
    directions = torch.einsum("fij,fjhw->fihw", on_device(steps[:, :3, :3]), seen)
    directions = F.normalize(directions, dim=1)
    origins = on_device(steps[:, :3, 3]).view(-1, 3, 1, 1).expand_as(directions)
    return torch.cat((origins, directions), dim=1).to(dtype)


def _sample_points(size: int, count: int, device: torch.device | str, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(count, device=device, dtype=dtype) + 0.5) * (size / count)


def fold(rays: torch.Tensor) -> torch.Tensor:
    """Rays [F, 6, H, W] as channels of latent pixels, [1, 384, F, H/8, W/8]; channel order (c, dy, dx)."""
    if rays.dim() != 4 or rays.shape[1] != CHANNELS or rays.shape[2] % FOLD or rays.shape[3] % FOLD:
        raise InvalidArgumentError(
            f"rays must have shape [frames, 6, height, width] with sides that are multiples of {FOLD}, "
            f"got {list(rays.shape)}",
            field="rays",
        )
    return F.pixel_unshuffle(rays, FOLD).transpose(0, 1).unsqueeze(0)


def _positive_scale(value: float) -> float:
    if isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        raise InvalidArgumentError(
            f"translation_scale must be positive, got {value!r:.80}", field="translation_scale"
        )
    return float(value)
