"""Latents to pictures: a smooth colour field over the world points that the latents carry.

The latents are spread over the pixels and into the time between frames, then a small sine network colours each pixel.
Because geometry channels are linear in the picture plane, spreading them is exact, so a moving camera moves the world.
"""

from __future__ import annotations

import math
from typing import Final

import torch
import torch.nn.functional as F

from gpu_worker.models.reference.spec import (
    CHANNELS,
    GEOMETRY_CHANNELS,
    GRID,
    PIXEL_FRAMES_PER_FRAME,
    PIXEL_SIDE,
)

_COLOUR_SIDE: Final = PIXEL_SIDE // 2
_HIDDEN: Final = 24


def spread_matrix(size: int) -> torch.Tensor:
    """[size, GRID] weights that spread GRID samples over `size` pixels: smooth, and exact for linear values.

    Cubic between the samples; beyond the outer ones it goes on in a straight line.
    """
    padded = torch.zeros(GRID + 4, GRID, dtype=torch.float64)
    padded[2:-2] = torch.eye(GRID)
    for edge, inner, further in ((1, 2, 3), (0, 1, 2), (-2, -3, -4), (-1, -2, -3)):
        padded[edge] = 2 * padded[inner] - padded[further]
    positions = (torch.arange(size, dtype=torch.float64) + 0.5) / size * GRID - 0.5 + 2
    left = positions.floor().long()
    t = (positions - left).unsqueeze(1)
    p0, p1, p2, p3 = (padded[left + offset] for offset in (-1, 0, 1, 2))
    curve = p1 + t * ((p2 - p0) + t * ((2 * p0 - 5 * p1 + 4 * p2 - p3) + t * (3 * (p1 - p2) + p3 - p0))) / 2
    return curve.float()


class ColourFieldDecoder:
    """Decodes chunk after chunk; what it needs of the past is the last latent frame, which the caller keeps.

    Args:
        generator: draws the weights.
        device: where to decode.
    """

    def __init__(self, generator: torch.Generator, device: torch.device) -> None:
        def draw(*shape: int, gain: float) -> torch.Tensor:
            return (torch.randn(shape, generator=generator) * gain).to(device)

        self._spread = spread_matrix(_COLOUR_SIDE).to(device)
        self._place = draw(_HIDDEN, GEOMETRY_CHANNELS, gain=1.3)
        self._texture = draw(_HIDDEN, CHANNELS - GEOMETRY_CHANNELS, gain=0.45)
        self._phase = draw(_HIDDEN, gain=math.pi)
        self._mix = draw(_HIDDEN, _HIDDEN, gain=1.6 / math.sqrt(_HIDDEN))
        self._colour = draw(3, _HIDDEN, gain=2.2 / math.sqrt(_HIDDEN))

    def __call__(self, latents: torch.Tensor, previous: torch.Tensor | None) -> torch.Tensor:
        """Pixel frames of one chunk.

        Args:
            latents: [1, C, F, GRID, GRID], clean.
            previous: the latent frame [C, GRID, GRID] before them, None at the beginning.

        Returns:
            uint8 [F * PIXEL_FRAMES_PER_FRAME, PIXEL_SIDE, PIXEL_SIDE, 3].
        """
        frames = latents[0].transpose(0, 1)  # [F, C, GRID, GRID]
        before = torch.cat(((frames[0] if previous is None else previous).unsqueeze(0), frames[:-1]))
        steps = torch.arange(1, PIXEL_FRAMES_PER_FRAME + 1, device=latents.device) / PIXEL_FRAMES_PER_FRAME
        between = torch.lerp(before.unsqueeze(1), frames.unsqueeze(1), steps.view(1, -1, 1, 1, 1)).flatten(
            0, 1
        )
        field = self._spread @ between @ self._spread.T  # [pixel frames, C, side, side]
        colours = self._colour_of(field)
        pixels = F.interpolate(colours, size=(PIXEL_SIDE, PIXEL_SIDE), mode="bilinear", align_corners=False)
        return (pixels * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()

    def _colour_of(self, field: torch.Tensor) -> torch.Tensor:
        """[frames, C, h, w] -> colours in [0, 1], [frames, 3, h, w]."""
        shape = (field.shape[0], -1, *field.shape[2:])
        x = field.flatten(2)
        place, texture = x[:, :GEOMETRY_CHANNELS], x[:, GEOMETRY_CHANNELS:]
        hidden = torch.sin(self._place @ place + self._texture @ texture + self._phase.unsqueeze(1))
        hidden = torch.sin(self._mix @ hidden + self._phase.flip(0).unsqueeze(1))
        return torch.sigmoid(self._colour @ hidden).view(shape)
