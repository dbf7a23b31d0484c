"""Pluecker rays of a camera path, from their formulas, pixel by pixel in plain NumPy float64."""

from itertools import pairwise

import numpy as np


def pluecker(
    poses: np.ndarray,
    intrinsics: np.ndarray,
    height: int,
    width: int,
    *,
    rays: tuple[int, int] | None = None,
    scale: float | None = None,
) -> np.ndarray:
    """[F, 6, h, w] of poses [F, 4, 4] and intrinsics [F, 4], which refer to 832 x 480."""
    poses = poses.astype(np.float64)
    steps = [np.eye(4)]
    steps += [np.linalg.inv(before) @ after for before, after in pairwise(poses)]
    longest = max(float(np.sqrt((step[:3, 3] ** 2).sum())) for step in steps) if scale is None else scale
    rows, columns = rays or (height, width)
    out = np.zeros((len(poses), 6, rows, columns))
    for f, step in enumerate(steps):
        fx, fy, cx, cy = intrinsics[f].astype(np.float64) * [
            width / 832,
            height / 480,
            width / 832,
            height / 480,
        ]
        origin = step[:3, 3] / longest if longest > 0 else step[:3, 3]
        for row in range(rows):
            for column in range(columns):
                x, y = (column + 0.5) * (width / columns), (row + 0.5) * (height / rows)
                seen = np.array([(x - cx) / fx, (y - cy) / fy, 1.0])
                ray = step[:3, :3] @ (seen / np.linalg.norm(seen))
                out[f, :3, row, column] = origin
                out[f, 3:, row, column] = ray / np.linalg.norm(ray)
    return out


def folded(rays: np.ndarray, side: int = 8) -> np.ndarray:
    """[F, 6, H, W] -> [1, 6 * side^2, F, H / side, W / side], channel (c, dy, dx)."""
    frames, channels, height, width = rays.shape
    out = np.zeros((1, channels * side * side, frames, height // side, width // side))
    for c in range(channels):
        for dy in range(side):
            for dx in range(side):
                out[0, (c * side + dy) * side + dx] = rays[:, c, dy::side, dx::side]
    return out


def between(a: np.ndarray, b: np.ndarray, share: float) -> np.ndarray:
    """The rotation `share` of the way from rotation a to b, by axis and angle of what lies between."""
    turn = a.T @ b
    angle = np.arccos(np.clip((np.trace(turn) - 1) / 2, -1, 1))
    if angle < 1e-12:
        return a
    skew = (turn - turn.T) / (2 * np.sin(angle))
    part = share * angle
    return a @ (np.eye(3) + np.sin(part) * skew + (1 - np.cos(part)) * skew @ skew)
