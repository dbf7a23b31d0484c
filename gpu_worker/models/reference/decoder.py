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

        texture = CHANNELS - GEOMETRY_CHANNELS
        self._spread = spread_matrix(_COLOUR_SIDE).to(device)
        self._field = torch.cat(
            (draw(_HIDDEN, GEOMETRY_CHANNELS, gain=1.4), draw(_HIDDEN, texture, gain=0.35)), dim=1
        )
        self._phase = draw(_HIDDEN, 1, gain=math.pi)
        self._mix = draw(_HIDDEN, _HIDDEN, gain=1.2 / math.sqrt(_HIDDEN))
        self._shade = draw(2, _HIDDEN, gain=1 / math.sqrt(_HIDDEN))
        self._mood = draw(2, texture, gain=1.2 / math.sqrt(texture))
        self._primaries = torch.tensor([0.0, 0.11, 0.22], device=device).view(1, 3, 1)

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
        colours = self._colour_of(field.flatten(2)).unflatten(2, (_COLOUR_SIDE, _COLOUR_SIDE))
        pixels = F.interpolate(colours, size=(PIXEL_SIDE, PIXEL_SIDE), mode="bilinear", align_corners=False)
        return (pixels * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()

    def _colour_of(self, field: torch.Tensor) -> torch.Tensor:
        """[frames, C, pixels] -> colours in [0, 1], [frames, 3, pixels]."""
        hidden = torch.matmul(self._field, field).add_(self._phase).sin_()
        hidden = torch.matmul(self._mix, hidden).add_(self._phase.flip(0)).sin_()
        hue, light = torch.matmul(self._shade, hidden).unsqueeze(2).unbind(1)  # [frames, 1, pixels] each
        # The texture's mean over the picture sets the mood: where on the colour circle, and how much of it is used.
        mean = field[:, GEOMETRY_CHANNELS:].mean(2, keepdim=True)
        turn, spread = (self._mood @ mean).unsqueeze(2).unbind(1)
        angle = turn + 0.35 * hue + self._primaries * (1.1 + 0.5 * spread.tanh())
        sky = 0.12 * field[:, 1:2].tanh()  # the world is lighter above
        brightness = 0.68 + 0.22 * light.tanh() + sky
        return angle.mul_(2 * math.pi).cos_().mul_(0.4).add_(0.72).mul_(brightness).clamp_(0, 1)
