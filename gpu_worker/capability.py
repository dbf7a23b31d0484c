"""The seam between runner and model: what a pipeline implements, gets and returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from contracts.errors import InvalidTypeError
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
    `WARMUP_SESSION_ID` (see `SupportsWarmup`).
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
class SupportsWarmup(Protocol):
    """A pipeline that knows which requests warm it up."""

    def ar_diffusion_warmup_requests(self) -> Iterable[ARDiffusionRequest]:
        """Requests to execute in order; their ticks name `WARMUP_SESSION_ID`."""
        ...


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
