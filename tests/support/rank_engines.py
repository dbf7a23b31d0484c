"""An engine on each of several ranks, led by rank 0 through a script of calls; what each rank holds after each of them."""

import os
import time
from collections.abc import Iterator, Mapping
from typing import Any
from unittest.mock import patch

import torch

from contracts.errors import ConfigurationError
from gpu_worker.capability import WARMUP_SESSION_ID, DiffusionOutput
from gpu_worker.config import WorkerSettings
from gpu_worker.engine import ARDiffusionEngine
from gpu_worker.parallel.engine import LeadingEngine, Member, follow
from gpu_worker.parallel.ranks import Ranks
from gpu_worker.parallel.requests import Order, RankRequest
from gpu_worker.runner import ARDiffusionModelRunner, RunnerOptions
from support.kv_cache import CPU
from support.kv_pipeline import WarmingPipeline, make_tick
from support.rank_rollouts import Collectives


class Fault(Exception):
    """What a test makes a rank fail with."""


class SharedPipeline(WarmingPipeline):
    """Its ranks exchange something twice a chunk; `params.fault` says which of them fails, and where.

    fault = {"ranks": [1], "before": 1}      # before the second exchange
    """

    ar_diffusion_default_seed = 11

    def __init__(self, ranks: Ranks, cold: int | None = None) -> None:
        super().__init__()
        self.ranks = ranks
        self.cold = cold  # the rank that can't warm up
        self.before_output = self._exchange

    def _exchange(self) -> None:
        params = self.requests[-1].params
        assert params.get("images", [b"png"]) in ([b"png"], []), "images come as bytes"
        self.error = None
        if self.cold == self.ranks.rank and self.requests[-1].tick.session_id == WARMUP_SESSION_ID:
            raise Fault("told to stay cold")
        for number in range(2):
            self._fail_if_told(params, number)
            self.ranks.ulysses.gather(torch.ones(1, 1, 1))
        self._fail_if_told(params, 2)

    def _fail_if_told(self, params: Mapping[str, Any], number: int) -> None:
        fault = params.get("fault", {"ranks": (), "before": -1})
        if self.ranks.rank not in fault["ranks"] or fault["before"] != number:
            return
        match fault.get("as", "error"):
            case "error":
                raise Fault(f"told to fail before exchange {number}")
            case "output":
                self.error = "told to say so"
            case "exit":
                raise SystemExit(9)
            case "timed out":  # the exchange itself fails, on all ranks at once
                with patch.object(torch.distributed, "all_gather", side_effect=RuntimeError("timed out")):
                    self.ranks.ulysses.gather(torch.ones(1, 1, 1))
            case "slow":
                time.sleep(1.5)
            case "hang":
                time.sleep(1000)


def make(settings: WorkerSettings, ranks: Ranks | None = None) -> ARDiffusionEngine:
    """For `--engine support.rank_engines:make`; rank 1 has no weights, or all take long, where the model is called so."""
    assert ranks is not None, "it runs on several ranks"

    def build() -> SharedPipeline:
        if settings.model == "incomplete" and ranks.rank == 1:
            raise ConfigurationError("weight head.bias is missing", field="head.bias")
        if settings.model == "slow":
            print(f"loading rank={ranks.rank} process={os.getpid()}", flush=True)
            time.sleep(20)
        return SharedPipeline(ranks)

    pipeline = ranks.together(build, "loading")
    options = RunnerOptions(available_bytes=1 << 20)
    runner = ARDiffusionModelRunner(pipeline, device=CPU, dtype=torch.float32, options=options)
    return ARDiffusionEngine(settings.model, runner)


class RecordingMember(Member):
    """Writes down what is there after each request."""

    records: list[dict[str, Any]]

    def perform(self, request: RankRequest) -> DiffusionOutput | None:
        engine, before = self.engine, self.ranks.calls.copy()
        try:
            return super().perform(request)
        finally:
            memory = engine.memory()
            self.records.append(
                {
                    "order": request.order.value,
                    "resident": engine.resident_sessions(),
                    "used": memory["blocks_total"] - memory["blocks_free"],
                    "agreements": self.ranks.calls - before,
                }
            )


def play(ranks: Ranks, script: list[tuple[str, dict[str, Any]]], cold: int | None = None) -> dict[str, Any]:
    """Rank 0 makes the calls of a script; each rank returns what it has recorded. `cold` can't warm up."""
    pipeline = SharedPipeline(ranks, cold)
    runner = ARDiffusionModelRunner(
        pipeline, device=CPU, dtype=torch.float32, options=RunnerOptions(available_bytes=1 << 20)
    )
    member = RecordingMember(ARDiffusionEngine("shared", runner), ranks)
    member.records = []
    found: dict[str, Any] = {"records": member.records}
    generation = ranks._generation
    if ranks.rank > 0:
        fatal = follow(member)
        found["fatal"] = None if fatal is None else type(fatal).__name__
    else:
        found |= _lead(member, script)
    return found | {"hooks": pipeline.hooks(), "joined_again": ranks._generation - generation}


def _lead(member: Member, script: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    engine, evicted = LeadingEngine(member), []
    engine.on_evict = evicted.append
    with Collectives() as crossed:
        outcomes = [outcome for name, arguments in script for outcome in _called(engine, name, arguments)]
        member.ranks.send(RankRequest(Order.STOP).encode())
    return {
        "outcomes": outcomes,
        "evicted": evicted,
        "crossed": crossed.counts,
        "default_seed": engine.default_seed,
    }


def _called(engine: LeadingEngine, name: str, arguments: dict[str, Any]) -> Iterator[Any]:
    try:
        match name:
            case "tick":
                params = {"images": [b"png"]} | arguments.get("params", {})
                tick = make_tick(arguments.get("session", "a"), arguments.get("chunk", 0))
                output = engine.execute_tick(tick, params=params, seed=3)
                yield float(output.payload["mean"])
            case "lose":  # what no call does: one rank lets go by itself
                engine._engine.close_session(arguments["session"])
            case "leak":  # as a fault in the book-keeping of one rank would
                yield engine._engine._runner.cache.pool.allocate(1)
            case _:
                yield getattr(engine, name)(*arguments.get("of", ()))
    except BaseException as error:  # noqa: BLE001 - the test looks at it
        yield type(error).__name__, getattr(error, "code", None), str(error)
