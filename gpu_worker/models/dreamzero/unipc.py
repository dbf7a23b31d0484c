"""The flow-matching UniPC sampler: order 2, "bh2", predicting clean samples.

With a = 1 - sigma, lambda = log(a / sigma), and between two levels s -> t

    h = lambda_t - lambda_s        B = exp(-h) - 1        D1 = (m_before - m_s) / r,   r = (lambda_before - lambda_s) / h

where m = x - sigma * flow is the clean sample that a flow points at. One step at level s:

    1.  m_s = x - sigma_s * flow
    2.  correct   x = (s_s / s_l) x_l - a_s B m_l - a_s B (rho_0 D1 + rho_1 (m_s - m_l))       l: the level before
    3.  predict   x = (s_t / s_s) x   - a_t B m_s - a_t B (D1 / 2)                             t: the level that follows

D1 takes part at order 2 only. A step's order is at most 2, the number of steps that were taken, itself included, and the
number that remain; a correction has the order of the prediction that it corrects. At the last level, 0, x is m.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch

from contracts.errors import InvalidArgumentError

DEFAULT_STEPS: Final = 16
DEFAULT_SHIFT: Final = 5.0

_TRAIN_TIMESTEPS: Final = 1000
_MOST_NOISE: Final = 1 - 1 / _TRAIN_TIMESTEPS
_MOST_ORDER: Final = 2


@dataclass(frozen=True, slots=True)
class UniPCSchedule:
    """Noise levels, and what the model is told at each.

    Args:
        sigmas: from the noisiest down; one more than there are steps.
        timesteps: one a step.
    """

    sigmas: tuple[float, ...]
    timesteps: tuple[int, ...]

    @classmethod
    def of(cls, steps: int = DEFAULT_STEPS, shift: float = DEFAULT_SHIFT) -> UniPCSchedule:
        """`steps` levels from 0.999 down, bent towards noise by `shift`, and 0 after them.

        Raises:
            InvalidArgumentError: there is no step, or the shift is no positive number.
        """
        if not _is_number(steps) or steps not in range(1, _TRAIN_TIMESTEPS + 1):
            raise InvalidArgumentError(
                f"steps must be an integer from 1 to {_TRAIN_TIMESTEPS}, got {steps!r:.80}", field="steps"
            )
        if not _is_number(shift) or not 0 < shift < math.inf:
            raise InvalidArgumentError(f"shift must be a positive number, got {shift!r:.80}", field="shift")
        levels = [_MOST_NOISE * (1 - index / steps) for index in range(steps)]
        return cls._with_timesteps([shift * level / (1 + (shift - 1) * level) for level in levels] + [0.0])

    def decoupled(self, final_noise: float) -> UniPCSchedule:
        """The same steps, ending at `final_noise` (0 to 1) instead of 0: a video that stays noisy beside clean actions."""
        if not _is_number(final_noise) or not 0 <= final_noise < 1:
            raise InvalidArgumentError(
                f"final_noise must be a number from 0 to below 1, got {final_noise!r:.80}",
                field="final_noise",
            )
        most = self.sigmas[0]
        return self._with_timesteps(
            [sigma * (most - final_noise) / most + final_noise for sigma in self.sigmas]
        )

    @property
    def steps(self) -> int:
        """How many."""
        return len(self.timesteps)

    @classmethod
    def _with_timesteps(cls, sigmas: list[float]) -> UniPCSchedule:
        return cls(tuple(sigmas), tuple(int(_TRAIN_TIMESTEPS * sigma) for sigma in sigmas[:-1]))


class UniPCSampler:
    """One sample on its way from noise to data.

    Args:
        schedule: its levels.
        noise: the sample to begin with. All is computed in its type; coefficients are exact.
    """

    def __init__(self, schedule: UniPCSchedule, noise: torch.Tensor) -> None:
        self._schedule = schedule
        self._clean: list[torch.Tensor] = []  # m of the last levels, the youngest at the end
        self._corrected: torch.Tensor | None = None  # x of the level before, after its correction
        self._order = 0
        self.step = 0
        """Steps taken."""
        self.sample = noise
        """Of the present level."""

    @property
    def complete(self) -> bool:
        """Whether the last level is reached."""
        return self.step == self._schedule.steps

    @property
    def timestep(self) -> int:
        """What the model is told next; InvalidArgumentError when there is no next step."""
        if self.complete:
            raise InvalidArgumentError(f"all {self.step} steps are taken", field="step")
        return self._schedule.timesteps[self.step]

    def advance(self, flow: torch.Tensor) -> torch.Tensor:
        """Takes one step by the flow that was predicted at the present level; returns the new sample.

        Args:
            flow: of the sample's shape.

        Raises:
            InvalidArgumentError: its shape is another, or all steps are taken.
        """
        if self.complete:
            raise InvalidArgumentError(f"all {self.step} steps are taken", field="step")
        if flow.shape != self.sample.shape:
            raise InvalidArgumentError(
                f"flow must have shape {list(self.sample.shape)}, got {list(flow.shape)}", field="flow"
            )
        clean = self.sample - self._schedule.sigmas[self.step] * flow.to(self.sample.dtype)
        corrected = self.sample if self._corrected is None else self._correct(self._corrected, clean)
        self._clean = [*self._clean, clean][-_MOST_ORDER:]
        self._order = min(_MOST_ORDER, self.step + 1, self._schedule.steps - self.step)
        self._corrected = corrected
        self.sample = self._predict(corrected)
        self.step += 1
        return self.sample

    def _predict(self, x: torch.Tensor) -> torch.Tensor:
        """3. From the present level to the one that follows."""
        here, following = self._schedule.sigmas[self.step : self.step + 2]
        clean = self._clean[-1]
        if following == 0:
            return clean
        h = _lambda(following) - _lambda(here)
        weight = (1 - following) * math.expm1(-h)
        moved = (following / here) * x - weight * clean
        if self._order == 1:
            return moved
        return moved - weight * 0.5 * self._slope(self._clean, self.step, h)

    def _correct(self, x: torch.Tensor, clean: torch.Tensor) -> torch.Tensor:
        """2. From the level before to the present one once more, now that its clean sample is known."""
        before, here = self._schedule.sigmas[self.step - 1 : self.step + 1]
        h = _lambda(here) - _lambda(before)
        weight = (1 - here) * math.expm1(-h)
        change = clean - self._clean[-1]
        moved = (here / before) * x - weight * self._clean[-1]
        if self._order == 1:
            return moved - weight * 0.5 * change
        slope = self._slope(self._clean, self.step - 1, h)
        rho_0, rho_1 = _corrector_weights(self._ratio(self.step - 1, h), h)
        return moved - weight * (rho_0 * slope + rho_1 * change)

    def _slope(self, clean: list[torch.Tensor], level: int, h: float) -> torch.Tensor:
        return (clean[-2] - clean[-1]) / self._ratio(level, h)

    def _ratio(self, level: int, h: float) -> float:
        sigmas = self._schedule.sigmas
        return (_lambda(sigmas[level - 1]) - _lambda(sigmas[level])) / h


def _lambda(sigma: float) -> float:
    return math.log(1 - sigma) - math.log(sigma)


def _corrector_weights(ratio: float, h: float) -> tuple[float, float]:
    """rho of the two rows rho_0 + rho_1 = b_1 and ratio * rho_0 + rho_1 = b_2."""
    b = math.expm1(-h)
    phi_2 = b / -h - 1
    phi_3 = phi_2 / -h - 1 / 2
    b_1, b_2 = phi_2 / b, 2 * phi_3 / b
    rho_0 = (b_1 - b_2) / (1 - ratio)
    return rho_0, b_1 - rho_0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
