"""Tiny DreamZero worlds on a runner: one robot's observations, ticks counted for each session."""

import atexit
import io
import shutil
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
from PIL import Image

from contracts.dreamzero import observation_control
from contracts.events import ARDiffusionControlInput
from contracts.tick import ARDiffusionTickRequest
from gpu_worker.capability import ARDiffusionRequest, DiffusionOutput
from gpu_worker.models.dreamzero.config import DreamZeroTopology
from gpu_worker.models.dreamzero.pipeline import DreamZeroPipeline
from gpu_worker.runner import ARDiffusionModelRunner, RunnerOptions
from support.dreamzero_checkpoint import EMBODIMENT, deployment, write_checkpoint
from support.dreamzero_model import TINY
from support.kv_cache import CPU
from support.lingbot_checkpoint import change_json

VIEWS = ("left", "right", "wrist")
LANGUAGE = "Over  the Snow"
OTHER_LANGUAGE = "the river and night"
PROMPT = "{language} and rain"
"""Short: the tiny text encoder reads seven tokens, and the language must be among them."""

STEPS = 2
"""Denoising steps of most tests; each is a forward of both branches."""


@cache
def shared_checkpoint() -> Path:
    """One checkpoint for all tests of a process; nobody changes it."""
    folder = Path(mkdtemp(prefix="dreamzero-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return with_prompt(write_checkpoint(folder / "checkpoint"))


def with_prompt(checkpoint: Path, topology: DreamZeroTopology = TINY) -> Path:
    """The checkpoint with this module's prompt."""
    robot = deployment(topology)["embodiments"][EMBODIMENT] | {"prompt": PROMPT}
    change_json(checkpoint / "worldline.json", embodiments={EMBODIMENT: robot})
    return checkpoint


def sentence(language: str) -> str:
    """What the text encoder is given."""
    return PROMPT.replace("{language}", " ".join(language.lower().split()))


def tiny_pipeline(
    checkpoint: Path | None = None, *, dtype: torch.dtype = torch.float32, **config: Any
) -> DreamZeroPipeline:
    folder = shared_checkpoint() if checkpoint is None else checkpoint
    settings = {"checkpoint": str(folder), "num_inference_steps": STEPS}
    return DreamZeroPipeline(device=CPU, dtype=dtype, config=settings | config)


def camera(seed: int, *, height: int = 20, width: int = 32) -> np.ndarray:
    """A smooth picture, different for every seed."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (3, 4, 3), dtype=np.uint8))
    return np.asarray(coarse.resize((width, height), Image.Resampling.BILINEAR))


def png(picture: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, format="PNG")
    return buffer.getvalue()


def cameras(number: int) -> dict[str, np.ndarray]:
    """What the three cameras show at observation `number`."""
    return {view: camera(10 * number + index) for index, view in enumerate(VIEWS)}


def arm(number: int) -> dict[str, list[float]]:
    """The state at observation `number`."""
    joints = [0.3 * np.sin(number + joint) for joint in range(7)]
    return {"joint_position": [float(value) for value in joints], "gripper_position": [0.25]}


def observed(
    number: int, *, language: str = LANGUAGE, state: Mapping[str, Sequence[float]] | None = None
) -> ARDiffusionControlInput:
    """The control of observation `number`."""
    urls = {view: f"redis:camera:{number}:{view}" for view in VIEWS}
    return observation_control(urls, arm(number) if state is None else state, language)


def pictures_of(number: int) -> tuple[Any, ...]:
    """The images of observation `number` in the order in which a request has them."""
    shown = cameras(number)
    return tuple(png(shown[view]) for view in sorted(shown))


class Robots:
    """A runner and its pipeline."""

    def __init__(self, pipeline: DreamZeroPipeline | None = None, **options: Any) -> None:
        self.pipeline = tiny_pipeline() if pipeline is None else pipeline
        dtype = options.pop("dtype", torch.float32)
        settings = {"available_bytes": 1 << 30, "session_capacity": 4} | options
        self.runner = ARDiffusionModelRunner(
            self.pipeline, device=CPU, dtype=dtype, options=RunnerOptions(**settings)
        )
        self.runner.load()
        self._chunks: dict[str, int] = {}

    def act(
        self,
        number: int,
        session_id: str = "robot",
        *,
        control: ARDiffusionControlInput | None = None,
        images: tuple[Any, ...] | None = None,
        seed: int = 1140,
        **params: Any,
    ) -> DiffusionOutput:
        """The answer to observation `number`."""
        index = self._chunks.get(session_id, 0)
        seen = observed(number) if control is None else control
        tick = ARDiffusionTickRequest(session_id, f"r-{index}", index, (number,), controls=(seen,))
        request = ARDiffusionRequest(
            images=pictures_of(number) if images is None else images, tick=tick, params=params
        )
        output = self.runner.execute_model(request, seed=seed)
        self._chunks[session_id] = index + 1
        return output

    def restarts(self, session_id: str = "robot") -> None:
        self._chunks.pop(session_id, None)
