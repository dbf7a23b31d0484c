"""`worldline-worker --engine vllm-omni`: a `TickEngine` over a vllm-omni `AsyncOmni`.

The Omni engine keeps KV and model, and drops sessions by itself when it runs out of room, without a word. So the room
is counted here: with a capacity that the engine can hold, it never has to, and every eviction is told.
"""

from __future__ import annotations

import atexit
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, Protocol

from contracts.errors import ConfigurationError, KVStateError, NotResidentError
from contracts.tick import ARDiffusionTickRequest
from gpu_worker.capability import DiffusionOutput
from gpu_worker.loop_thread import LoopThread
from gpu_worker.omni import ARDiffusionOmniTickConsumer, is_diffusion_params, require_one_replica
from gpu_worker.omni_lifecycle import ARDiffusionWorkerLifecycle
from gpu_worker.omni_output import to_diffusion_output

logger = logging.getLogger(__name__)

DEFAULT_CAPACITY: Final = 1
"""Room for one session is all that every engine is sure to have."""

PromptOf = Callable[[ARDiffusionTickRequest, Mapping[str, Any]], Any]


def text_prompt(tick: ARDiffusionTickRequest, params: Mapping[str, Any]) -> dict[str, Any]:
    """The tick's prompt as an Omni text prompt; `params.images`, where present, is its image input."""
    prompt: dict[str, Any] = {"prompt": tick.prompt or ""}
    if "images" in params:
        prompt["multi_modal_data"] = {"image": list(params["images"])}
    return prompt


@dataclass(frozen=True, slots=True)
class OmniSetup:
    """A running Omni engine, and how ticks go through it.

    Args:
        client: the `AsyncOmni`.
        sampling_params_list: one template a stage.
        diffusion_stage_id: the AR-Diffusion stage.
        output_modalities: what is asked for; None for the engine's default.
        prompt_of: the engine's prompt, from a tick and the session's creation parameters.
        rpc_timeout_s: limit of a reset or close; None for the engine's own.
    """

    client: Any
    sampling_params_list: Sequence[Any]
    diffusion_stage_id: int
    output_modalities: Sequence[str] | None = None
    prompt_of: PromptOf = text_prompt
    rpc_timeout_s: float | None = None


class EngineSettings(Protocol):
    """The part of a worker's settings that the engine reads."""

    @property
    def model(self) -> str:
        """What is loaded, and the name that sessions ask for."""
        ...

    @property
    def session_capacity(self) -> int | None:
        """Resident sessions; None for the one that is sure to fit."""
        ...


class OmniTickEngine:
    """One AsyncOmni; its methods block, its coroutines run in a loop of their own.

    Args:
        model: the name that sessions ask for.
        connect: starts the engine; called once, by `start`, inside that loop.
        capacity: sessions that may be resident; no more than the engine itself can hold.
    """

    def __init__(self, model: str, connect: Callable[[], OmniSetup], *, capacity: int) -> None:
        self.model = model
        self.capacity = capacity
        self.on_evict: Callable[[str], None] | None = None
        self._connect = connect
        self._loop = LoopThread("omni")
        self._setup: OmniSetup | None = None
        self._params: OrderedDict[str, Mapping[str, Any]] = OrderedDict()
        """Creation parameters of resident sessions, least recently used first."""
        self._unreleased: set[str] = set()
        """Sessions that are over here, while a worker may still hold them."""

    # ------------------------------------------------------------------------------------------- life

    def start(self) -> None:
        """Starts the Omni engine and checks that ticks can go through it."""

        async def connect() -> OmniSetup:
            return self._connect()

        self._loop.start()
        atexit.register(self.close)
        setup = self._loop.run(connect())
        self._consumer = ARDiffusionOmniTickConsumer(
            setup.client,
            prompt_provider=lambda tick: setup.prompt_of(tick, self._params[tick.session_id]),
            sampling_params_list=setup.sampling_params_list,
            diffusion_stage_id=setup.diffusion_stage_id,
            output_modalities=setup.output_modalities,
        )
        require_one_replica(setup.client, setup.diffusion_stage_id)
        self._lifecycle = ARDiffusionWorkerLifecycle(
            setup.client, stage_ids=[setup.diffusion_stage_id], timeout=setup.rpc_timeout_s
        )
        self._setup = setup

    def close(self) -> None:
        """Ends the Omni engine; nothing happens the second time."""
        setup, self._setup = self._setup, None
        shutdown = getattr(setup.client, "shutdown", None) if setup else None
        if callable(shutdown):
            shutdown()
        self._loop.stop()
        atexit.unregister(self.close)

    # ------------------------------------------------------------------------------------------- requests

    def execute_tick(
        self, tick: ARDiffusionTickRequest, *, params: Mapping[str, object], seed: int
    ) -> DiffusionOutput:
        """Generates the tick's chunk.

        Raises:
            NotResidentError: the tick continues a session that is not here.
            Whatever the engine raises or reports; the session was released.
        """
        if tick.reset:
            self.reset_session(tick.session_id)
        self._admit(tick, params)
        try:
            output = self._loop.run(
                self._consumer.execute_tick(tick, seed=chunk_seed(seed, tick.chunk_index))
            )
            made = to_diffusion_output(output, self._consumer.chunk_metadata(output))
        except BaseException:
            # The forward may have written half a chunk: nothing of the session can be trusted any more.
            self._release_quietly(tick.session_id, "a failed tick")
            raise
        if tick.close_session:
            self.close_session(tick.session_id)
        return made

    def _admit(self, tick: ARDiffusionTickRequest, params: Mapping[str, Any]) -> None:
        session_id = tick.session_id
        if session_id in self._params:
            self._params.move_to_end(session_id)
            return
        if tick.chunk_index > 0:
            raise NotResidentError(
                f"session {session_id!r} is not resident, so chunk {tick.chunk_index} can't continue it",
                field="session_id",
            )
        for lost in tuple(self._unreleased):  # while they are there, the room is not
            self._release(lost)
        while len(self._params) >= self.capacity:
            evicted = next(iter(self._params))
            self._release_quietly(evicted, "eviction")
            if self.on_evict is not None:
                self.on_evict(evicted)
        self._params[session_id] = params

    # ------------------------------------------------------------------------------------------- sessions

    def reset_session(self, session_id: str) -> None:
        """Has the workers release a session that starts again; raises if one did not."""
        self._loop.run(self._lifecycle.reset_session(session_id))
        self._forget(session_id)

    def close_session(self, session_id: str) -> None:
        """Has the workers release a session; raises if one did not, and can then be repeated."""
        if session_id in self._params or session_id in self._unreleased:
            self._release(session_id)

    def _release(self, session_id: str) -> None:
        self._loop.run(self._lifecycle.close_session(session_id))
        self._forget(session_id)

    def _release_quietly(self, session_id: str, why: str) -> None:
        try:
            self._release(session_id)
        except Exception:
            logger.exception("releasing session %r after %s failed", session_id, why)
            self._params.pop(session_id, None)
            self._unreleased.add(session_id)

    def _forget(self, session_id: str) -> None:
        self._params.pop(session_id, None)
        self._unreleased.discard(session_id)

    def is_resident(self, session_id: str) -> bool:
        """Whether the session's memory is there, as far as is known here."""
        return session_id in self._params

    def resident_sessions(self) -> tuple[str, ...]:
        """Resident sessions, least recently used first."""
        return tuple(self._params)

    # ------------------------------------------------------------------------------------------- accounting

    def check_integrity(self) -> None:
        """KVStateError when the loop that drives the engine is gone."""
        if not self._loop.running:
            raise KVStateError("the loop of the Omni engine has ended")

    def memory(self) -> Mapping[str, int]:
        """Sessions only: the bytes are the engine's own business."""
        return {"capacity": self.capacity, "resident": len(self._params)}


def chunk_seed(seed: int, chunk_index: int) -> int:
    """A seed for one request, in [0, 2^31): the engine seeds each request anew, and equal noise must not repeat."""
    digest = blake2b(f"{seed}:{chunk_index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def make_engine(settings: EngineSettings) -> OmniTickEngine:
    """The engine for `--engine vllm-omni`: `--model` is loaded with the engine's own defaults.

    Raises ConfigurationError when vllm-omni is not installed. For another configuration of the engine, write a function
    like this one, and name it by `--engine module:function`.
    """
    if find_spec("vllm_omni") is None:
        raise ConfigurationError(
            "vllm-omni is not installed: pip install 'worldline[vllm-omni]'", field="engine"
        )
    capacity = DEFAULT_CAPACITY if settings.session_capacity is None else settings.session_capacity
    return OmniTickEngine(settings.model, lambda: connect(settings.model), capacity=capacity)


def connect(model: str) -> OmniSetup:
    """Starts an `AsyncOmni` and finds its one diffusion stage; ConfigurationError where it has none, or several."""
    client = import_module("vllm_omni.entrypoints.async_omni").AsyncOmni(model=model)
    templates = list(client.default_sampling_params_list)
    stages = [index for index, params in enumerate(templates) if is_diffusion_params(params)]
    if len(stages) != 1:
        raise ConfigurationError(
            f"model {model!r:.120} must have exactly one diffusion stage, it has {len(stages)}", field="model"
        )
    return OmniSetup(client, templates, stages[0])
