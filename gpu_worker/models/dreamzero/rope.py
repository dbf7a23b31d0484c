"""Rotary positions of [video | action | state], all in float64.

Video tokens turn as in every Wan model: a head is shared out as [time | height | width], time is absolute. Registers
have a line of their own: the whole head turns by one position. Block a of a rollout, the frames after the first one
cut into blocks, has the action positions [a * actions, (a + 1) * actions) and the state positions
[a * states, (a + 1) * states).

A rollout begins anew after a few blocks, so its tables are few; they are remembered.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from gpu_worker.models.lingbot_world.rope import Rotary, axis_widths

_BASE = 10_000.0


def block_index(start_frame: int, frames_per_block: int) -> int:
    """Which block of its rollout begins at `start_frame`: the first frame stands alone, in front of block 0."""
    return max(0, (start_frame - 1) // frames_per_block)


@lru_cache(maxsize=32)
def rotary(
    start_frame: int,
    grid: tuple[int, int, int],
    head_dim: int,
    *,
    block: int,
    actions: int,
    states: int,
    device: torch.device,
) -> Rotary:
    """Cosines and sines of a forward's tokens, float64 [T, head_dim / 2] each; not to be written into.

    Args:
        start_frame: absolute index of the first latent frame.
        grid: frames, rows and columns, in tokens.
        head_dim: width of a head.
        block: see `block_index`.
        actions, states: register tokens of the forward, or 0.
        device: where the table is wanted.
    """
    angles = torch.cat(
        (
            _video_angles(start_frame, grid, head_dim),
            _line_angles(block * actions, actions, head_dim),
            _line_angles(block * states, states, head_dim),
        )
    )
    return angles.cos().to(device), angles.sin().to(device)


def _video_angles(start_frame: int, grid: tuple[int, int, int], head_dim: int) -> torch.Tensor:
    firsts = (start_frame, 0, 0)
    parts = []
    for axis, width in enumerate(axis_widths(head_dim)):
        line = _line_angles(firsts[axis], grid[axis], width)
        shape = [1, 1, 1, line.shape[1]]
        shape[axis] = grid[axis]
        parts.append(line.view(shape).expand(*grid, -1))
    return torch.cat(parts, dim=-1).flatten(0, 2)


def _line_angles(first: int, count: int, width: int) -> torch.Tensor:
    """[count, width / 2]: pair j of a position turns by position * 10000^(-2j / width)."""
    positions = torch.arange(first, first + count, dtype=torch.float64)
    return torch.outer(positions, _BASE ** (-torch.arange(0, width, 2, dtype=torch.float64) / width))
