"""What the worker loop drives, and our own implementation of it. Importing this module loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from contracts.errors import ConfigurationError, InvalidArgumentError
from contracts.kv_spec import ARDiffusionKVOverrides
from contracts.tick import ARDiffusionTickRequest
from gpu_worker.building import told_as_configuration
from gpu_worker.capability import ARDiffusionRequest, DiffusionOutput, HasDefaultSeed
from gpu_worker.registry import load_pipeline_factory

if TYPE_CHECKING:
    import torch

    from gpu_worker.parallel.ranks import Ranks
    from gpu_worker.runner import ARDiffusionModelRunner

DEFAULT_DTYPE: Final = "float32"
"""Element type of a model that has no `default_dtype`."""


class TickEngine(Protocol):
    """One model on one device, one call at a time."""

    model: str
    capacity: int
    """Sessions that can be resident at once."""
    on_evict: Callable[[str], None] | None
    """Called with the session id that made room for another."""

    def start(self) -> None:
        """Allocates memory and warms up."""
        ...

    def execute_tick(
        self, tick: ARDiffusionTickRequest, *, params: Mapping[str, object], seed: int
    ) -> DiffusionOutput:
        """Generates the tick's chunk; raises NotResidentError beyond chunk 0 of a session that is not here."""
        ...

    def reset_session(self, session_id: str) -> None:
        """Releases a session that starts again."""
        ...

    def close_session(self, session_id: str) -> None:
        """Releases a session; does nothing when it is not resident."""
        ...

    def is_resident(self, session_id: str) -> bool:
        """Whether the session's memory is here."""
        ...

    def resident_sessions(self) -> tuple[str, ...]:
        """Resident sessions, least recently used first."""
        ...

    def check_integrity(self) -> None:
        """Raises when memory is not accounted for; cheap, for idle moments."""
        ...

    def memory(self) -> Mapping[str, int]:
        """Bytes and pages, planned and in use."""
        ...


@runtime_checkable
class EndsWithWorker(Protocol):
    """An engine that has to be told when its worker ends."""

    def shut_down(self) -> None:
        """Called once, last; whether it was started or not."""
        ...


@runtime_checkable
class SeedsSessions(Protocol):
    """An engine that knows a seed for sessions that name none; any other begins them from 0."""

    default_seed: int


class ARDiffusionEngine:
    """`TickEngine` over a model runner.

    Args:
        model: the name that sessions ask for.
        runner: runs the pipeline; not yet loaded.
    """

    def __init__(self, model: str, runner: ARDiffusionModelRunner) -> None:
        self.model = model
        self.capacity = runner.capacity
        pipeline: object = runner.pipeline
        self.default_seed = pipeline.ar_diffusion_default_seed if isinstance(pipeline, HasDefaultSeed) else 0
        self._runner = runner

    @property
    def on_evict(self) -> Callable[[str], None] | None:
        """Called with the session id that made room for another."""
        return self._runner.on_evict

    @on_evict.setter
    def on_evict(self, callback: Callable[[str], None] | None) -> None:
        self._runner.on_evict = callback

    def start(self) -> None:
        """Allocates the pool and runs the pipeline's warm-up requests."""
        self._runner.load()
        self._runner.warm_up()

    def execute_tick(
        self, tick: ARDiffusionTickRequest, *, params: Mapping[str, object], seed: int
    ) -> DiffusionOutput:
        """Generates the tick's chunk.

        Args:
            tick: the snapshot.
            params: the session's creation parameters; `images`, where present, also becomes the request's images.
            seed: random state of a session that starts with this tick.

        Raises:
            NotResidentError: the tick continues a session that is not here.
            Whatever the pipeline raises, unchanged; the session was released.
        """
        request = ARDiffusionRequest(prompt=tick.prompt, images=_images(params), tick=tick, params=params)
        return self._runner.execute_model(request, seed=seed)

    def reset_session(self, session_id: str) -> None:
        """Releases a session that starts again and calls the pipeline's reset hook."""
        self._runner.reset_session(session_id)

    def close_session(self, session_id: str) -> None:
        """Releases a session and calls the pipeline's close hook; does nothing when it is not resident."""
        if self._runner.is_resident(session_id):
            self._runner.close_session(session_id)

    def is_resident(self, session_id: str) -> bool:
        """Whether the session's memory is here."""
        return self._runner.is_resident(session_id)

    def resident_sessions(self) -> tuple[str, ...]:
        """Resident sessions, least recently used first."""
        return self._runner.session_ids

    def check_integrity(self) -> None:
        """KVStateError unless pages, timelines and resident sessions agree."""
        self._runner.check_integrity()

    def layout(self) -> str:
        """Which pages belong to whom: equal on engines that have run the same requests."""
        return self._runner.layout()

    def memory(self) -> Mapping[str, int]:
        """Planned and allocated bytes, managed pages in all and free; what is allocated is 0 before `start`."""
        return self._runner.memory()


def _images(params: Mapping[str, object]) -> tuple[Any, ...]:
    images = params.get("images", ())
    if not isinstance(images, list | tuple):
        raise InvalidArgumentError(
            f"params.images must be a list, got {type(images).__name__}", field="params.images"
        )
    return tuple(images)


def load_engine(
    model: str,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str | None = None,
    gpu_memory_fraction: float | None = None,
    available_bytes: int | None = None,
    session_capacity: int | None = None,
    scratch_blocks_per_branch: int | None = None,
    attention_backend: str = "sdpa",
    step_execution: bool = False,
    kv: ARDiffusionKVOverrides | Mapping[str, Any] | None = None,
    pipeline_config: Mapping[str, Any] | None = None,
    enforce_eager: bool = False,
    ranks: Ranks | None = None,
) -> ARDiffusionEngine:
    """Builds the pipeline of an installed model and plans its memory; `start()` allocates it.

    Args:
        model: entry point name in the group `worldline.pipelines`.
        device: torch device.
        dtype: element type of weights and KV; None leaves it to the model: its `default_dtype`, else float32.
        gpu_memory_fraction: share of the free memory for further sessions; None leaves it to `kv` or the default.
        available_bytes: memory to plan with; None asks the device.
        session_capacity: resident sessions wanted; None for the pipeline's cap.
        scratch_blocks_per_branch: lower bound of scratch pages; None for the derived number.
        attention_backend: how layers attend to their pages: sdpa, flex or flash_attn.
        step_execution: run ticks through the pipeline's step functions instead of its `forward`.
        kv: KV overrides of the deployment.
        pipeline_config: the model's own settings.
        enforce_eager: no compiled graphs, so no warm-up.
        ranks: those that share every sequence with this process; None where it is alone.

    Raises:
        ConfigurationError: unknown model (the message lists the known ones), device or element type; a setting that
            the model or the device can't follow; a model that can't be built, or has no usable spec.
        CapacityError: not even one session fits.
    """
    from gpu_worker.device import free_memory_bytes, resolve_device, resolve_dtype
    from gpu_worker.runner import ARDiffusionModelRunner, RunnerOptions

    factory = load_pipeline_factory(model)
    if dtype is None:
        dtype = getattr(factory, "default_dtype", DEFAULT_DTYPE)
    torch_device, torch_dtype = resolve_device(device), resolve_dtype(dtype)
    if not isinstance(kv, ARDiffusionKVOverrides):
        kv = ARDiffusionKVOverrides.from_mapping(kv or {})
    if gpu_memory_fraction is not None:
        kv = replace(kv, gpu_memory_fraction=gpu_memory_fraction)
    build = partial(factory, device=torch_device, dtype=torch_dtype, config=dict(pipeline_config or {}))
    with told_as_configuration(model):
        pipeline = build() if ranks is None else _shared(model, build, ranks)
    if ranks is not None:  # the same plan on every rank, whatever else is on its device
        free = free_memory_bytes(torch_device) if available_bytes is None else available_bytes
        available_bytes = ranks.minimum(free)
    options = RunnerOptions(
        kv=kv,
        session_capacity=session_capacity,
        available_bytes=available_bytes,
        scratch_blocks_per_branch=scratch_blocks_per_branch,
        attention_backend=attention_backend,
        step_execution=step_execution,
        enforce_eager=enforce_eager,
    )
    with told_as_configuration(model):
        runner = ARDiffusionModelRunner(pipeline, device=torch_device, dtype=torch_dtype, options=options)
    return ARDiffusionEngine(model, runner)


def _shared(model: str, build: partial[Any], ranks: Ranks) -> Any:
    """The pipeline of one of several ranks, once all have it; ConfigurationError for one that can't share."""
    if getattr(build.func, "shares_sequences", False) is not True:
        raise ConfigurationError(
            f"model {model!r} runs on one device, ulysses_degree is {ranks.degree}", field="ulysses_degree"
        )
    return ranks.together(lambda: build(parallel=ranks.ulysses), f"loading {model}")
