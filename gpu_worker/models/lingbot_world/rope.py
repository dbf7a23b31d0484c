"""Rotary positions of a block's tokens: absolute in time, restarting in every frame in height and width.

A head of size S is S/2 neighbouring pairs, shared out as [time | height | width]; pair j of an axis turns by
position * 10000^(-2j / width of the axis). All is computed when a block needs it, in float64: three short vectors an
axis, so there is no table that a long rollout could run off the end of.
"""

from __future__ import annotations

import torch

_BASE = 10_000.0

Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, [T, S / 2] each."""


def axis_widths(head_dim: int) -> tuple[int, int, int]:
    """How much of a head time, height and width get: 44, 42 and 42 of 128."""
    side = 2 * (head_dim // 6)
    return head_dim - 2 * side, side, side


def rotary(
    start_frame: int,
    frames: int,
    rows: int,
    columns: int,
    head_dim: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> Rotary:
    """Cosines and sines of the tokens of `frames` frames from the absolute `start_frame` on, order frame, row, column."""
    first = (start_frame, 0, 0)
    counts = (frames, rows, columns)
    angles = []
    for axis, width in enumerate(axis_widths(head_dim)):
        positions = torch.arange(first[axis], first[axis] + counts[axis], dtype=torch.float64)
        frequencies = _BASE ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        shape = [1, 1, 1, len(frequencies)]
        shape[axis] = counts[axis]
        angles.append(torch.outer(positions, frequencies).view(shape))

    def spread(parts: list[torch.Tensor]) -> torch.Tensor:
        small = [part.float().to(device=device, dtype=dtype, non_blocking=True) for part in parts]
        return torch.cat([part.expand(*counts, -1) for part in small], dim=-1).flatten(0, 2)

    return spread([angle.cos() for angle in angles]), spread([angle.sin() for angle in angles])


def rotate(x: torch.Tensor, table: Rotary) -> torch.Tensor:
    """Turns the pairs (2j, 2j + 1) of x [B, T, H, S]."""
    cos, sin = (part.unsqueeze(1) for part in table)  # [T, 1, S / 2]
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
