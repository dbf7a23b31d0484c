"""One block by distribution-matching distillation: four denoise steps, and one pass that leaves the block in the past.

    x ~ N(0, 1)
    for i = 0 .. 3:   flow = model(x, timestep_i);  x0 = x - sigma_i flow
                      x = (1 - sigma_(i+1)) x0 + sigma_(i+1) noise;  after the last step x = x0
    model(x, 0)       keeps K and V of the clean block

Ticks, stepwise execution and offline rollouts all go through `DMDBlock`, so they draw the same noise in the same order:
one draw to begin with, three to add noise again, all in float32 from the session's generator.
"""

from __future__ import annotations

from typing import Final, Protocol

import torch

from contracts.errors import InvalidArgumentError
from gpu_worker.models.lingbot_world.schedule import DMDSchedule

LATENT_CHANNELS: Final = 16


class FlowModel(Protocol):
    """The transformer, bound to one chunk, its text and its past."""

    def __call__(self, model_input: torch.Tensor, timestep: float, *, update_cache: bool) -> torch.Tensor:
        """The flow [1, 16, 3, h, w] of [1, 36, 3, h, w]; with `update_cache` the pass stays in the past."""
        ...


class DMDBlock:
    """One block in the making. Making it draws its first noise.

    Args:
        model: what predicts the flow.
        condition: [1, 20, 3, h, w], mask and image latents, of the model's type and on its device.
        schedule: noise levels.
        generator: the session's random state.
        reuse_last_step_kv: experimental: the last denoise step stays in the past, and there is no pass after it.
    """

    def __init__(
        self,
        model: FlowModel,
        condition: torch.Tensor,
        schedule: DMDSchedule,
        generator: torch.Generator,
        *,
        reuse_last_step_kv: bool = False,
    ) -> None:
        if not isinstance(reuse_last_step_kv, bool):
            raise InvalidArgumentError(
                f"lingbot_reuse_last_step_kv must be a bool, got {reuse_last_step_kv!r:.80}",
                field="lingbot_reuse_last_step_kv",
            )
        self._model = model
        self._condition = condition
        self._schedule = schedule
        self._generator = generator
        self._reuse = reuse_last_step_kv
        self.step = 0
        """Denoise steps done."""
        self.latents = self._noise()
        """[1, 16, 3, h, w] float32: noisy before the last step and clean after it."""

    @property
    def num_steps(self) -> int:
        """Denoise steps of a block."""
        return len(self._schedule.sigmas)

    @property
    def complete(self) -> bool:
        """Whether the latents are clean."""
        return self.step == self.num_steps

    def predict(self) -> torch.Tensor:
        """1. The flow at the present noise level. Stays in the past only where the last step is to be reused."""
        last = self.step == self.num_steps - 1
        return self._pass(self._schedule.timesteps[self.step], update_cache=self._reuse and last)

    def advance(self, flow: torch.Tensor) -> None:
        """2. The clean block that the flow points at, with fresh noise of the next level unless this was the last."""
        sigmas = self._schedule.sigmas
        clean = self.latents - sigmas[self.step] * flow.float()
        self.step += 1
        if self.complete:
            self.latents = clean
        else:
            level = sigmas[self.step]
            self.latents = (1 - level) * clean + level * self._noise()

    def commit(self) -> torch.Tensor:
        """3. Leaves the clean block in the past, and returns it."""
        if not self.complete:
            raise InvalidArgumentError(
                f"a block is committed after {self.num_steps} steps, not {self.step}", field="step"
            )
        if not self._reuse:
            self._pass(0.0, update_cache=True)
        return self.latents

    def run(self) -> torch.Tensor:
        """All of it."""
        while not self.complete:
            self.advance(self.predict())
        return self.commit()

    def _pass(self, timestep: float, *, update_cache: bool) -> torch.Tensor:
        model_input = torch.cat((self.latents.to(self._condition.dtype), self._condition), dim=1)
        return self._model(model_input, timestep, update_cache=update_cache)

    def _noise(self) -> torch.Tensor:
        batch, _, *sizes = self._condition.shape
        noise = torch.randn(
            (batch, LATENT_CHANNELS, *sizes), generator=self._generator, device=self._generator.device
        )
        return noise.to(self._condition.device)
