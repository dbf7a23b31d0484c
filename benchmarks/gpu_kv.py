"""Paged KV on a CUDA device at the geometry of LingBot World v2, in bfloat16, with each attention backend.

    python benchmarks/gpu_kv.py [--json]

Needs torch and numpy, and of this repository `contracts` and `gpu_worker.kv`. Everything is one layer: layers repeat.
The two ceilings, bytes and multiplications a second, are measured in the same run on the same device; what a backend
achieves is given as a share of them. Takes a minute or two; without a CUDA device a tiny size runs on the CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name that torch code uses

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout, nothing installed

from contracts.capacity import plan_capacity
from contracts.kv_spec import ARDiffusionKVBranchSpec, ARDiffusionKVCacheSpec, resolve_kv_config
from gpu_worker.kv.attention import AttentionBackend, read_visible
from gpu_worker.kv.backends import available_backends
from gpu_worker.kv.cache import ARDiffusionKVCache
from gpu_worker.kv.metadata import PagedMetadata
from gpu_worker.kv.state import ARDiffusionKVState


@dataclass(frozen=True)
class Size:
    """What is measured."""

    heads: int
    head_size: int
    tokens: int
    frames: int
    window: int
    sink: int
    matmul: int
    copy_bytes: int
    rounds: int


LINGBOT = Size(
    heads=40,
    head_size=128,
    tokens=1560,
    frames=3,
    window=9,
    sink=9,
    matmul=8192,
    copy_bytes=1 << 31,
    rounds=30,
)
TINY = Size(
    heads=2, head_size=8, tokens=4, frames=3, window=9, sink=9, matmul=64, copy_bytes=1 << 16, rounds=3
)


class Timer:
    """Milliseconds of a call on the device, as a median over rounds in which the contenders take turns."""

    def __init__(self, device: torch.device, rounds: int) -> None:
        self._device = device
        self._rounds = rounds

    def race(self, contenders: dict[str, Callable[[], object]]) -> dict[str, np.ndarray]:
        """Samples of each; the first two rounds only warm up."""
        names = list(contenders)
        samples: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(self._rounds + 2):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                elapsed = self._once(contenders[name])
                if turn >= 2:
                    samples[name].append(elapsed)
        return {name: np.array(values) for name, values in samples.items()}

    def _once(self, function: Callable[[], object]) -> float:
        if self._device.type != "cuda":
            started = time.perf_counter()
            function()
            return (time.perf_counter() - started) * 1000
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self._device)
        begin.record()
        function()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)


class World:
    """One session of one layer with a full window.

    Args:
        size: the geometry.
        device: where.
        dtype: of K and V.
        backend: how to attend.
    """

    def __init__(
        self, size: Size, device: torch.device, dtype: torch.dtype, backend: AttentionBackend
    ) -> None:
        spec = spec_of(size)
        config = resolve_kv_config(spec, {"gpu_memory_fraction": 1.0})
        roomy = plan_capacity(spec, config, available_bytes=1 << 50, itemsize=dtype.itemsize)
        plan = plan_capacity(spec, config, available_bytes=roomy.required_bytes, itemsize=dtype.itemsize)
        cache = ARDiffusionKVCache(spec, config, plan, device=device, dtype=dtype, attention=backend)
        assert cache.allocated_bytes() == plan.planned_bytes, "what was planned is what was allocated"
        self.state = ARDiffusionKVState("bench", cache)
        shape = (3, 1, size.frames * size.tokens, size.heads, size.head_size)
        self.tokens = torch.randn(shape, device=device, dtype=dtype)
        for _ in range(2 * (size.sink + size.window) // size.frames):
            self.forward(commit=True)

    def forward(self, *, commit: bool) -> torch.Tensor:
        """One layer of one forward, book-keeping included."""
        (handle,) = self.state.get_kv_caches("main", seq_len=self.tokens.shape[2], commit_current=commit)
        self.state.prepare_paged_context("main")
        out = handle.write_and_attend(*self.tokens)
        self.state.commit_paged_context("main")
        return out


class Written:
    """In place of a backend: K and V are written, and that is all."""

    name = "written"

    def attend(
        self, q: torch.Tensor, _k: torch.Tensor, _v: torch.Tensor, _metadata: PagedMetadata
    ) -> torch.Tensor:
        return q


class Gathered:
    """In place of a backend: K and V are written and gathered, but not attended to."""

    name = "gathered"

    def attend(
        self, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, metadata: PagedMetadata
    ) -> torch.Tensor:
        read_visible(k_pages, metadata), read_visible(v_pages, metadata)
        return q


def spec_of(size: Size) -> ARDiffusionKVCacheSpec:
    """One layer of the geometry."""
    return ARDiffusionKVCacheSpec(
        num_layers=1,
        num_kv_heads=size.heads,
        head_size=size.head_size,
        tokens_per_frame=size.tokens,
        frames_per_block=size.frames,
        window_frames=size.window,
        sink_frames=size.sink,
        kv_branches=(ARDiffusionKVBranchSpec("main", 0),),
    )


@dataclass(frozen=True)
class Ceilings:
    """What the device can do, as measured here: a large copy and a large matrix product."""

    bytes_per_s: float
    operations_per_s: float

    @classmethod
    def measured(cls, size: Size, device: torch.device, dtype: torch.dtype, timer: Timer) -> Ceilings:
        source = torch.empty(size.copy_bytes // dtype.itemsize, device=device, dtype=dtype)
        target = torch.empty_like(source)
        a, b = torch.randn(2, size.matmul, size.matmul, device=device, dtype=dtype)
        times = timer.race({"copy": lambda: target.copy_(source), "matmul": lambda: a @ b})
        # The fastest sample: a ceiling is what is possible.
        copy_s, matmul_s = (float(times[name].min()) / 1000 for name in ("copy", "matmul"))
        return cls(2 * source.nbytes / copy_s, 2 * size.matmul**3 / matmul_s)


def plain_attention(size: Size, device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    """Attention on K and V that lie together already."""
    heads, head, visible = size.heads, size.head_size, size.sink + size.window
    q = torch.randn(1, size.frames * size.tokens, heads, head, device=device, dtype=dtype)
    k, v = torch.randn(2, 1, visible * size.tokens, heads, head, device=device, dtype=dtype)
    return lambda: F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))


def cat_and_slice(size: Size, device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    """A cache that is appended to by `torch.cat` and cut by slices, attention included."""
    heads, head, visible = size.heads, size.head_size, size.sink + size.window
    q, new_k, new_v = torch.randn(3, 1, size.frames * size.tokens, heads, head, device=device, dtype=dtype)
    cached = list(torch.randn(2, 1, visible * size.tokens, heads, head, device=device, dtype=dtype))
    sink, window = size.sink * size.tokens, size.window * size.tokens

    def chunk() -> object:
        for index, new in enumerate((new_k, new_v)):
            grown = torch.cat((cached[index], new), 1)
            cached[index] = torch.cat((grown[:, :sink], grown[:, -window:]), 1)
        return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, *cached)))

    return chunk


def measure(size: Size, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The whole benchmark."""
    spec = spec_of(size)
    timer = Timer(device, size.rounds)
    top = Ceilings.measured(size, device, dtype, timer)
    found = available_backends(spec, resolve_kv_config(spec), device=device, dtype=dtype)
    refused = {name: backend for name, backend in found.items() if isinstance(backend, str)}
    contenders: dict[str, Callable[[], object]] = {
        "plain": plain_attention(size, device, dtype),
        "cat_and_slice": cat_and_slice(size, device, dtype),
    }
    worlds: dict[str, World] = {}
    parts: dict[str, AttentionBackend] = {"written": Written(), "gathered": Gathered()}
    for name, backend in (found | parts).items():
        if isinstance(backend, str):
            continue
        try:
            world = worlds[name] = World(size, device, dtype, backend)
        except Exception as error:  # noqa: BLE001 - a kernel that fails here must not hide the others' figures
            refused[name] = f"failed: {type(error).__name__}: {error}"[:300]
            continue
        if name in found:
            contenders[f"{name} commit"] = partial(world.forward, commit=True)
        contenders[f"{name} probe"] = partial(world.forward, commit=False)
    times = timer.race(contenders)
    frame_bytes = 2 * size.tokens * size.heads * size.head_size * dtype.itemsize  # K and V
    return {
        "benchmark": "gpu_kv",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "dtype": str(dtype),
        "size": vars(size),
        "ceilings": vars(top),
        "refused": refused,
        "rows": {
            name: timing(samples, times["plain"]) | achieved(name, samples, size, frame_bytes, top)
            for name, samples in times.items()
        },
        "largest_difference_from_sdpa": agreement(
            {name: world for name, world in worlds.items() if name in found}
        ),
    }


def agreement(worlds: dict[str, World]) -> dict[str, float]:
    """How far each backend's output is from that of torch's own, on the same tokens."""
    tokens = worlds["sdpa"].tokens
    outputs = {}
    for name, world in worlds.items():
        world.state.reset()
        world.tokens = tokens
        for _ in range(6):
            world.forward(commit=True)
        outputs[name] = world.forward(commit=False).float()
    return {name: float((out - outputs["sdpa"]).abs().max()) for name, out in outputs.items()}


def timing(samples: np.ndarray, plain: np.ndarray) -> dict[str, float]:
    """The median, and the median of the rounds' ratios to plain attention."""
    return {
        "median_ms": round(float(np.median(samples)), 4),
        "over_plain": round(float(np.median(samples / plain)), 4),
    }


def achieved(name: str, samples: np.ndarray, size: Size, frame_bytes: int, top: Ceilings) -> dict[str, float]:
    """Bytes or operations a second at the median, and their share of the ceiling."""
    seconds, visible = float(np.median(samples)) / 1000, size.sink + size.window
    if name.startswith(("written", "gathered")):
        gathered = 2 * visible * frame_bytes if name.startswith("gathered") else 0
        rate = (2 * size.frames * frame_bytes + gathered) / seconds
        return {"TB_per_s": round(rate / 1e12, 4), "of_ceiling": round(rate / top.bytes_per_s, 4)}
    pairs = size.frames * size.tokens * visible * size.tokens
    rate = 4 * pairs * size.heads * size.head_size / seconds
    return {"TFLOP_per_s": round(rate / 1e12, 4), "of_ceiling": round(rate / top.operations_per_s, 4)}


def show(report: dict[str, Any]) -> None:
    """Prints the report as plain text."""
    print(f"{report['device']}, torch {report['torch']}, {report['dtype']}")
    top = report["ceilings"]
    print(
        f"ceilings: {top['bytes_per_s'] / 1e12:.3f} TB/s, {top['operations_per_s'] / 1e12:.3f} TFLOP/s, measured here"
    )
    width = max(map(len, report["rows"]))
    print(f"{'':{width}}  median ms  / plain  achieved         of ceiling")
    for name, row in report["rows"].items():
        unit = "TB/s" if "TB_per_s" in row else "TFLOP/s"
        rate = row.get("TB_per_s", row.get("TFLOP_per_s", math.nan))
        print(
            f"{name:{width}}  {row['median_ms']:9.3f}  {row['over_plain']:7.3f}  {rate:8.3f} {unit:7}  "
            f"{row['of_ceiling']:9.1%}"
        )
    for name, why in report["refused"].items():
        print(f"{name}: not measured: {why}")
    print("largest difference from sdpa:", report["largest_difference_from_sdpa"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options = parser.parse_args()
    torch.manual_seed(0)
    with torch.inference_mode():
        if torch.cuda.is_available():
            report = measure(LINGBOT, torch.device("cuda", 0), torch.bfloat16)
        else:
            torch.set_num_threads(1)
            report = measure(TINY, torch.device("cpu"), torch.float32)
    print(json.dumps(report, indent=2)) if options.json else show(report)


if __name__ == "__main__":
    main()
