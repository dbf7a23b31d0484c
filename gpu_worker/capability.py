"""The seam between runner and model: what a pipeline implements, gets and returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from contracts.errors import ConfigurationError, InvalidTypeError
from contracts.kv_spec import ARDiffusionKVCacheSpec
from contracts.tick import ARDiffusionTickRequest

if TYPE_CHECKING:
    import torch

    from gpu_worker.kv.state import ARDiffusionKVState

WARMUP_SESSION_ID: Final = "__ardiffusion_warmup__"
"""The session that warm-up requests run in; a provider names it in the ticks it builds."""


@dataclass(frozen=True, slots=True)
class ARDiffusionRequest:
    """One request to a pipeline.

    Args:
        prompt: the prompt in force, or None.
        images: source images, as the model wants them.
        tick: the snapshot to generate one chunk from; None for a request without the tick protocol.
        params: the session's creation parameters.
        generator: the session's random state, owned by the runner; it continues from tick to tick.
        extra_args: what a request without a tick may carry: `session_id`, `reset`, `close_session`.
    """

    prompt: str | None = None
    images: tuple[Any, ...] = ()
    tick: ARDiffusionTickRequest | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    generator: torch.Generator | None = None
    extra_args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DiffusionOutput:
    """What a pipeline returns.

    Args:
        payload: name -> torch tensor, numpy array or bytes.
        frames: pixel frames, uint8 [frames, height, width, 3], or None.
        metadata: `{"ar_diffusion": {...}}`, see `ARDiffusionChunkMetadata`.
        error: what went wrong, or None.
    """

    payload: Mapping[str, Any] = field(default_factory=dict)
    frames: Any | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


@runtime_checkable
class SupportsARDiffusionPipeline(Protocol):
    """What the runner asks of a pipeline.

    Optional: `ar_diffusion_warmup_requests() -> Iterable[ARDiffusionRequest]`, run once at start-up in the session
    `WARMUP_SESSION_ID` (see `SupportsWarmup`); `ar_diffusion_default_seed` (see `HasDefaultSeed`).
    """

    def ar_diffusion_kv_cache_spec(self) -> ARDiffusionKVCacheSpec:
        """The KV geometry and policy."""
        ...

    def bind_ar_diffusion_state(
        self, session_id: str, state: ARDiffusionKVState
    ) -> AbstractContextManager[None]:
        """Makes `state` the current one while the context is open. The pipeline must not keep it."""
        ...

    def reset_ar_diffusion_session(self, session_id: str) -> None:
        """Drops what the model keeps for a session that starts again."""
        ...

    def close_ar_diffusion_session(self, session_id: str) -> None:
        """Drops what the model keeps for a session that is gone."""
        ...

    def forward(self, request: ARDiffusionRequest) -> DiffusionOutput:
        """Generates one chunk."""
        ...


@runtime_checkable
class StepState(Protocol):
    """What the runner reads of the state that a pipeline's step functions pass along; the rest is the pipeline's."""

    @property
    def num_steps(self) -> int:
        """Denoise steps of the chunk that `prepare_next_chunk` began."""
        ...

    @property
    def chunk_complete(self) -> bool:
        """Whether no denoise step of this chunk is left."""
        ...

    @property
    def finished(self) -> bool:
        """Whether no chunk is left; read after `post_decode`."""
        ...


@runtime_checkable
class SupportsStepExecution(Protocol):
    """A pipeline that can be run one denoise step at a time.

    A request is `prepare_encode`, then for each chunk `prepare_next_chunk`, (`denoise_step`, `step_scheduler`) as
    often as it takes, and `post_decode`. A request with a tick is one chunk, and its output that of `forward`.
    """

    def prepare_encode(self, request: ARDiffusionRequest) -> Any:
        """Checks and encodes the request; returns a new `StepState`."""
        ...

    def prepare_next_chunk(self, state: Any) -> None:
        """Begins the next chunk: its conditions, its noise."""
        ...

    def denoise_step(self, state: Any) -> Any:
        """One pass of the model; returns its prediction. Leaves nothing in committed KV."""
        ...

    def step_scheduler(self, state: Any, prediction: Any) -> None:
        """Takes the latents of the chunk one step on."""
        ...

    def post_decode(self, state: Any) -> DiffusionOutput:
        """Commits the chunk's KV and returns the chunk."""
        ...


@runtime_checkable
class SupportsWarmup(Protocol):
    """A pipeline that knows which requests warm it up."""

    def ar_diffusion_warmup_requests(self) -> Iterable[ARDiffusionRequest]:
        """Requests to execute in order; their ticks name `WARMUP_SESSION_ID`."""
        ...


@runtime_checkable
class HasDefaultSeed(Protocol):
    """A pipeline whose sessions begin from a seed of its own where they name none; of all others it is 0."""

    ar_diffusion_default_seed: int


@runtime_checkable
class BeginsAnewOnPrompt(Protocol):
    """A pipeline for which another prompt is another task: it lets go of all that came before, within a session, too."""

    begins_anew_on_prompt: bool


_REQUIRED: Final = (
    "ar_diffusion_kv_cache_spec",
    "bind_ar_diffusion_state",
    "reset_ar_diffusion_session",
    "close_ar_diffusion_session",
    "forward",
)


def check_pipeline(pipeline: object) -> tuple[SupportsARDiffusionPipeline, ARDiffusionKVCacheSpec]:
    """The pipeline and its spec; InvalidTypeError naming what it lacks."""
    missing = [name for name in _REQUIRED if not callable(getattr(pipeline, name, None))]
    if missing or not isinstance(pipeline, SupportsARDiffusionPipeline):
        raise InvalidTypeError(
            f"{type(pipeline).__name__} does not implement SupportsARDiffusionPipeline: it lacks {', '.join(missing)}",
            field="pipeline",
        )
    spec = pipeline.ar_diffusion_kv_cache_spec()
    if not isinstance(spec, ARDiffusionKVCacheSpec):
        raise InvalidTypeError(
            f"ar_diffusion_kv_cache_spec() returned {type(spec).__name__}, not ARDiffusionKVCacheSpec",
            field="ar_diffusion_kv_cache_spec",
        )
    return pipeline, spec


def step_functions(pipeline: object, *, required: bool) -> SupportsStepExecution | None:
    """The pipeline if it has step functions; where they are required and it has none, a ConfigurationError."""
    if isinstance(pipeline, SupportsStepExecution):
        return pipeline
    if required:
        raise ConfigurationError(
            f"step_execution=True: {type(pipeline).__name__} does not implement SupportsStepExecution",
            field="step_execution",
        )
    return None


def checked_output(source: str, output: object) -> DiffusionOutput:
    """`output` if it is a `DiffusionOutput`, else InvalidTypeError naming the method it came from."""
    if not isinstance(output, DiffusionOutput):
        raise InvalidTypeError(
            f"{source}() returned {type(output).__name__}, not DiffusionOutput", field="output"
        )
    return output
