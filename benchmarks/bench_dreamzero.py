"""What a DreamZero observation costs by part, and what guidance and the step cache change, at tiny size on the CPU.

    python benchmarks/bench_dreamzero.py [--json] [--smoke] [--rounds N]

A robot with guidance takes turns with one without, whose negative branch must be left alone, and with one whose steps may
do without a forward. Random weights, so only what is counted and the ratios of one run mean something.
"""

# ruff: noqa: SLF001 - parts are private, and this takes a pipeline apart

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))  # its tiny checkpoint

import gpu_worker.models.dreamzero.policy as policy_module
from gpu_worker.models.dreamzero.spec import IMAGE, NEGATIVE, POSITIVE, TEXT
from lingbot_parts import Stopwatch
from machines import describe
from measuring import Contender, interleave, ratio
from stacks import broker
from support.dreamzero_worlds import Robots, tiny_pipeline
from tables import show

STEPS = 16
ROLLOUT = 4
"""Observations until a rollout begins anew; a batch is one of each kind."""

PARTS = {
    "transformer": ("_transformer", "forward"),
    "VAE: condition and stream": ("_encoder", "_encode"),
    "image tower": ("_clip", "forward"),
    "text": ("_text", "_embed"),
    "pictures: decode, crop, resize, stitch": (None, "observe"),
}
"""Part of an observation -> the policy's attribute that does it, or None for its module, and the method."""

TARGETS = {"without guidance / guided": 1.0, "step cache / guided": 1.0}
"""Both are to stay below."""


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    rounds: int
    rollouts: int


FULL = Size(rounds=15, rollouts=1)
SMOKE = Size(rounds=2, rollouts=1)


class Robot:
    """One session that observes and observes.

    Args:
        config: settings of the model.
        params: of the session.
    """

    def __init__(self, config: dict[str, Any] | None = None, **params: Any) -> None:
        self.robots = Robots(tiny_pipeline(num_inference_steps=STEPS, **(config or {})))
        self.pipeline = self.robots.pipeline
        self._params = params
        self._number = 0

    def observe(self) -> None:
        """Answers the next observation."""
        self.robots.act(self._number, **self._params)
        self._number += 1

    def branch(self, name: str) -> dict[str, int]:
        """What a branch of the KV holds."""
        session = self.robots.runner._sessions.use("robot")
        assert session is not None, "an observation comes first"
        store = self.robots.runner.cache.cross_attention
        return {
            "pages": len(session.kv.adapter(name).table),
            "caches": sum(store.is_populated("robot", name, cache) for cache in (TEXT, IMAGE)),
        }

    def watch_parts(self) -> Stopwatch:
        """A stopwatch over the parts of an observation, and over the whole."""
        watch = Stopwatch()
        for name, (attribute, method) in PARTS.items():
            owner: Any = policy_module if attribute is None else getattr(self.pipeline._policy, attribute)
            watch.watch(name, owner, method)
        watch.watch("observation", self.robots.runner, "execute_model")
        return watch


def parts_of(robot: Robot, rollouts: int) -> dict[str, Any]:
    """Milliseconds and share of each part, over whole rollouts."""
    watch = robot.watch_parts()
    for _ in range(rollouts * ROLLOUT):
        robot.observe()
    whole, count = watch.seconds["observation"], watch.calls["observation"]
    shares = {name: watch.seconds[name] / whole for name in PARTS}
    shares["book-keeping: pages, checks, sampler"] = 1 - sum(shares.values())
    return {
        "shares": shares,
        "ms": {name: round(1000 * share * whole / count, 3) for name, share in shares.items()},
        "forwards": watch.calls["transformer"] / count,
    }


async def run(size: Size) -> dict[str, Any]:
    """The whole benchmark."""
    torch.set_num_threads(1)
    with broker() as url:
        machine = describe(url)
    machine["libraries"] |= {name: version(name) for name in ("torch", "diffusers", "transformers")}
    guided, plain, cached = Robot(), Robot(cfg_scale=1.0), Robot({"step_cache": True})
    rows = [
        Contender("observation, guided", guided.observe, ROLLOUT * size.rollouts),
        Contender("observation, without guidance", plain.observe, ROLLOUT * size.rollouts),
        Contender("observation, step cache", cached.observe, ROLLOUT * size.rollouts),
    ]
    await interleave(rows, rounds=size.rounds)
    negative, reused = plain.branch(NEGATIVE), cached.pipeline.reused
    steps = cached.pipeline.forwards + reused
    parts = {
        "guided": parts_of(Robot(), size.rollouts),
        "plain": parts_of(Robot(cfg_scale=1.0), size.rollouts),
    }
    return {
        "benchmark": "dreamzero",
        "rounds": size.rounds,
        "operations_a_batch": ROLLOUT * size.rollouts,
        "machine": machine,
        "times": {row.name: row.figures() for row in rows},
        "ratios": {
            "without guidance / guided": ratio(rows[1], rows[0]),
            "step cache / guided": ratio(rows[2], rows[0]),
        },
        "targets": TARGETS,
        "shares of a tick": parts["guided"]["shares"],
        "ms of an observation": parts["guided"]["ms"],
        "work of a chunk": {
            "forwards, guided": round(parts["guided"]["forwards"]),
            "forwards, without guidance": round(parts["plain"]["forwards"]),
            "pages of the positive branch, without guidance": plain.branch(POSITIVE)["pages"],
            "pages of the negative branch, without guidance": negative["pages"],
            "text and image caches of the negative branch, without guidance": negative["caches"],
            "steps of the sampler": STEPS,
            "steps without a forward, step cache": reused / steps,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--smoke", action="store_true", help="the smallest possible run: shows that it works")
    parser.add_argument("--rounds", type=int, help="interleaved batches of each contender")
    options = parser.parse_args()
    size = SMOKE if options.smoke else FULL
    if options.rounds:
        size = Size(**{**vars(size), "rounds": options.rounds})
    report = asyncio.run(run(size))
    print(json.dumps(report, indent=2)) if options.json else show(report)


if __name__ == "__main__":
    main()
