"""A pipeline small enough to follow by hand: its output is the mean of the frames that attention sees."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from contracts.kv_spec import ARDiffusionCrossAttentionKVSpec, ARDiffusionKVCacheSpec
from contracts.tick import ARDiffusionChunkMetadata, ARDiffusionTickRequest
from gpu_worker.capability import WARMUP_SESSION_ID, ARDiffusionRequest, DiffusionOutput
from gpu_worker.kv.state import ARDiffusionKVState
from gpu_worker.runner import ARDiffusionModelRunner, RunnerOptions
from support.kv_cache import CPU, tiny_spec


class RecordingPipeline:
    """Commits one frame a tick and writes down what it was asked.

    Args:
        changes: changes to the tiny spec.
    """

    def __init__(self, **changes: Any) -> None:
        values: dict[str, Any] = {
            "cross_attention": (ARDiffusionCrossAttentionKVSpec("text", 2),),
            "session_capacity": 2,
        }
        self.spec = tiny_spec(**{**values, **changes})
        self.bound: ARDiffusionKVState | None = None
        self.states: list[ARDiffusionKVState] = []
        self.requests: list[ARDiffusionRequest] = []
        self.calls: list[tuple[str, str]] = []
        self.before_output: Callable[[], None] = lambda: None
        self.on_reset: Callable[[], None] = lambda: None
        self.on_close: Callable[[], None] = lambda: None
        self.error: str | None = None

    def ar_diffusion_kv_cache_spec(self) -> ARDiffusionKVCacheSpec:
        return self.spec

    @contextmanager
    def bind_ar_diffusion_state(self, session_id: str, state: ARDiffusionKVState) -> Iterator[None]:
        self.bound = state
        self.calls.append(("bind", session_id))
        try:
            yield
        finally:
            self.bound = None

    def reset_ar_diffusion_session(self, session_id: str) -> None:
        self.calls.append(("reset", session_id))
        self.on_reset()

    def close_ar_diffusion_session(self, session_id: str) -> None:
        self.calls.append(("close", session_id))
        self.on_close()

    def forward(self, request: ARDiffusionRequest) -> DiffusionOutput:
        state = self.bound
        assert state is not None
        self.states.append(state)
        self.requests.append(request)
        if not state.is_cross_attention_populated("main", "text"):
            state.populate_cross_attention("main", "text", [(torch.ones(1, 2, 1, 1), torch.ones(1, 2, 1, 1))])
        (handle,) = state.get_kv_caches("main", seq_len=16, commit_current=True)
        frame = state.prepare_paged_context("main").start_frame
        k = torch.full((1, 16, 1, 1), float(frame))
        mean = handle.write_and_attend(torch.zeros_like(k), k, k).mean()
        self.before_output()
        state.commit_paged_context("main")
        noise = torch.rand(1, generator=request.generator)
        metadata = {}
        if request.tick is not None:
            metadata = {"ar_diffusion": ARDiffusionChunkMetadata.from_tick(request.tick).to_dict()}
        return DiffusionOutput({"mean": mean, "noise": noise}, None, metadata, self.error)

    def hooks(self) -> list[tuple[str, str]]:
        """The lifecycle hooks called so far, without the binding."""
        return [call for call in self.calls if call[0] != "bind"]


class WarmingPipeline(RecordingPipeline):
    """The same with two warm-up ticks."""

    def ar_diffusion_warmup_requests(self) -> Iterator[ARDiffusionRequest]:
        for index in range(2):
            yield ARDiffusionRequest(tick=make_tick(WARMUP_SESSION_ID, index))


def build_recording(*, device: torch.device, dtype: torch.dtype, config: dict[str, Any]) -> RecordingPipeline:
    """What an entry point names: builds a pipeline for a device; `config` changes its spec."""
    assert (device, dtype) == (CPU, torch.float32)
    return RecordingPipeline(**config)


def make_tick(session_id: str = "world", chunk_index: int = 0, **changes: Any) -> ARDiffusionTickRequest:
    """A tick of a session."""
    return ARDiffusionTickRequest(session_id, f"{session_id}-{chunk_index}", chunk_index, **changes)


def make_runner(pipeline: object, **options: Any) -> ARDiffusionModelRunner:
    """A loaded runner on the CPU with plenty of memory."""
    runner = ARDiffusionModelRunner(
        pipeline,
        device=CPU,
        dtype=torch.float32,
        options=RunnerOptions(**{"available_bytes": 1 << 20, **options}),
    )
    runner.load()
    return runner
