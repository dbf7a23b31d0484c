"""The engine of `lingbot-world` over a tiny checkpoint: `--engine support.lingbot_engine:make`, or in a test's loop."""

from functools import partial

import torch

from gpu_worker.config import WorkerSettings
from gpu_worker.engine import ARDiffusionEngine
from gpu_worker.models.lingbot_world.pipeline import LingBotWorldPipeline
from gpu_worker.parallel.ranks import Ranks
from gpu_worker.runner import ARDiffusionModelRunner, RunnerOptions
from support.kv_cache import CPU
from support.lingbot_worlds import TOPOLOGY

MODEL = "lingbot-world"


def make(settings: WorkerSettings, ranks: Ranks | None = None) -> ARDiffusionEngine:
    """What `--model lingbot-world` builds, but for the topology that the checkpoint must have."""
    build = partial(
        LingBotWorldPipeline,
        device=CPU,
        dtype=torch.float32,
        config=settings.pipeline_config,
        topology=TOPOLOGY,
    )
    if ranks is None:
        pipeline = build()
    else:
        pipeline = ranks.together(lambda: build(parallel=ranks.ulysses), f"loading {MODEL}")
    options = RunnerOptions(available_bytes=1 << 30, step_execution=settings.step_execution)
    runner = ARDiffusionModelRunner(pipeline, device=CPU, dtype=torch.float32, options=options)
    return ARDiffusionEngine(MODEL, runner)
