"""Ticks over a vllm-omni `AsyncOmni`: what goes in, which output counts, what it must say.

Nothing here imports vllm-omni: a client is anything that has `generate` and `collective_rpc` as `AsyncOmni` has them.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from contracts.errors import ChunkMetadataError, ConfigurationError, InvalidTypeError, ModelError
from contracts.tick import (
    METADATA_KEY,
    ARDiffusionChunkMetadata,
    ARDiffusionTickRequest,
    metadata_from_envelope,
)

DIFFUSION_PARAMS: Final = "OmniDiffusionSamplingParams"
"""Class name of the sampling parameters of a diffusion stage; its subclasses count too."""

PromptProvider = Callable[[ARDiffusionTickRequest], Any]


class GenerateClient(Protocol):
    """The part of `AsyncOmni` that ticks go through; `stage_pools` is on it, or on its `engine`."""

    def generate(
        self,
        prompt: Any,
        *,
        request_id: str,
        sampling_params_list: Sequence[Any],
        output_modalities: list[str] | None,
    ) -> AsyncIterator[Any]:
        """Yields outputs of all stages."""
        ...


class ARDiffusionOmniTickConsumer:
    """Runs one tick as one request of an Omni engine.

    Args:
        engine_client: the `AsyncOmni`.
        prompt_provider: the engine's prompt for a tick.
        sampling_params_list: one template a stage; never changed.
        diffusion_stage_id: which of them is the AR-Diffusion stage.
        output_modalities: passed on.

    Raises:
        ConfigurationError: no template, or a stage that is none of them.
        InvalidTypeError: the template of that stage is none of a diffusion stage.
    """

    def __init__(
        self,
        engine_client: GenerateClient,
        *,
        prompt_provider: PromptProvider,
        sampling_params_list: Sequence[Any],
        diffusion_stage_id: int,
        output_modalities: Sequence[str] | None = None,
    ) -> None:
        self._client = engine_client
        self._prompt_provider = prompt_provider
        self._templates = _checked_templates(sampling_params_list, diffusion_stage_id)
        self._stage_id = diffusion_stage_id
        self._modalities = None if output_modalities is None else list(output_modalities)

    async def execute_tick(self, tick: ARDiffusionTickRequest, *, seed: int | None = None) -> Any:
        """Generates the tick's chunk; returns the engine's last finished output of the stage.

        Args:
            tick: the snapshot.
            seed: random seed of this request; None leaves it to the template.

        Raises:
            ConfigurationError: the stage has not exactly one replica; nothing was generated.
            ModelError: the engine reported an error, or no output.
            ChunkMetadataError: the output is another request's.
        """
        require_one_replica(self._client, self._stage_id)
        final = None
        async for output in self._client.generate(
            prompt=self._prompt_provider(tick),
            request_id=tick.request_id,
            sampling_params_list=self._sampling_params(tick, seed),
            output_modalities=self._modalities,
        ):
            if output.stage_id == self._stage_id and output.finished:
                final = output
        if final is None:
            raise ModelError(f"stage {self._stage_id} finished without a final output")
        if getattr(final, "error", None):
            raise ModelError(f"the engine reported an error: {final.error}")
        if final.request_id != tick.request_id:
            raise ChunkMetadataError(
                f"the output is of request {final.request_id!r:.120}, submitted was {tick.request_id!r:.120}",
                field="request_id",
            )
        return final

    def chunk_metadata(self, output: Any) -> ARDiffusionChunkMetadata:
        """What an output says it is; ChunkMetadataError where it does not, or not well-formed."""
        envelope = getattr(output, "multimodal_output", None)
        metadata = envelope.get("metadata") if isinstance(envelope, Mapping) else None
        if not isinstance(metadata, Mapping) or METADATA_KEY not in metadata:
            raise ChunkMetadataError(
                f"the output has no multimodal_output.metadata with {METADATA_KEY!r}", field=METADATA_KEY
            )
        return metadata_from_envelope(metadata)

    def _sampling_params(self, tick: ARDiffusionTickRequest, seed: int | None) -> list[Any]:
        copies = [copy.copy(template) for template in self._templates]
        chosen = copies[self._stage_id]
        chosen.extra_args = {**(chosen.extra_args or {}), **tick.to_extra_args()}
        if seed is not None:
            chosen.seed = seed
        return copies


def is_diffusion_params(params: object) -> bool:
    """Whether these are sampling parameters of a diffusion stage. (A text stage's have `extra_args` as well.)"""
    return any(cls.__name__ == DIFFUSION_PARAMS for cls in type(params).__mro__)


def require_one_replica(client: object, stage_id: int) -> None:
    """ConfigurationError unless the stage has exactly one replica: a session's KV is in one place only."""
    pools = getattr(client, "stage_pools", None)
    if pools is None:
        pools = getattr(getattr(client, "engine", None), "stage_pools", None)
    try:
        replicas = pools[stage_id].num_replicas  # type: ignore[index]
    except (TypeError, LookupError, AttributeError):
        replicas = None
    if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1:
        raise ConfigurationError(
            f"the engine must expose stage_pools[{stage_id}].num_replicas as an integer >= 1, got {replicas!r:.80}",
            field="num_replicas",
        )
    if replicas != 1:
        raise ConfigurationError(
            f"stage {stage_id} must have exactly one replica, so that every tick finds its session's KV; "
            f"it has num_replicas={replicas}",
            field="num_replicas",
        )


def _checked_templates(templates: Sequence[Any], stage_id: object) -> tuple[Any, ...]:
    kept = tuple(templates)
    if not kept:
        raise ConfigurationError("sampling_params_list must not be empty", field="sampling_params_list")
    if isinstance(stage_id, bool) or not isinstance(stage_id, int) or not 0 <= stage_id < len(kept):
        raise ConfigurationError(
            f"diffusion_stage_id must be an integer from 0 to {len(kept) - 1}, got {stage_id!r:.80}",
            field="diffusion_stage_id",
        )
    if not is_diffusion_params(kept[stage_id]):
        raise InvalidTypeError(
            f"sampling_params_list[{stage_id}] must be {DIFFUSION_PARAMS}, got {type(kept[stage_id]).__name__}",
            field="sampling_params_list",
        )
    return kept
