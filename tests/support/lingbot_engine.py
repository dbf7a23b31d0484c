"""The engine of `lingbot-world` over a tiny checkpoint: `--engine support.lingbot_engine:make`, or in a test's loop."""

from unittest.mock import patch

from gpu_worker.__main__ import load_installed_model
from gpu_worker.config import WorkerSettings
from gpu_worker.engine import TickEngine
from gpu_worker.models.lingbot_world.pipeline import LingBotWorldPipeline
from gpu_worker.parallel.ranks import Ranks
from support.lingbot_worlds import TOPOLOGY

MODEL = "lingbot-world"

MEMORY_BYTES = 1 << 30
"""Where nobody says how much there is."""


class TinyPipeline(LingBotWorldPipeline):
    """What is installed, but for the topology that the checkpoint must have."""

    def __init__(self, **arguments: object) -> None:
        super().__init__(**arguments, topology=TOPOLOGY)  # type: ignore[arg-type]


def make(settings: WorkerSettings, ranks: Ranks | None = None) -> TickEngine:
    """What `--model lingbot-world` builds, of a small size."""
    memory = settings.device_memory or MEMORY_BYTES
    fixed = {"device": "cpu", "dtype": "float32", "device_memory": memory}
    with patch("gpu_worker.engine.load_pipeline_factory", lambda _: TinyPipeline):
        return load_installed_model(settings.model_copy(update=fixed), ranks)
