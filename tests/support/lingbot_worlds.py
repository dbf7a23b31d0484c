"""Tiny LingBot worlds on a runner, ticks counted for each session."""

import atexit
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from contracts.events import ARDiffusionControlInput
from contracts.lingbot import CAMERA_TRACK, CAMERA_TRAJECTORY_SCHEMA, actions_control
from contracts.tick import ARDiffusionTickRequest
from gpu_worker.capability import ARDiffusionRequest, DiffusionOutput
from gpu_worker.models.lingbot_world.pipeline import LingBotWorldPipeline
from gpu_worker.models.lingbot_world.settings import LingBotTopology
from gpu_worker.runner import ARDiffusionModelRunner, RunnerOptions
from support.kv_cache import CPU
from support.lingbot_checkpoint import TINY_VAE, write_checkpoint
from support.lingbot_model import HEIGHT, TINY, WIDTH, seeded

TOPOLOGY = LingBotTopology(TINY, TINY_VAE)


@cache
def shared_checkpoint() -> Path:
    """One checkpoint for all tests of a process; nobody changes it."""
    folder = Path(mkdtemp(prefix="lingbot-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return write_checkpoint(folder / "checkpoint")


def tiny_pipeline(
    checkpoint: Path | None = None, *, dtype: torch.dtype = torch.float32, **config: Any
) -> LingBotWorldPipeline:
    settings = {
        "checkpoint": str(shared_checkpoint() if checkpoint is None else checkpoint),
        "ar_diffusion_height": HEIGHT,
        "ar_diffusion_width": WIDTH,
    }
    return LingBotWorldPipeline(device=CPU, dtype=dtype, config=settings | config, topology=TOPOLOGY)


def picture(seed: int = 5) -> torch.Tensor:
    return torch.rand(3, HEIGHT, WIDTH, generator=seeded(seed))


def held(*frames: str) -> ARDiffusionControlInput:
    """The keys held in each latent frame, as one string a frame."""
    return actions_control([tuple(frame) for frame in frames])


def trajectory(poses: Any, intrinsics: Any) -> ARDiffusionControlInput:
    data = {"poses": [pose.tolist() for pose in poses], "intrinsics": [row.tolist() for row in intrinsics]}
    return ARDiffusionControlInput(CAMERA_TRACK, CAMERA_TRAJECTORY_SCHEMA, data)


FORWARD = held("w", "w", "w")


class Worlds:
    """A runner and its pipeline."""

    def __init__(
        self, pipeline: LingBotWorldPipeline | None = None, *, stepped: bool = False, **config: Any
    ) -> None:
        self.pipeline = tiny_pipeline(**config) if pipeline is None else pipeline
        options = RunnerOptions(available_bytes=1 << 30, step_execution=stepped)
        self.runner = ARDiffusionModelRunner(self.pipeline, device=CPU, dtype=torch.float32, options=options)
        self.runner.load()
        self._next: dict[str, int] = {}

    def request(
        self,
        session: str = "w",
        prompt: str | None = "rain over the valley",
        control: ARDiffusionControlInput | None = FORWARD,
        *,
        images: tuple[Any, ...] | None = None,
        chunk_index: int | None = None,
        params: dict[str, Any] | None = None,
        **fields: Any,
    ) -> ARDiffusionRequest:
        index = self._next.get(session, 0) if chunk_index is None else chunk_index
        controls = () if control is None else (control,)
        tick = ARDiffusionTickRequest(session, f"{session}-{index}", index, (), prompt, controls, **fields)
        given = (picture(),) if images is None else images
        return ARDiffusionRequest(prompt=prompt, images=given, tick=tick, params=params or {})

    def tick(self, *arguments: Any, seed: int = 1, **fields: Any) -> DiffusionOutput:
        request = self.request(*arguments, **fields)
        output = self.runner.execute_model(request, seed=seed)
        assert request.tick is not None
        self._next[request.tick.session_id] = request.tick.chunk_index + 1
        return output

    def latents(self, *arguments: Any, **fields: Any) -> torch.Tensor:
        latents: torch.Tensor = self.tick(*arguments, **fields).payload["latents"]
        return latents

    def reset(self, session: str = "w") -> None:
        self.runner.reset_session(session)
        self._next.pop(session, None)
