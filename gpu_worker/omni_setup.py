"""How ticks are put to a running AsyncOmni engine: what a deployment says, and what is made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from contracts.errors import InvalidArgumentError, InvalidTypeError
from contracts.tick import METADATA_KEY, ARDiffusionTickRequest
from gpu_worker.capability import DiffusionOutput
from gpu_worker.omni import ARDiffusionOmniTickConsumer, OmniOutput, PromptProvider
from gpu_worker.omni_rpc import DEFAULT_TIMEOUT_S, ARDiffusionOmniLifecycle


@dataclass(frozen=True, slots=True)
class OmniSetup:
    """A running engine, and how ticks are put to it. Its functions are called on the engine's event loop.

    Args:
        engine: has `generate`, `collective_rpc` and `stage_pools`, as AsyncOmni does.
        sampling_params_list: one template a stage.
        diffusion_stage_id: the AR-Diffusion stage.
        prompt_provider: builds the prompt of a tick.
        output_modalities: handed on; None for the engine's default.
        stage_ids: stages whose workers hold sessions; None for the AR-Diffusion stage alone.
        for_session: the setup for a session's creation parameters and seed, which a tick carries neither of; asked at
            each tick. None: all sessions alike, and one that has parameters is refused.
        frames_provider: pixel frames of an output, uint8 [frames, height, width, 3], or None.
        diffusion_params_type: class that the stage's template must be of.
        rpc_timeout_s: of a reset or close.
    """

    engine: Any
    sampling_params_list: Sequence[Any]
    diffusion_stage_id: int
    prompt_provider: PromptProvider
    output_modalities: Sequence[str] | None = None
    stage_ids: Sequence[int] | None = None
    for_session: Callable[[Mapping[str, object], int], OmniSetup] | None = None
    frames_provider: Callable[[OmniOutput], Any] | None = None
    diffusion_params_type: type | None = None
    rpc_timeout_s: float = DEFAULT_TIMEOUT_S

    def consumer(self) -> ARDiffusionOmniTickConsumer:
        """What executes ticks."""
        return ARDiffusionOmniTickConsumer(
            self.engine,
            self.sampling_params_list,
            self.diffusion_stage_id,
            self.prompt_provider,
            output_modalities=self.output_modalities,
            diffusion_params_type=self.diffusion_params_type,
        )

    def lifecycle(self) -> ARDiffusionOmniLifecycle:
        """What releases sessions."""
        stage_ids = [self.diffusion_stage_id] if self.stage_ids is None else self.stage_ids
        return ARDiffusionOmniLifecycle(self.engine, stage_ids, timeout_s=self.rpc_timeout_s)


@dataclass(frozen=True, slots=True)
class OmniSession:
    """How the ticks of one session are executed."""

    consumer: ARDiffusionOmniTickConsumer
    frames_provider: Callable[[OmniOutput], Any] | None

    @classmethod
    def of(cls, setup: OmniSetup, params: Mapping[str, object], seed: int) -> OmniSession:
        """From what the session was created with; a typed error for what the setup can't follow."""
        if setup.for_session is not None:
            setup = setup.for_session(params, seed)
        elif params:
            raise InvalidArgumentError(
                "the engine's setup takes no creation parameters: it has no for_session", field="params"
            )
        if not isinstance(setup, OmniSetup):
            raise InvalidTypeError(
                f"for_session returned {type(setup).__name__}, not OmniSetup", field="for_session"
            )
        return cls(setup.consumer(), setup.frames_provider)

    async def execute_tick(self, tick: ARDiffusionTickRequest) -> DiffusionOutput:
        """The tick's chunk, in the form that every engine of this project returns."""
        chunk = await self.consumer.execute_tick(tick)
        payload = chunk.output.multimodal_output.get("payload", {})
        return DiffusionOutput(
            payload=payload if isinstance(payload, Mapping) else {"payload": payload},
            frames=None if self.frames_provider is None else self.frames_provider(chunk.output),
            metadata={METADATA_KEY: chunk.metadata.to_dict()},
        )
