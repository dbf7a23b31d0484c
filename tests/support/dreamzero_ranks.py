"""The life of one DreamZero session under guidance, in one process or on each of two ranks."""

from typing import Any

import numpy as np
import torch

from contracts.capacity import plan_capacity
from contracts.kv_spec import resolve_kv_config
from gpu_worker.kv.cache import ARDiffusionKVCache
from gpu_worker.kv.state import ARDiffusionKVState
from gpu_worker.models.dreamzero.cfg import SplitGuidedModel
from gpu_worker.models.dreamzero.guidance import GuidedModel
from gpu_worker.models.dreamzero.passes import Frames, PagedModel, Registers
from gpu_worker.models.dreamzero.spec import (
    IMAGE,
    NEGATIVE,
    POSITIVE,
    TEXT,
    dreamzero_kv_spec,
    owned_bytes,
)
from gpu_worker.models.dreamzero.unipc import UniPCSampler, UniPCSchedule
from gpu_worker.parallel.ranks import Ranks
from support.dreamzero_model import (
    TINY,
    random_action,
    random_condition,
    random_image,
    random_latents,
    random_state,
    random_text,
    tiny_model,
)
from support.kv_cache import CPU

SEEDS = {POSITIVE: 3, NEGATIVE: 30}
"""Of the texts."""

STEPS = 3


class Life:
    """One session.

    Args:
        dtype: name of the model's element type.
        scale: of the guidance.
        ranks: two that share it; None for one process.
        device: where model and pages are.
    """

    def __init__(self, dtype: str, scale: float, ranks: Ranks | None, device: torch.device = CPU) -> None:
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.device = device
        self.transformer = tiny_model(dtype=self.dtype).to(device)
        self.kv = self._session(1 if ranks is None else 2)
        paged = PagedModel(self.transformer, self.kv)
        self.model: GuidedModel | SplitGuidedModel
        if ranks is None:
            self.model = GuidedModel(paged, self.transformer, scale=scale)
        else:
            self.model = SplitGuidedModel(paged, self.transformer, scale=scale, ranks=ranks.ulysses)

    def _session(self, cfg_parallel: int) -> ARDiffusionKVState:
        size = self.dtype.itemsize
        spec = dreamzero_kv_spec(
            TINY, owned=owned_bytes(TINY, itemsize=size), session_capacity=1, cfg_parallel=cfg_parallel
        )
        config = resolve_kv_config(spec, {"gpu_memory_fraction": 1.0})
        plan = plan_capacity(spec, config, available_bytes=1 << 30, itemsize=size)
        return ARDiffusionKVState(
            "s", ARDiffusionKVCache(spec, config, plan, device=self.device, dtype=self.dtype)
        )

    def run(self) -> list[np.ndarray[Any, Any]]:
        """Two blocks, an inference reset, and a block of the next rollout: the samples of video and actions."""
        made = self._rollout(0, blocks=2)
        self.kv.reset(keep_cross_attention=(TEXT,))
        return made + self._rollout(50, blocks=1)

    def _rollout(self, seed: int, blocks: int) -> list[np.ndarray[Any, Any]]:
        for branch in self.model.branches:
            if not self.kv.is_cross_attention_populated(branch, TEXT):
                text = self.transformer.project_text(random_text(SEEDS[branch]).to(self.device))
                self.kv.populate_cross_attention(branch, TEXT, text)
            image = self.transformer.project_image(random_image(seed + 4).to(self.device))
            self.kv.populate_cross_attention(branch, IMAGE, image)
        self.model.prefill(self._frames(random_latents(1, seed), 0, 0.0, seed))
        made = []
        for block in range(blocks):
            start = 1 + 2 * block
            if block:
                self.model.prefill(self._frames(random_latents(2, seed + start), start - 2, 0.0, seed))
            made += self._denoise(start, seed + start)
        return made

    def _denoise(self, start: int, seed: int) -> list[np.ndarray[Any, Any]]:
        schedule = UniPCSchedule.of(STEPS)
        video = UniPCSampler(schedule, random_latents(2, seed + 7).to(self.device))
        action = UniPCSampler(schedule, random_action(seed + 8).to(self.device))
        state = random_state(seed + 9).to(self.device, self.dtype)
        while not video.complete:
            timestep = float(video.timestep)
            flow = self.model.denoise(
                self._frames(video.sample, start, timestep, seed),
                Registers(action.sample.to(self.dtype), timestep, state),
            )
            assert flow.action is not None
            video.advance(flow.video.float())
            action.advance(flow.action.float())
        return [video.sample.cpu().numpy(), action.sample.cpu().numpy()]

    def _frames(self, latents: torch.Tensor, start: int, timestep: float, seed: int) -> Frames:
        condition = random_condition(latents.shape[2], seed + 2).to(self.device, self.dtype)
        return Frames(latents.to(self.device, self.dtype), condition, start, timestep)


class Steps:
    """The steps of one more observation of a life, with all that they need on the device already.

    Args:
        life: its last rollout has begun.
    """

    def __init__(self, life: Life) -> None:
        self._life = life
        self._frames = life._frames(random_latents(2), 1, 500.0, 0)
        self._registers = Registers(
            random_action().to(life.device, life.dtype), 500.0, random_state().to(life.device, life.dtype)
        )
        self._noise = random_latents(2).to(life.device)

    def run(self) -> None:
        sampler = UniPCSampler(UniPCSchedule.of(STEPS), self._noise)
        while not sampler.complete:
            frames = Frames(
                sampler.sample.to(self._life.dtype), self._frames.condition, 1, float(sampler.timestep)
            )
            sampler.advance(self._life.model.denoise(frames, self._registers).video.float())


def life(ranks: Ranks, dtype: str, scale: float) -> dict[str, Any]:
    """A job of `RankProcesses`: the samples, collectives that were begun, and pages that each branch holds."""
    before = ranks.ulysses.calls.copy()
    session = Life(dtype, scale, ranks)
    samples = session.run()
    return {
        "samples": samples,
        "calls": dict(ranks.ulysses.calls - before),
        "frames": {branch: session.kv.adapter(branch).absolute_frames for branch in SEEDS},
        "text": {branch: session.kv.is_cross_attention_populated(branch, TEXT) for branch in SEEDS},
    }
