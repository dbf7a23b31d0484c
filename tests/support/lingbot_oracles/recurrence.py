"""The four-step recurrence, in plain NumPy float64."""

from collections.abc import Callable

import numpy as np

LABELS = (1000, 750, 500, 250)


def levels(shift: float) -> list[float]:
    """Noise levels of a flow shift."""
    return [shift * (label / 1000) / ((1 - label / 1000) + shift * (label / 1000)) for label in LABELS]


def block(
    noises: list[np.ndarray], flow: Callable[[np.ndarray, float], np.ndarray], shift: float
) -> np.ndarray:
    """The clean block of four noises: one to begin with, three to add noise again."""
    sigmas = levels(shift)
    x = noises[0].astype(np.float64)
    for step, sigma in enumerate(sigmas):
        clean = x - sigma * flow(x, 1000 * sigma)
        if step == 3:
            return clean
        x = (1 - sigmas[step + 1]) * clean + sigmas[step + 1] * noises[step + 1]
    raise AssertionError
