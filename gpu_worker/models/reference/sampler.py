"""One chunk, step by step: four denoise passes over scratch KV, then one pass that commits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from gpu_worker.models.reference.spec import CHANNELS, FRAMES, GRID

_SHIFT: Final = 5.0
_LEVELS: Final = (1.0, 0.75, 0.5, 0.25)

SIGMAS: Final = tuple(_SHIFT * level / ((1 - level) + _SHIFT * level) for level in _LEVELS)
"""Noise levels of the four steps, from pure noise downwards."""

Denoise = Callable[[torch.Tensor, float, bool], torch.Tensor]
"""(latents, timestep, commit) -> clean latents, all latents [1, C, F, GRID, GRID]."""


def draw_noise(generator: torch.Generator) -> torch.Tensor:
    """Unit noise [1, C, F, GRID, GRID] from the session's random state."""
    return torch.randn((1, CHANNELS, FRAMES, GRID, GRID), generator=generator, device=generator.device)


def sample_chunk(denoise: Denoise, generator: torch.Generator) -> torch.Tensor:
    """The chunk's clean latents [1, C, F, GRID, GRID]; its KV is committed when this returns.

    Four draws from the session's random state: one to start with, three to go back to a lower noise level.
    """
    # 1. Start from noise.
    latents = draw_noise(generator)
    clean = latents
    for step, sigma in enumerate(SIGMAS):
        # 2. Predict the clean chunk; these passes leave no trace in the KV.
        clean = denoise(latents, 1000 * sigma, False)
        # 3. Add noise of the next, lower level, except after the last step.
        if step + 1 < len(SIGMAS):
            following = SIGMAS[step + 1]
            latents = (1 - following) * clean + following * draw_noise(generator)
    # 4. One pass over the clean chunk at timestep 0, whose K and V later chunks will see.
    denoise(clean, 0.0, True)
    return clean
