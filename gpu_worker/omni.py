"""Ticks through an AsyncOmni engine: one tick in, one chunk with its metadata out. Needs neither that package nor torch.

copy the templates, put the tick into the diffusion stage's -> generate -> the stage's last finished output
-> its error, its request id, its metadata, in this order
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from contracts.errors import ChunkMetadataError, InvalidArgumentError, InvalidTypeError, ModelError
from contracts.tick import ARDiffusionChunkMetadata, ARDiffusionTickRequest, metadata_from_envelope

PromptProvider = Callable[[ARDiffusionTickRequest], Any]
"""Builds the engine's prompt for a tick."""


class OmniOutput(Protocol):
    """What is read of an output of the engine."""

    request_id: str
    stage_id: int
    finished: bool
    error: str | None
    multimodal_output: Any
    """`{"payload": ..., "metadata": {"ar_diffusion": {...}}}`."""


class GeneratingEngine(Protocol):
    """What a consumer asks of the engine."""

    stage_pools: Any
    """Stage id -> something with `num_replicas`."""

    def generate(
        self,
        *,
        prompt: Any,
        request_id: str,
        sampling_params_list: list[Any],
        output_modalities: list[str] | None,
    ) -> AsyncIterator[Any]:
        """The outputs of one request, of all stages."""
        ...


@dataclass(frozen=True, slots=True)
class OmniChunk:
    """One chunk of the engine.

    Args:
        metadata: what the model says it made; well-formed, not yet compared with the tick.
        output: the engine's output, as it came.
    """

    metadata: ARDiffusionChunkMetadata
    output: OmniOutput


class ARDiffusionOmniTickConsumer:
    """Executes ticks on the diffusion stage of an AsyncOmni engine.

    Args:
        engine: the engine.
        sampling_params_list: one template a stage; never changed.
        diffusion_stage_id: position of the AR-Diffusion stage in that list.
        prompt_provider: builds the prompt of a tick.
        output_modalities: handed on; None for the engine's default.
        diffusion_params_type: class of the engine's diffusion parameters, where the stage's template is to be one.

    Raises:
        InvalidArgumentError: no template, a stage outside the list, or not exactly one replica of it; names the field.
        InvalidTypeError: the stage's template is none of diffusion parameters, or the engine can't generate.
    """

    def __init__(
        self,
        engine: GeneratingEngine,
        sampling_params_list: Sequence[Any],
        diffusion_stage_id: int,
        prompt_provider: PromptProvider,
        *,
        output_modalities: Sequence[str] | None = None,
        diffusion_params_type: type | None = None,
    ) -> None:
        if not callable(getattr(engine, "generate", None)):
            raise InvalidTypeError(f"{type(engine).__name__} has no generate()", field="engine")
        self._engine = engine
        self._templates = _check_templates(sampling_params_list)
        self._stage_id = _check_stage_id(diffusion_stage_id, len(self._templates))
        _check_diffusion_params(self._templates[self._stage_id], diffusion_params_type)
        self._prompt_provider = prompt_provider
        self._output_modalities = _check_modalities(output_modalities)
        check_replicas(engine, self._stage_id)

    async def execute_tick(self, tick: ARDiffusionTickRequest) -> OmniChunk:
        """Generates the tick's chunk.

        Raises:
            InvalidArgumentError: the stage has no longer exactly one replica; nothing was generated.
            ModelError: the stage reported an error, or finished without an output.
            ChunkMetadataError: the output is for another request, or its metadata is malformed.
            Whatever `generate` and the prompt provider raise, unchanged.
        """
        check_replicas(self._engine, self._stage_id)
        outputs = self._engine.generate(
            prompt=self._prompt_provider(tick),
            request_id=tick.request_id,
            sampling_params_list=self._params_for(tick),
            output_modalities=None if self._output_modalities is None else list(self._output_modalities),
        )
        final: OmniOutput | None = None
        async for output in outputs:
            if output.stage_id == self._stage_id and output.finished:
                final = output
        if final is None:
            raise ModelError(f"stage {self._stage_id} ended without a final output", field="stage_id")
        return _checked_chunk(final, tick)

    def _params_for(self, tick: ARDiffusionTickRequest) -> list[Any]:
        """Shallow copies of the templates. `extra_args` is a new mapping: the copy shares the template's otherwise."""
        params = [copy.copy(template) for template in self._templates]
        own = params[self._stage_id]
        own.extra_args = {**(own.extra_args or {}), **tick.to_extra_args()}
        return params


def check_replicas(engine: GeneratingEngine, stage_id: int) -> None:
    """InvalidArgumentError unless the stage has one replica: requests are not routed by session, so state is on one."""
    where = f"stage_pools[{stage_id}].num_replicas"
    try:
        replicas = engine.stage_pools[stage_id].num_replicas
    except (AttributeError, LookupError, TypeError) as error:
        raise InvalidArgumentError(
            f"the engine must expose {where}: {error}", field="num_replicas"
        ) from error
    if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 1:
        raise InvalidArgumentError(
            f"{where} must be an integer of at least 1, got {replicas!r:.40}", field="num_replicas"
        )
    if replicas != 1:
        raise InvalidArgumentError(
            f"an AR-Diffusion stage must have exactly one replica; stage {stage_id} has num_replicas={replicas}",
            field="num_replicas",
        )


def _checked_chunk(output: OmniOutput, tick: ARDiffusionTickRequest) -> OmniChunk:
    """An error first: an output that failed need not carry anything else."""
    if output.error is not None:
        raise ModelError(str(output.error))
    if output.request_id != tick.request_id:
        raise ChunkMetadataError(
            f"the output is for request {output.request_id!r:.200}, submitted was {tick.request_id!r:.200}",
            field="request_id",
        )
    envelope = getattr(output, "multimodal_output", None)
    if not isinstance(envelope, Mapping) or "metadata" not in envelope:
        raise ChunkMetadataError(
            "the output has no multimodal_output.metadata", field="multimodal_output.metadata"
        )
    return OmniChunk(metadata_from_envelope(envelope["metadata"]), output)


def _check_templates(templates: object) -> tuple[Any, ...]:
    if isinstance(templates, str | bytes) or not isinstance(templates, Sequence) or not templates:
        raise InvalidArgumentError(
            "sampling_params_list must be a list that is not empty", field="sampling_params_list"
        )
    return tuple(templates)


def _check_stage_id(stage_id: object, stages: int) -> int:
    if not isinstance(stage_id, int) or isinstance(stage_id, bool) or not 0 <= stage_id < stages:
        raise InvalidArgumentError(
            f"diffusion_stage_id must be an integer from 0 to {stages - 1}, got {stage_id!r:.40}",
            field="diffusion_stage_id",
        )
    return stage_id


def _check_diffusion_params(params: object, wanted: type | None) -> None:
    """By class where that is known; else by what a tick needs of them, which is a place for extra arguments."""
    if wanted is not None and not isinstance(params, wanted):
        raise InvalidTypeError(
            f"the diffusion stage's sampling params must be {wanted.__name__}, got {type(params).__name__}",
            field="sampling_params_list",
        )
    if not hasattr(params, "extra_args") or not isinstance(params.extra_args, Mapping | None):
        raise InvalidTypeError(
            f"the diffusion stage's sampling params must have extra_args, a mapping or None; "
            f"{type(params).__name__} has not",
            field="sampling_params_list",
        )


def _check_modalities(modalities: object) -> tuple[str, ...] | None:
    if modalities is None:
        return None
    if isinstance(modalities, str) or not isinstance(modalities, Sequence):
        raise InvalidArgumentError("output_modalities must be a list or None", field="output_modalities")
    if not all(isinstance(name, str) for name in modalities):
        raise InvalidArgumentError("output_modalities must be a list of names", field="output_modalities")
    return tuple(modalities)
