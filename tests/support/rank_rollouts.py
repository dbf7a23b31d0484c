"""A rollout of a small LingBot transformer, by one process or by each of several ranks, and what crosses ranks in it."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from contracts.capacity import plan_capacity
from contracts.kv_spec import resolve_kv_config
from gpu_worker.kv.cache import ARDiffusionKVCache
from gpu_worker.kv.state import ARDiffusionKVState
from gpu_worker.models.lingbot_world.config import LingBotTransformerConfig
from gpu_worker.models.lingbot_world.passes import PagedFlow, publish_prompt
from gpu_worker.models.lingbot_world.spec import BRANCH, TEXT, lingbot_kv_spec, owned_bytes
from gpu_worker.parallel.ranks import Ranks
from support.kv_cache import CPU
from support.lingbot_model import seeded, tiny_model

TEXT_TOKENS = 6
STEPS = ((1000.0, False), (500.0, False), (0.0, True))


@dataclass(frozen=True)
class Geometry:
    """A model and its pictures; `rows` and `columns` are latent pixels."""

    heads: int
    head_dim: int
    layers: int
    rows: int
    columns: int
    dtype: str = "float32"
    blocks: int = 4

    @property
    def config(self) -> LingBotTransformerConfig:
        return LingBotTransformerConfig(
            num_attention_heads=self.heads,
            attention_head_dim=self.head_dim,
            text_dim=10,
            freq_dim=8,
            ffn_dim=2 * self.heads * self.head_dim,
            num_layers=self.layers,
            sink_size=1,
            sliding_window_num_frames=7,
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


class Collectives(TorchDispatchMode):
    """Counts every operator of `torch.distributed` that runs inside, by name; looks below whatever calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func.name().removeprefix("c10d::")] += 1
        return func(*args, **(kwargs or {}))


class Rollout:
    """One session on a model of its own.

    Args:
        geometry: sizes.
        ranks: those that share it; None for one process.
    """

    def __init__(self, geometry: Geometry, ranks: Ranks | None = None) -> None:
        self.geometry, self.dtype = geometry, geometry.torch_dtype
        parallel = None if ranks is None else ranks.ulysses
        degree = 1 if ranks is None else ranks.degree
        self.model = tiny_model(geometry.config, parallel=parallel, dtype=self.dtype)
        height, width = 8 * geometry.rows, 8 * geometry.columns
        itemsize = self.dtype.itemsize
        self.owned = owned_bytes(height, width, transformer=geometry.config, itemsize=itemsize, degree=degree)
        spec = lingbot_kv_spec(
            height,
            width,
            owned=self.owned,
            transformer=geometry.config,
            text_tokens=TEXT_TOKENS,
            session_capacity=1,
            degree=degree,
        )
        config = resolve_kv_config(spec, {"gpu_memory_fraction": 1.0})
        roomy = plan_capacity(spec, config, available_bytes=1 << 40, itemsize=itemsize)
        self.plan = plan_capacity(spec, config, available_bytes=roomy.required_bytes, itemsize=itemsize)
        self.cache = ARDiffusionKVCache(spec, config, self.plan, device=CPU, dtype=self.dtype)
        self.state = ARDiffusionKVState("w", self.cache)

    def say(self, seed: int) -> None:
        text = torch.randn(1, TEXT_TOKENS, 10, generator=seeded(seed)).to(self.dtype)
        publish_prompt(self.model, self.state, text)

    def block(self, seed: int, steps: Any = STEPS) -> list[np.ndarray]:
        """The flows of the next block's passes."""
        rows, columns = self.geometry.rows, self.geometry.columns
        start = self.state.adapter(BRANCH).absolute_frames
        camera = torch.randn(1, 384, 3, rows, columns, generator=seeded(seed)).to(self.dtype)
        flow = PagedFlow(self.model, self.state, self.model.prepare_chunk(camera, start))
        made = []
        for index, (timestep, stays) in enumerate(steps):
            x = torch.randn(1, 36, 3, rows, columns, generator=seeded(100 * seed + index)).to(self.dtype)
            made.append(flow(x, timestep, update_cache=stays).float().numpy())
        return made

    def life(self) -> list[np.ndarray]:
        """Blocks over the rolling window, another prompt in their midst; then a reset, and the first block once more."""
        self.say(1)
        flows = []
        for index in range(self.geometry.blocks):
            if index == self.geometry.blocks - 1:
                self.say(2)
            flows += self.block(index + 1)
        self.state.reset()
        self.say(1)
        return flows + self.block(1)

    def text(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(layer["k"], layer["v"]) for layer in self.state.get_cross_attention_kv(BRANCH, TEXT)]


# ---------------------------------------------------------------------------------------------------- jobs


def life(ranks: Ranks | None, geometry: Geometry) -> dict[str, Any]:
    """Flows, bytes and text K and V."""
    rollout = Rollout(geometry, ranks)
    flows = rollout.life()
    chunk = rollout.model.prepare_chunk(
        torch.zeros(1, 384, 3, geometry.rows, geometry.columns, dtype=rollout.dtype), 3
    )
    projected = list(rollout.model.text_kv(torch.zeros(1, TEXT_TOKENS, 10, dtype=rollout.dtype)))
    return {
        "flows": flows,
        "kv_bytes": rollout.cache.allocated_bytes(),
        "planned_bytes": rollout.plan.required_bytes - rollout.owned.total,
        "camera_bytes": chunk.camera_bytes,
        "planned_camera_bytes": rollout.owned.camera_modulation,
        "text": [(k.float().numpy(), v.float().numpy()) for k, v in rollout.text()],
        "compact": all(
            value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes
            for pair in (*rollout.text(), *projected)
            for value in pair
        ),
    }


def mixed_timesteps(ranks: Ranks | None, geometry: Geometry) -> list[np.ndarray]:
    """Each frame of a block at a noise level of its own, so that its modulation differs within a share."""
    rollout = Rollout(geometry, ranks)
    rollout.say(1)
    levels = torch.tensor([[1000.0, 400.0, 30.0]])
    return rollout.block(1, ((levels, False), (levels.flip(1), True)))


def many(ranks: Ranks | None, geometries: list[Geometry]) -> list[list[np.ndarray]]:
    """`mixed_timesteps` at each size."""
    return [mixed_timesteps(ranks, geometry) for geometry in geometries]


def collectives(ranks: Ranks, geometry: Geometry) -> dict[str, Counter[str]]:
    """What crosses ranks in each part of a chunk, and what the ranks count themselves."""
    rollout = Rollout(geometry, ranks)
    found, parts = {}, Collectives()

    def counted(name: str, before: Counter[str]) -> None:
        found[name] = parts.counts - before

    with parts:
        rollout.say(1)
        counted("prompt", Counter())
        before, own = parts.counts.copy(), ranks.ulysses.calls.copy()
        rollout.block(1, STEPS[-1:])
        counted("forward", before)
        found["own"] = ranks.ulysses.calls - own
        before = parts.counts.copy()
        rollout.block(2, (*STEPS[:1] * 4, STEPS[-1]))
        counted("chunk", before)
    return found


def misfit(ranks: Ranks, geometry: Geometry) -> tuple[str, str]:
    """What happens to a chunk that was prepared for another number of ranks."""
    alone, shared = Rollout(geometry), Rollout(geometry, ranks)
    shared.say(1)
    camera = torch.zeros(1, 384, 3, geometry.rows, geometry.columns)
    flow = PagedFlow(shared.model, shared.state, alone.model.prepare_chunk(camera, 0))
    try:
        flow(torch.zeros(1, 36, 3, geometry.rows, geometry.columns), 0.0, update_cache=False)
    except RuntimeError as error:
        return type(error).__name__, str(error)
    return "", ""


def unequal(ranks: Ranks, geometry: Geometry) -> tuple[str, str | None]:
    """What happens to a block that the ranks can't share."""
    rollout = Rollout(replace(geometry, rows=2 * ranks.degree, columns=2 * ranks.degree), ranks)
    try:
        rollout.model.prepare_chunk(torch.zeros(1, 384, 3, geometry.rows, geometry.columns), 0)
    except ValueError as error:
        return str(error), getattr(error, "field", None)
    return "", None


def exchanges(ranks: Ranks, batch: int) -> dict[str, np.ndarray]:
    """What each exchange makes of this rank's share of known tensors."""
    ulysses, degree = ranks.ulysses, ranks.degree
    tokens, heads, size = 3 * degree, 2 * degree, 5
    whole = torch.arange(batch * tokens * 3 * heads * size, dtype=torch.float32)
    whole = whole.view(batch, tokens, 3, heads, size)
    mine = ulysses.shard(whole, 1)
    by_heads = ulysses.to_heads(mine)
    back = ulysses.to_tokens(by_heads[:, :, 0])
    values = whole[:, :, 0, 0]
    return {
        "whole": whole.numpy(),
        "mine": mine.numpy(),
        "by_heads": by_heads.numpy(),
        "back": back.numpy(),
        "gathered": ulysses.gather(ulysses.shard(values, 1)).numpy(),
    }
