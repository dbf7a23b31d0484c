"""Doubles of what a vllm-omni engine publishes: the shapes of its data, and an engine of them around our own runner.

Names and fields are those of `vllm_omni.inputs.data`, `vllm_omni.outputs` and `vllm_omni.entrypoints.async_omni`;
nothing else is. `make` is a factory for `worldline-worker --engine support.omni_doubles:make`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from contracts.tick import ARDiffusionTickRequest
from gpu_worker.capability import ARDiffusionRequest
from gpu_worker.config import WorkerSettings
from gpu_worker.omni_engine import OmniSetup, OmniTickEngine
from gpu_worker.omni_lifecycle import ARDiffusionWorkerExtension
from support.kv_pipeline import make_runner
from support.sketch_pipeline import WorldPipeline


@dataclass
class SamplingParams:
    """Those of a text stage. They have `extra_args` too."""

    temperature: float = 1.0
    extra_args: dict[str, Any] | None = None


@dataclass
class OmniDiffusionSamplingParams:
    """Those of a diffusion stage."""

    height: int | None = None
    num_inference_steps: int = 50
    seed: int | None = None
    extra_args: dict[str, Any] = field(default_factory=dict)


@dataclass
class OmniRequestOutput:
    """One output of one stage."""

    request_id: str = ""
    finished: bool = True
    stage_id: int | None = None
    final_output_type: str = "image"
    images: list[Any] = field(default_factory=list)
    latents: torch.Tensor | None = None
    multimodal_output: Any = field(default_factory=dict)
    error: str | None = None


@dataclass
class StagePool:
    num_replicas: Any = 1


@dataclass
class Engine:
    stage_pools: Any


class AsyncOmni:
    """Answers with what `respond` makes of a request, and records every call.

    Args:
        respond: the outputs of a request, from its tick; an exception of it is raised by `generate`.
        replicas: of each stage.
        templates: the default sampling parameters.
    """

    def __init__(
        self,
        respond: Callable[[ARDiffusionTickRequest, Any], Iterable[OmniRequestOutput]],
        *,
        replicas: tuple[Any, ...] = (1,),
        templates: tuple[Any, ...] | None = None,
    ) -> None:
        self.engine = Engine([StagePool(count) for count in replicas])
        self.default_sampling_params_list = (
            [OmniDiffusionSamplingParams()] if templates is None else list(templates)
        )
        self.respond = respond
        self.generated: list[dict[str, Any]] = []
        self.called: list[dict[str, Any]] = []
        self.rpc: Callable[[str, str], Any] = lambda method, session_id: [[True]]
        self.ended = False

    async def generate(
        self,
        prompt: Any,
        sampling_params: Any = None,
        request_id: str = "",
        *,
        sampling_params_list: list[Any] | None = None,
        output_modalities: list[str] | None = None,
    ) -> AsyncIterator[OmniRequestOutput]:
        assert sampling_params_list is not None
        self.generated.append(
            {
                "prompt": prompt,
                "request_id": request_id,
                "sampling_params_list": sampling_params_list,
                "output_modalities": output_modalities,
            }
        )
        carriers = [
            params for params in sampling_params_list if "ar_diffusion_tick" in (params.extra_args or {})
        ]
        tick = ARDiffusionTickRequest.from_extra_args(carriers[0].extra_args)
        assert tick is not None
        for output in self.respond(tick, carriers[0]):
            await asyncio.sleep(0)
            yield output

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,  # noqa: ASYNC109 - the spelling of the engine
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        stage_ids: list[int] | None = None,
    ) -> list[Any]:
        self.called.append({"method": method, "timeout": timeout, "args": args, "stage_ids": stage_ids})
        await asyncio.sleep(0)
        return self.rpc(method, *args)

    def shutdown(self) -> None:
        self.ended = True


def output_of(tick: ARDiffusionTickRequest, **changes: Any) -> OmniRequestOutput:
    """The final output of stage 0 for a tick; `changes` replace its fields."""
    identity = {
        "session_id": tick.session_id,
        "request_id": tick.request_id,
        "chunk_index": tick.chunk_index,
        "applied_event_ids": list(tick.applied_event_ids),
    }
    envelope = {"latents": torch.zeros(2), "metadata": {"ar_diffusion": identity}}
    values = {"request_id": tick.request_id, "stage_id": 0, "multimodal_output": envelope}
    return OmniRequestOutput(**(values | changes))


class DiffusionWorker(ARDiffusionWorkerExtension):
    """A worker of the engine: our runner with the sketch of a pipeline."""

    def __init__(self) -> None:
        self.model_runner = make_runner(WorldPipeline(device=torch.device("cpu"), dtype=torch.float32))

    def respond(
        self, tick: ARDiffusionTickRequest, params: OmniDiffusionSamplingParams
    ) -> list[OmniRequestOutput]:
        request = ARDiffusionRequest(prompt=tick.prompt, tick=tick)
        made = self.model_runner.execute_model(request, seed=params.seed or 0)
        envelope = {**made.payload, "metadata": made.metadata}
        return [output_of(tick, multimodal_output=envelope)]

    def rpc(self, method: str, session_id: str) -> Any:
        return [{"result": [getattr(self, method)(session_id)]}]


def omni_over_runner() -> tuple[AsyncOmni, DiffusionWorker]:
    """An engine with one worker, which really generates."""
    worker = DiffusionWorker()
    omni = AsyncOmni(worker.respond)
    omni.rpc = worker.rpc
    return omni, worker


def make(settings: WorkerSettings) -> OmniTickEngine:
    """Room for one session, as the sketch has it."""
    omni, _ = omni_over_runner()
    return OmniTickEngine(
        settings.model, lambda: OmniSetup(omni, omni.default_sampling_params_list, 0), capacity=1
    )
