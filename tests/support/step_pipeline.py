"""A pipeline with step functions, small enough to follow by hand: two steps a chunk, x = 2x + 10 and x = 2x + 5."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from contracts.tick import ARDiffusionChunkMetadata
from gpu_worker.capability import ARDiffusionRequest, DiffusionOutput
from gpu_worker.kv.state import ARDiffusionKVState
from support.kv_pipeline import RecordingPipeline

TIMESTEPS = (10, 5)


@dataclass
class Steps:
    """The state object that the step functions share.

    Args:
        request: what to generate.
        chunks: chunks left.
        values: x after each step so far.
    """

    request: ARDiffusionRequest
    chunks: int
    num_steps: int = len(TIMESTEPS)
    values: list[int] = field(default_factory=list)
    step: int = 0
    complete_after: int = len(TIMESTEPS)

    @property
    def chunk_complete(self) -> bool:
        return self.step == self.complete_after

    @property
    def finished(self) -> bool:
        return self.chunks == 0


class SteppingPipeline(RecordingPipeline):
    """Keeps x for a session; every call is written down, and whether a state was bound during it."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(**changes)
        self.x: dict[str, int] = {}
        self.trace: list[str] = []
        self.made: list[Steps] = []
        self.contexts: list[int] = []
        self.on: dict[str, Callable[[Any], Any]] = {}

    def _enter(self, name: str, argument: Any) -> ARDiffusionKVState:
        assert self.bound is not None, f"{name} runs while a session is bound"
        self.trace.append(name)
        self.on.get(name, lambda _argument: None)(argument)
        return self.bound

    def prepare_encode(self, request: ARDiffusionRequest) -> Steps:
        self._enter("encode", request)
        steps = Steps(request, 1 if request.tick is not None else request.params.get("chunks", 2))
        self.made.append(steps)
        return steps

    def prepare_next_chunk(self, state: Steps) -> None:
        self._enter("chunk", state)
        state.step = 0

    def denoise_step(self, state: Steps) -> int:
        kv = self._enter("denoise", state)
        self._pass(kv, commit=False)
        return self.x.get(kv.session_id, 1) + TIMESTEPS[state.step % len(TIMESTEPS)]

    def step_scheduler(self, state: Steps, prediction: int) -> None:
        kv = self._enter("scheduler", state)
        x = self.x.get(kv.session_id, 1) + prediction
        self.x[kv.session_id] = x
        state.values.append(x)
        state.step += 1

    def post_decode(self, state: Steps) -> DiffusionOutput:
        kv = self._enter("decode", state)
        self._pass(kv, commit=True)
        state.chunks -= 1
        return self._output(self.x[kv.session_id], state.request)

    def forward(self, request: ARDiffusionRequest) -> DiffusionOutput:
        """The same chunk in one go, written down without the step functions."""
        kv = self._enter("forward", request)
        x = self.x.get(kv.session_id, 1)
        for timestep in TIMESTEPS:
            self._pass(kv, commit=False)
            x = 2 * x + timestep
        self._pass(kv, commit=True)
        self.x[kv.session_id] = x
        return self._output(x, request)

    def _pass(self, kv: ARDiffusionKVState, *, commit: bool) -> None:
        (handle,) = kv.get_kv_caches("main", seq_len=16, commit_current=commit)
        self.contexts.append(kv.prepare_paged_context("main").start_frame)
        q = torch.zeros(1, 16, 1, 1)
        handle.write_and_attend(q, q, q)
        kv.commit_paged_context("main")

    def _output(self, x: int, request: ARDiffusionRequest) -> DiffusionOutput:
        metadata = {}
        if request.tick is not None:
            metadata = {"ar_diffusion": ARDiffusionChunkMetadata.from_tick(request.tick).to_dict()}
        return DiffusionOutput({"x": torch.tensor(x)}, None, metadata, self.error)

    def reset_ar_diffusion_session(self, session_id: str) -> None:
        self.x.pop(session_id, None)
        super().reset_ar_diffusion_session(session_id)

    def close_ar_diffusion_session(self, session_id: str) -> None:
        self.x.pop(session_id, None)
        super().close_ar_diffusion_session(session_id)
