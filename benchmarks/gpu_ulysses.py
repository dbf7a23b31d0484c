"""LingBot World v2 on one CUDA device and on several that share every sequence: ms a chunk, bytes, and how far apart.

    python benchmarks/gpu_ulysses.py [--degree N] [--attention sdpa|flex|flash_attn] [--eager-only] [--json]
    python benchmarks/gpu_ulysses.py --tiny      # two processes on the CPU, over gloo; its times mean nothing

Needs torch and numpy, and of this repository `contracts` and `gpu_worker`. A chunk is what `gpu_lingbot.py` measures. It
starts a process a device by itself, first one and then N, with the same random weights and inputs; each device needs 80
GB. With fewer than two devices it says so and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout, nothing installed

from gpu_lingbot import FULL, TINY, Size, World
from gpu_worker.models.lingbot_world.config import check_degree
from gpu_worker.models.lingbot_world.spec import tokens_per_frame
from gpu_worker.parallel.ulysses import Ulysses

SMALL = replace(
    TINY,
    config=replace(TINY.config, num_attention_heads=4),
    height=32,
    width=64,
    weight_std=0.2,  # so that the flow, and with it what ranks may get wrong, shows in the latents
)

COMPARED = 3
"""First chunks whose latents are compared: later ones differ by what those have added up to."""


def rank_main(rank: int, degree: int, port: int, options: dict[str, Any], results: Any) -> None:
    """One process: measures, and puts its figures into the queue."""
    tiny = options["tiny"]
    device = torch.device("cpu") if tiny else torch.device("cuda", rank)
    if tiny:
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(device)
    parallel = None
    if degree > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        dist.init_process_group("gloo" if tiny else "nccl", rank=rank, world_size=degree)
        parallel = Ulysses(dist.group.WORLD, rank, degree)
    figures = measure(SMALL if tiny else FULL, device, parallel, options)
    if rank == 0:
        results.put(figures)
    if parallel is not None:
        dist.destroy_process_group()


@torch.no_grad()
def measure(
    size: Size, device: torch.device, parallel: Ulysses | None, options: dict[str, Any]
) -> dict[str, Any]:
    """Figures of this rank, as plain numbers; chunks begin on all ranks at once, since each waits for the others."""
    world = World(size, device, options["attention"], parallel)
    blocks = -(-size.config.sliding_window_num_frames // size.config.num_frames_per_block)
    latents = []
    for _ in range(blocks + 1):
        world.chunk()
        latents.append(world.latents.float().cpu().numpy())
    before = dict(parallel.calls) if parallel is not None else {}
    chunk_ms = {"eager": statistics.median(world.chunk() for _ in range(size.rounds))}
    calls = {} if parallel is None else parallel.calls
    exchanged = {name: (count - before.get(name, 0)) // size.rounds for name, count in calls.items()}
    if not options["eager_only"]:
        world.model.compile_blocks(backend=size.compiler)
        for _ in range(2):
            world.chunk()
        chunk_ms["compiled"] = statistics.median(world.chunk() for _ in range(size.rounds))
    figures: dict[str, Any] = {
        "chunk_ms": {name: round(ms, 2) for name, ms in chunk_ms.items()},
        "collectives_a_chunk": exchanged,
        "planned_session_bytes": world.plan.planned_bytes,
        "latents": latents[:COMPARED],
        "finite": world.finite,
    }
    if device.type == "cuda":
        figures["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    return figures


def run_ranks(degree: int, options: dict[str, Any]) -> dict[str, Any]:
    """Figures of rank 0 among `degree` processes."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    results = mp.get_context("spawn").SimpleQueue()
    started = mp.spawn(rank_main, (degree, port, options, results), degree, join=False)
    figures: dict[str, Any] | None = None
    while not started.join(timeout=0.1):  # raises what a rank raised
        if figures is None and not results.empty():
            figures = results.get()
    return results.get() if figures is None else figures


def compare(options: dict[str, Any], degree: int) -> dict[str, Any]:
    """One rank against several."""
    size = SMALL if options["tiny"] else FULL
    tokens = size.config.num_frames_per_block * tokens_per_frame(size.height, size.width, size.config)
    check_degree(degree, size.config, tokens)
    one, several = run_ranks(1, options), run_ranks(degree, options)
    pairs = list(zip(one.pop("latents"), several.pop("latents"), strict=True))
    errors = [float(((a - b) ** 2).sum() ** 0.5 / (b**2).sum() ** 0.5) for b, a in pairs]
    return {
        "device": platform.machine() if options["tiny"] else torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "attention": options["attention"],
        "degree": degree,
        "height": size.height,
        "width": size.width,
        "dtype": str(size.dtype).removeprefix("torch."),
        "one": one,
        "several": several,
        "speed_up": {name: round(ms / several["chunk_ms"][name], 3) for name, ms in one["chunk_ms"].items()},
        "relative_l2": errors,
        "finite": one["finite"] and several["finite"],
    }


def report(figures: dict[str, Any]) -> str:
    """The figures as text."""
    degree, several = figures["degree"], figures["several"]
    lines = [
        f"{figures['height']} x {figures['width']}, {figures['dtype']}, {figures['attention']} attention",
        f"1 and {degree} of {figures['device']}, torch {figures['torch']}",
        f"latents finite: {figures['finite']}; relative L2 of the first chunks: "
        + ", ".join(f"{error:.2e}" for error in figures["relative_l2"]),
        f"collectives a chunk: {several['collectives_a_chunk']}",
    ]
    for name, ms in figures["one"]["chunk_ms"].items():
        shared = several["chunk_ms"][name]
        lines.append(
            f"chunk, {name:<9} {ms:>12,.2f} ms on 1 {shared:>12,.2f} ms on {degree}   x {ms / shared:.2f}"
        )
    lines += [
        f"{name:<24} {figures['one'][name]:>18,} {several[name]:>18,}"
        for name in ("planned_session_bytes", "peak_bytes")
        if name in several
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--degree", type=int, default=2, help="devices that share a sequence")
    parser.add_argument("--attention", default="sdpa", choices=("sdpa", "flex", "flash_attn"))
    parser.add_argument("--eager-only", action="store_true", help="leave the compiled blocks out")
    parser.add_argument("--tiny", action="store_true", help="on the CPU, over gloo")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    devices = torch.cuda.device_count()
    if not chosen.tiny and (devices < 2 or devices < chosen.degree):
        print(f"skipped: {devices} CUDA devices, {max(2, chosen.degree)} are needed (--tiny runs on the CPU)")
        return
    options = {"tiny": chosen.tiny, "attention": chosen.attention, "eager_only": chosen.eager_only}
    figures = compare(options, chosen.degree)
    print(json.dumps(figures, indent=2) if chosen.json else report(figures))
    if not figures["finite"]:
        sys.exit("latents are not finite")


if __name__ == "__main__":
    main()
