"""Camera trajectories: poses and intrinsics, inline or from a directory, brought to one pose a latent frame."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from contracts.errors import ConfigurationError, InvalidArgumentError
from contracts.lingbot import CameraTrajectory
from gpu_worker.models.lingbot_world.actions import Array
from gpu_worker.models.lingbot_world.npy import MAX_HEADER_BYTES, PREFIX_BYTES, parse_npy
from gpu_worker.models.lingbot_world.resolution import check_positive
from gpu_worker.models.lingbot_world.trusted_root import TrustedRoot

MAX_FRAMES: Final = 4096
_NEARLY_PARALLEL: Final = 0.9995


@dataclass(frozen=True, slots=True, eq=False)
class CameraPath:
    """A trajectory, checked.

    Args:
        poses: [F, 4, 4] camera-to-world.
        intrinsics: [F, 4] (fx, fy, cx, cy), referring to the 832 x 480 picture.

    Raises:
        InvalidArgumentError: a shape is wrong, lengths differ or are no 1 to 4096, or a number is not finite in float32.
    """

    poses: NDArray[Any]
    intrinsics: NDArray[Any]

    def __post_init__(self) -> None:
        for name, value, item in (("poses", self.poses, (4, 4)), ("intrinsics", self.intrinsics, (4,))):
            if value.shape[1:] != item or value.ndim != 1 + len(item):
                shape = ", ".join(map(str, ("frames", *item)))
                raise InvalidArgumentError(
                    f"{name} must have shape [{shape}], got {list(value.shape)}", field=name
                )
            # Written so that what is not a number fails, too. Beyond float32 no product of poses would be safe.
            if not (np.abs(value) <= np.finfo(np.float32).max).all():
                raise InvalidArgumentError(f"{name} must be finite float32 numbers", field=name)
        if len(self.poses) != len(self.intrinsics):
            raise InvalidArgumentError(
                f"poses and intrinsics must have equal length, got {len(self.poses)} and {len(self.intrinsics)}",
                field="intrinsics",
            )
        if not 1 <= len(self.poses) <= MAX_FRAMES:
            raise InvalidArgumentError(
                f"a trajectory has 1 to {MAX_FRAMES} poses, got {len(self.poses)}", field="poses"
            )

    def __len__(self) -> int:
        return len(self.poses)

    @classmethod
    def of_inline(cls, trajectory: CameraTrajectory) -> CameraPath:
        """From the control that a tick carries."""
        return cls(np.array(trajectory.poses, np.float64), np.array(trajectory.intrinsics, np.float64))


def load_trajectory(action_path: object, root: TrustedRoot | None) -> CameraPath:
    """The trajectory in a directory: `poses.npy` [F, 4, 4] and `intrinsics.npy` [F, 4]; other files don't matter.

    Args:
        action_path: the directory, beneath the root; a relative path starts there.
        root: None where the deployment trusts none.

    Raises:
        ConfigurationError: there is no root.
        InvalidArgumentError: the directory lies elsewhere, or a file is refused; no message holds a path.
    """
    if root is None:
        raise ConfigurationError(
            "action_path needs lingbot_action_root (or WORLDLINE_LINGBOT_ACTION_ROOT), which is not set",
            field="lingbot_action_root",
        )
    folder = root.resolve(action_path, "action_path")
    loaded = []
    for name, numbers in (("poses", 16), ("intrinsics", 4)):
        limit = PREFIX_BYTES + MAX_HEADER_BYTES + MAX_FRAMES * numbers * 8
        file = f"{name}.npy"
        array = parse_npy(root.read_file((*folder, file), file, max_bytes=limit), file)
        with np.errstate(over="ignore"):  # what float32 can't hold becomes infinite, which is refused
            loaded.append(array.astype(np.float32))
    return CameraPath(*loaded)


# ---------------------------------------------------------------------------------------------------- interpolation


def latent_path(path: CameraPath, num_frames: int, latent_frames: int) -> CameraPath:
    """The first `num_frames` poses of a trajectory (one a pixel frame), as `latent_frames` poses.

    Raises InvalidArgumentError: the trajectory is too short.
    """
    if len(path) < num_frames:
        raise InvalidArgumentError(
            f"a trajectory needs at least {num_frames} poses, got {len(path)}", field="poses"
        )
    return interpolate(CameraPath(path.poses[:num_frames], path.intrinsics[:num_frames]), latent_frames)


def interpolate(path: CameraPath, count: int) -> CameraPath:
    """`count` poses at equal distances from the first to the last.

    Positions and intrinsics go straight, rotations along the shortest arc. The same count changes nothing; a single
    pose is repeated.
    """
    check_positive("frames", count)
    if count == len(path):
        return path
    poses, intrinsics = path.poses.astype(np.float64), path.intrinsics.astype(np.float64)
    at = np.linspace(0.0, 1.0, count) * (len(path) - 1)
    left = np.minimum(at.astype(np.int64), max(0, len(path) - 2))
    right = np.minimum(left + 1, len(path) - 1)
    share = at - left

    quaternions = [quaternion_of(pose[:3, :3]) for pose in poses]
    between = np.tile(np.eye(4), (count, 1, 1))
    for index in range(count):
        q = slerp(quaternions[left[index]], quaternions[right[index]], float(share[index]))
        between[index, :3, :3] = rotation_of(q)
    between[:, :3, 3] = _lerp(poses[left, :3, 3], poses[right, :3, 3], share)
    return CameraPath(between, _lerp(intrinsics[left], intrinsics[right], share))


def _lerp(a: Array, b: Array, share: Array) -> Array:
    return a + (b - a) * share[:, None]


def slerp(a: Array, b: Array, share: float) -> Array:
    """The unit quaternion `share` of the way from a to b, along the shortest arc."""
    dot = float(a @ b)
    if dot < 0:
        b, dot = -b, -dot
    if dot > _NEARLY_PARALLEL:  # the arc's sine would be too small to divide by
        q = a + share * (b - a)
        return q / np.linalg.norm(q)
    angle = math.acos(dot)
    return (math.sin((1 - share) * angle) * a + math.sin(share * angle) * b) / math.sin(angle)


def quaternion_of(rotation: Array) -> Array:
    """(w, x, y, z) of a rotation [3, 3], of unit length.

    The products of the largest component (at least a half, since the squares add up to one) are read off the matrix,
    so nothing small is divided by.
    """
    m = rotation
    squares = 0.25 * np.array(
        [
            1 + m[0, 0] + m[1, 1] + m[2, 2],
            1 + m[0, 0] - m[1, 1] - m[2, 2],
            1 - m[0, 0] + m[1, 1] - m[2, 2],
            1 - m[0, 0] - m[1, 1] + m[2, 2],
        ]
    )
    products = 0.25 * np.array(
        [
            [0.0, m[2, 1] - m[1, 2], m[0, 2] - m[2, 0], m[1, 0] - m[0, 1]],
            [m[2, 1] - m[1, 2], 0.0, m[0, 1] + m[1, 0], m[0, 2] + m[2, 0]],
            [m[0, 2] - m[2, 0], m[0, 1] + m[1, 0], 0.0, m[1, 2] + m[2, 1]],
            [m[1, 0] - m[0, 1], m[0, 2] + m[2, 0], m[1, 2] + m[2, 1], 0.0],
        ]
    )
    largest = int(squares.argmax())
    q = products[largest]
    q[largest] = squares[largest]
    return q / np.linalg.norm(q)


def rotation_of(q: Array) -> Array:
    """The rotation [3, 3] of a unit quaternion (w, x, y, z)."""
    w, x, y, z = q
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
        ]
    )
