"""Doubles in the published shapes of an AsyncOmni engine: sampling params, outputs, stage pools, workers, the engine.

They know of the engine what the published contract says, no more: `generate`, `collective_rpc`, `stage_pools`.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from contracts.tick import EXTRA_ARGS_KEY, ARDiffusionChunkMetadata, ARDiffusionTickRequest
from gpu_worker.omni_engine import OmniTickEngine
from gpu_worker.omni_rpc import ARDiffusionSessionMethods
from gpu_worker.omni_setup import OmniSetup

STAGE = 1
"""The AR-Diffusion stage of the double; stage 0 only encodes."""


@dataclass
class DiffusionParamsDouble:
    """Sampling params of a diffusion stage."""

    extra_args: Any = None
    num_inference_steps: int = 4


@dataclass
class TextParamsDouble:
    """Sampling params of a stage that takes no extra arguments."""

    temperature: float = 1.0


@dataclass
class OutputDouble:
    """One output of one stage."""

    request_id: str
    stage_id: int = STAGE
    finished: bool = True
    error: str | None = None
    multimodal_output: Any = None


@dataclass
class StagePoolDouble:
    """A stage's replicas."""

    num_replicas: Any = 1


@dataclass
class RunnerDouble:
    """What a worker of the engine delegates to; `fails` names methods and how often they raise."""

    calls: list[tuple[str, str]] = field(default_factory=list)
    fails: dict[str, int] = field(default_factory=dict)

    def reset_session(self, session_id: str) -> None:
        self._record("reset", session_id)

    def close_session(self, session_id: str) -> None:
        self._record("close", session_id)

    def _record(self, what: str, session_id: str) -> None:
        self.calls.append((what, session_id))
        if self.fails.get(what, 0) > 0:
            self.fails[what] -= 1
            raise RuntimeError(f"scripted failure of a {what}")


def envelope(tick: ARDiffusionTickRequest, **changed: Any) -> dict[str, Any]:
    """What a pipeline returns for a tick: payload and metadata, with some fields of the latter changed."""
    metadata = ARDiffusionChunkMetadata.from_tick(tick).to_dict() | changed
    latents = np.full((1, 4, 2, 4), tick.chunk_index, np.float32)
    return {"payload": {"latents": latents}, "metadata": {"ar_diffusion": metadata}}


def output_for(tick: ARDiffusionTickRequest, **fields: Any) -> OutputDouble:
    """The final output of a tick, with some fields changed."""
    return OutputDouble(**{"request_id": tick.request_id, "multimodal_output": envelope(tick)} | fields)


class AsyncOmniDouble:
    """The engine: records its calls; what `generate` yields, or raises, and what an RPC returns is scripted."""

    def __init__(self, model: str = "omni-world") -> None:
        self.model = model
        self.stage_pools: Any = [StagePoolDouble(), StagePoolDouble()]
        self.generated: list[dict[str, Any]] = []
        self.rpcs: list[dict[str, Any]] = []
        self.runner = RunnerDouble()
        self.answers: Callable[[ARDiffusionTickRequest], Any] = lambda tick: [output_for(tick)]
        self.rpc_result: Any = None
        """Returned instead of the workers' results; a function gets them."""
        self.loops: set[asyncio.AbstractEventLoop] = set()

    async def generate(self, **call: Any) -> Any:
        self.loops.add(asyncio.get_running_loop())
        self.generated.append(call)
        tick = ARDiffusionTickRequest.from_extra_args(call["sampling_params_list"][STAGE].extra_args)
        assert tick is not None, "the tick is in the stage's extra_args"
        await asyncio.sleep(0)
        for output in self.answers(tick):
            yield output

    async def collective_rpc(self, **call: Any) -> Any:
        self.loops.add(asyncio.get_running_loop())
        self.rpcs.append(call)
        if self.rpc_result is not None and not callable(self.rpc_result):
            return self.rpc_result
        method = getattr(ARDiffusionSessionMethods(self.runner), call["method"])
        await asyncio.sleep(0)
        results = [[method(*call["args"])] for _ in call["stage_ids"]]
        return self.rpc_result(results) if self.rpc_result else results

    def sent(self, index: int = -1) -> dict[str, Any]:
        """The tick of a `generate` call, as it was put into the extra arguments."""
        return self.generated[index]["sampling_params_list"][STAGE].extra_args[EXTRA_ARGS_KEY]


def setup_for(omni: Any, **changed: Any) -> OmniSetup:
    """The setup of the double, with some fields changed."""
    fields: dict[str, Any] = {
        "engine": omni,
        "sampling_params_list": [TextParamsDouble(), DiffusionParamsDouble({"deployment_option": "kept"})],
        "diffusion_stage_id": STAGE,
        "prompt_provider": lambda tick: {"prompt": tick.prompt},
    }
    return OmniSetup(**fields | changed)


def setup(engine: Any, settings: Any) -> OmniSetup:
    """The function that a worker's setting names."""
    assert settings.model == engine.model
    return setup_for(engine)


def started(omni: AsyncOmniDouble, *, capacity: int = 2, **changed: Any) -> OmniTickEngine:
    """A `TickEngine` over the double; whoever starts it stops it."""
    engine = OmniTickEngine(omni.model, lambda: setup_for(omni, **changed), capacity=capacity)
    engine.start()
    return engine
