"""What paged KV costs beside plain attention, and what it saves beside recomputing the past.

    python benchmarks/bench_kv.py [--json] [--smoke] [--rounds N] [--threads N] [--plot FILE.png]

Contenders take turns and are timed by the processor time that they take, so that the ratios of one run mean something
on a busy machine too. CPU, float32, 8 heads of 64, sink of 3 frames,
window of 6, 3 frames a chunk.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kv_race import Row, race, ratio
from kv_report import draw_history, machine, show
from kv_worlds import FRAMES, ConcatenatingWorld, ForgetfulWorld, PagedWorld, PlainWorld, Tokens

STEADY = 10
"""Chunks after which sink and window are full."""

TARGETS = {
    "paged commit / plain attention": [0.0, 1.1],
    "paged denoise pass / plain attention": [0.0, 1.1],
    "paged commit / cat and slice": [0.0, 1.0],
    "K and V made ready, paged / cat and slice": [0.0, 1.0],
    "chunk 10,000 / chunk 10": [0.95, 1.05],
}
"""Lower and upper bound of a ratio."""


@dataclass(frozen=True)
class Size:
    """How much is measured: tokens of a frame in each part, rounds, and operations of a batch."""

    rounds: int
    tokens: int
    short_tokens: int
    history_tokens: int
    history: tuple[int, ...]
    late: int
    book_keeping: int


FULL = Size(
    rounds=11,
    tokens=1560,
    short_tokens=390,
    history_tokens=120,
    history=(5, 20, 100),
    late=10_000,
    book_keeping=300,
)
SMOKE = Size(rounds=2, tokens=4, short_tokens=4, history_tokens=4, history=(2, 12), late=30, book_keeping=3)


def steady_state(size: Size) -> tuple[dict[str, Any], dict[str, float]]:
    """One layer of one chunk, all of it."""
    tokens = Tokens.random(size.tokens)
    world, probed = (PagedWorld(size.tokens).move_on_to(STEADY) for _ in range(2))
    plain, concatenating = PlainWorld(size.tokens), ConcatenatingWorld(size.tokens)
    commit = Row("paged: a commit", partial(world.forward, tokens, commit=True))
    probe = Row("paged: a denoise pass", partial(probed.forward, tokens, commit=False))
    bare = Row("plain attention, K and V at hand", partial(plain.attend, tokens))
    cat = Row("torch.cat and slice", partial(concatenating.chunk, tokens))
    return race(size.rounds, commit, probe, bare, cat), {
        "paged commit / plain attention": ratio(commit, bare),
        "paged denoise pass / plain attention": ratio(probe, bare),
        "paged commit / cat and slice": ratio(commit, cat),
    }


def made_ready(size: Size) -> tuple[dict[str, Any], dict[str, float]]:
    """The same chunk without attention itself, which is the same for all and hides the rest."""
    tokens = Tokens.random(size.tokens)
    world = PagedWorld(size.tokens, attends=False).move_on_to(STEADY)
    concatenating = ConcatenatingWorld(size.tokens, attends=False)
    # Three chunks a sample: pages come round once.
    paged = Row("K and V made ready: paged", partial(world.forward, tokens, commit=True), 3)
    cat = Row("K and V made ready: torch.cat and slice", partial(concatenating.chunk, tokens), 3)
    times = race(3 * size.rounds, paged, cat)
    return times, {"K and V made ready, paged / cat and slice": ratio(paged, cat)}


def early_and_late(size: Size) -> tuple[dict[str, Any], dict[str, float]]:
    """Chunks early and late in a session."""
    tokens = Tokens.random(size.short_tokens)
    early, late = (
        Row(
            f"paged: from chunk {chunk:,} on",
            partial(PagedWorld(size.short_tokens).move_on_to(chunk).forward, tokens, commit=True),
            3,
        )
        for chunk in (STEADY, size.late)
    )
    times = race(2 * size.rounds, early, late)
    return times, {f"chunk {size.late:,} / chunk {STEADY}": ratio(late, early)}


def history(size: Size) -> dict[str, float]:
    """How many times longer a chunk takes when everything before it has to be run again, by number of chunks."""
    found = {}
    for chunks in size.history:
        world = PagedWorld(size.history_tokens).move_on_to(chunks - 1)
        tokens, forgetful = Tokens.random(size.history_tokens), ForgetfulWorld(size.history_tokens, chunks)
        paged = Row("paged", partial(world.forward, tokens, commit=True), 3)
        recomputed = Row("recomputed", forgetful.run_all)
        race(size.rounds, paged, recomputed)
        found[str(chunks)] = ratio(recomputed, paged)
    return found


class CountingOperators(TorchDispatchMode):
    """Counts every operator that torch runs: without one no tensor is made."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def book_keeping(size: Size) -> tuple[dict[str, Any], dict[str, float], dict[str, int]]:
    """Prepare, commit and evict of a chunk, by layers and by length of the session; and what it allocates."""
    few, many, late = PagedWorld(16), PagedWorld(16, layers=80), PagedWorld(16)
    few.move_on_to(STEADY), many.move_on_to(STEADY), late.move_on_to(size.late)
    one = Row("book-keeping: 1 layer, chunk 10", few.book_keeping, size.book_keeping)
    eighty = Row("book-keeping: 80 layers, chunk 10", many.book_keeping, size.book_keeping)
    old = Row(f"book-keeping: 1 layer, chunk {size.late:,}", late.book_keeping, size.book_keeping)
    times = race(3 * size.rounds, one, eighty, old)
    with CountingOperators() as counting:
        for _ in range(100):
            many.book_keeping()
    blocks = sys.getallocatedblocks()
    for _ in range(100):
        many.book_keeping()
    kept = sys.getallocatedblocks() - blocks
    ratios = {
        "book-keeping, 80 layers / 1": ratio(eighty, one),
        f"book-keeping, chunk {size.late:,} / 10": ratio(old, one),
    }
    return times, ratios, {"torch_operators": counting.count, "python_blocks_kept": max(0, kept)}


def measure(size: Size) -> dict[str, Any]:
    """The whole benchmark."""
    times: dict[str, Any] = {}
    ratios: dict[str, float] = {}
    with torch.inference_mode():
        for part in (steady_state, made_ready, early_and_late):
            more_times, more_ratios = part(size)
            times |= more_times
            ratios |= more_ratios
        more_times, more_ratios, allocated = book_keeping(size)
        past = history(size)
    return {
        "benchmark": "kv",
        "machine": machine(),
        "rounds": size.rounds,
        "tokens_per_frame": size.tokens,
        "frames_per_chunk": FRAMES,
        "times": times | more_times,
        "ratios": ratios | more_ratios,
        "targets": TARGETS,
        "recomputed_over_paged_by_chunks": past,
        "allocated_by_100_chunks_of_book_keeping": allocated,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--smoke", action="store_true", help="the smallest possible run: shows that it works")
    parser.add_argument("--rounds", type=int, help="samples of each contender")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--plot", type=Path, help="write what recomputing costs as a picture")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    size = SMOKE if options.smoke else FULL
    report = measure(replace(size, rounds=options.rounds) if options.rounds else size)
    print(json.dumps(report, indent=2)) if options.json else show(report)
    if options.plot is not None:
        draw_history(report["recomputed_over_paged_by_chunks"], options.plot)


if __name__ == "__main__":
    main()
