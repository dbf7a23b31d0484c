"""LingBot World v2 on a CUDA device at full size, in bfloat16, with random weights: ms a chunk, and bytes.

    python benchmarks/gpu_lingbot.py [--attention sdpa|flex|flash_attn] [--eager-only] [--json]

Needs torch and numpy, and of this repository `contracts` and `gpu_worker`. A chunk is what a tick makes the transformer
do: camera modulation once, four probes, one pass that stays, over a full window. First eagerly, then with compiled
blocks; encoding, decoding and book-keeping are not part of it. About three minutes on an H200 and 90 GB; without a CUDA
device a tiny model runs on the CPU, and its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout, nothing installed

from contracts.capacity import CapacityPlan, MemoryModel, plan_capacity
from contracts.kv_spec import ARDiffusionKVCacheSpec, ARDiffusionKVConfig, resolve_kv_config
from gpu_worker.kv.backends import make_attention_backend
from gpu_worker.kv.cache import ARDiffusionKVCache
from gpu_worker.kv.state import ARDiffusionKVState
from gpu_worker.models.lingbot_world.attention import SequenceParallel
from gpu_worker.models.lingbot_world.config import LingBotTransformerConfig
from gpu_worker.models.lingbot_world.passes import PagedFlow, publish_prompt
from gpu_worker.models.lingbot_world.sampler import DMDBlock
from gpu_worker.models.lingbot_world.schedule import DMDSchedule
from gpu_worker.models.lingbot_world.spec import BRANCH, OwnedBytes, lingbot_kv_spec, owned_bytes
from gpu_worker.models.lingbot_world.transformer import CausalLingBotWorldTransformer3DModel

PUBLIC_MS = {"eager": 2992.0, "compiled": 1562.0}
"""Reported for one H200 eagerly, and for two with compiled blocks."""


@dataclass(frozen=True)
class Size:
    """What is measured."""

    config: LingBotTransformerConfig
    height: int
    width: int
    text_tokens: int
    dtype: torch.dtype
    compiler: str
    rounds: int
    weight_std: float = 0.02


FULL = Size(LingBotTransformerConfig(), 480, 832, 512, torch.bfloat16, "inductor", 5)
TINY = Size(
    LingBotTransformerConfig(
        num_attention_heads=2, attention_head_dim=12, text_dim=16, freq_dim=8, ffn_dim=48, num_layers=2
    ),
    32,
    48,
    8,
    torch.float32,
    "eager",  # traced as on a device, and then run as it is: a C++ compiler may not be there
    2,
)


class World:
    """One session over random weights, chunk after chunk.

    Args:
        size: what is measured.
        device: where.
        attention: name of the attention backend.
        parallel: ranks that share the sequence; None where this process is alone.
    """

    def __init__(
        self, size: Size, device: torch.device, attention: str, parallel: SequenceParallel | None = None
    ) -> None:
        self.size, self.device = size, device
        self.generator = torch.Generator(device).manual_seed(0)
        self.model = CausalLingBotWorldTransformer3DModel.from_config(
            {}, pinned=size.config, parallel=parallel
        )
        self.model.load_weights(self._weights(), device=device, dtype=size.dtype)
        self.model.check_loaded()
        degree = 1 if parallel is None else parallel.degree
        self.owned = owned_bytes(
            size.height, size.width, transformer=size.config, itemsize=size.dtype.itemsize, degree=degree
        )
        spec = lingbot_kv_spec(
            size.height,
            size.width,
            owned=self.owned,
            transformer=size.config,
            text_tokens=size.text_tokens,
            session_capacity=1,
            degree=degree,
        )
        kv_config = resolve_kv_config(spec, {"gpu_memory_fraction": 1.0})
        self.plan = _smallest_plan(spec, kv_config, size.dtype.itemsize)
        backend = make_attention_backend(attention, spec, kv_config, device=device, dtype=size.dtype)
        cache = ARDiffusionKVCache(
            spec, kv_config, self.plan, device=device, dtype=size.dtype, attention=backend
        )
        self.kv = ARDiffusionKVState("bench", cache)
        publish_prompt(self.model, self.kv, self._random(1, size.text_tokens, size.config.text_dim))
        self.finite = True
        self.latents = torch.empty(0)
        """Of the last chunk, [1, 16, 3, h, w]."""

    def chunk(self) -> float:
        """Makes the next chunk; returns its milliseconds."""
        frames, rows, columns = 3, self.size.height // 8, self.size.width // 8
        camera = self._random(1, self.size.config.camera_channels, frames, rows, columns)
        condition = self._random(1, 20, frames, rows, columns)
        start = self.kv.adapter(BRANCH).absolute_frames
        self._synchronise()
        began = time.perf_counter()
        flow = PagedFlow(self.model, self.kv, self.model.prepare_chunk(camera, start))
        latents = DMDBlock(flow, condition, DMDSchedule.of(), self.generator).run()
        self._synchronise()
        elapsed_ms = 1000 * (time.perf_counter() - began)
        self.latents = latents
        self.finite = self.finite and bool(latents.isfinite().all())
        return elapsed_ms

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            if ".norm" in name and name.endswith("weight"):
                yield name, torch.ones(parameter.shape, device=self.device, dtype=self.size.dtype)
            else:
                yield name, self._random(*parameter.shape) * self.size.weight_std

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=self.size.dtype)

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _smallest_plan(spec: ARDiffusionKVCacheSpec, config: ARDiffusionKVConfig, itemsize: int) -> CapacityPlan:
    """One session and not a page more."""
    needed = MemoryModel.of(spec, config, itemsize=itemsize).required_bytes(1)
    return plan_capacity(spec, config, available_bytes=needed, itemsize=itemsize)


@torch.no_grad()
def measure(size: Size, device: torch.device, attention: str, *, compiled: bool) -> dict[str, Any]:
    """Every figure, as plain numbers."""
    world = World(size, device, attention)
    blocks = -(-size.config.sliding_window_num_frames // size.config.num_frames_per_block)
    first_ms = [world.chunk() for _ in range(blocks + 1)]
    chunk_ms = {"eager": [world.chunk() for _ in range(size.rounds)]}
    bytes_of = _bytes(world, device)
    compile_ms = None
    if compiled:
        world.model.compile_blocks(backend=size.compiler)
        compile_ms = sum(world.chunk() for _ in range(2))
        chunk_ms["compiled"] = [world.chunk() for _ in range(size.rounds)]
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "attention": attention,
        "height": size.height,
        "width": size.width,
        "dtype": str(size.dtype).removeprefix("torch."),
        "parameters": sum(parameter.numel() for parameter in world.model.parameters()),
        "first_chunks_ms": [round(ms, 2) for ms in first_ms],
        "chunk_ms": {name: round(statistics.median(values), 2) for name, values in chunk_ms.items()},
        "public_ms": PUBLIC_MS if size is FULL else None,
        "two_compiling_chunks_ms": compile_ms,
        "bytes": bytes_of,
        "finite": world.finite,
    }


def _bytes(world: World, device: torch.device) -> dict[str, int]:
    """What was planned, and what was taken. The VAE's histories are planned, but not here: no VAE runs."""
    weights = sum(parameter.nbytes for parameter in world.model.parameters())
    owned: OwnedBytes = world.owned
    here = world.plan.planned_bytes - owned.encoder_histories - owned.decoder_history
    found = {"weights": weights, "planned_session": world.plan.planned_bytes, "planned_without_vae": here}
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        found |= {"peak": peak, "beyond_the_plan": peak - weights - here}
    return found


def report(figures: dict[str, Any]) -> str:
    """The figures as text."""
    lines = [
        f"{figures['parameters']:,} parameters, {figures['height']} x {figures['width']}, {figures['dtype']}",
        f"{figures['attention']} attention; {figures['device']}, torch {figures['torch']}",
        f"latents finite: {figures['finite']}",
    ]
    for name, ms in figures["chunk_ms"].items():
        public = figures["public_ms"]
        beside = f"   public figure {public[name]:,.0f} ms ({ms / public[name]:.2f} of it)" if public else ""
        lines.append(f"chunk, {name:<9} {ms:>12,.2f} ms{beside}")
    lines += [f"bytes, {name:<20} {count:>18,}" for name, count in figures["bytes"].items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--attention", default="sdpa", choices=("sdpa", "flex", "flash_attn"))
    parser.add_argument("--eager-only", action="store_true", help="leave the compiled blocks out")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    on_device = torch.cuda.is_available()
    if not on_device:
        torch.set_num_threads(1)
    device = torch.device("cuda" if on_device else "cpu")
    figures = measure(FULL if on_device else TINY, device, chosen.attention, compiled=not chosen.eager_only)
    print(json.dumps(figures, indent=2) if chosen.json else report(figures))
    if not figures["finite"]:
        sys.exit("latents are not finite")


if __name__ == "__main__":
    main()
