"""The noise levels of one chunk: four denoise steps, each from a lower level than the one before."""

from __future__ import annotations

from typing import Final

import torch

from gpu_worker.models.reference.spec import CHANNELS, FRAMES, GRID

_SHIFT: Final = 5.0
_LEVELS: Final = (1.0, 0.75, 0.5, 0.25)

SIGMAS: Final = tuple(_SHIFT * level / ((1 - level) + _SHIFT * level) for level in _LEVELS)
"""Noise levels of the four steps, from pure noise downwards."""


def draw_noise(generator: torch.Generator) -> torch.Tensor:
    """Unit noise [1, C, F, GRID, GRID] from the session's random state."""
    return torch.randn((1, CHANNELS, FRAMES, GRID, GRID), generator=generator, device=generator.device)


def next_latents(clean: torch.Tensor, step: int, generator: torch.Generator) -> torch.Tensor:
    """What step `step + 1` starts from: the clean prediction with fresh noise of the next level; after the last step
    the prediction itself. A chunk takes four draws: one to start with, and three here."""
    if step + 1 == len(SIGMAS):
        return clean
    sigma = SIGMAS[step + 1]
    return (1 - sigma) * clean + sigma * draw_noise(generator)
