"""Pipelines with one fault each, and the sound one that they are made from."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from contracts.kv_spec import ARDiffusionKVCacheSpec
from gpu_worker.capability import ARDiffusionRequest, DiffusionOutput
from gpu_worker.kv.state import ARDiffusionKVState
from support.sketch_pipeline import ModelState, WorldPipeline


class Sound(WorldPipeline):
    """Two sessions at a time."""

    def ar_diffusion_kv_cache_spec(self) -> ARDiffusionKVCacheSpec:
        return replace(super().ar_diffusion_kv_cache_spec(), session_capacity=2)


class Steps:
    """The state of `Stepping`: a chunk of one step."""

    num_steps = 1

    def __init__(self, request: ARDiffusionRequest) -> None:
        self.request = request
        self.chunk_complete = False
        self.finished = False


class Stepping(Sound):
    """Step functions around the forward."""

    def prepare_encode(self, request: ARDiffusionRequest) -> Steps:
        return Steps(request)

    def prepare_next_chunk(self, state: Steps) -> None:
        state.chunk_complete = False

    def denoise_step(self, state: Steps) -> float:
        return 0.0

    def step_scheduler(self, state: Steps, prediction: float) -> None:
        state.chunk_complete = True

    def post_decode(self, state: Steps) -> DiffusionOutput:
        state.finished = True
        return self.forward(state.request)


class StepsElsewhere(Stepping):
    """Makes another chunk step by step than in one go."""

    def post_decode(self, state: Steps) -> DiffusionOutput:
        output = super().post_decode(state)
        output.payload["latents"].add_(1)
        return output


class CannotBeBuilt(Sound):
    def __init__(self, **_options: Any) -> None:
        raise FileNotFoundError("weights.safetensors")


class SaysTheNextIndex(Sound):
    """Its metadata is one chunk ahead."""

    def forward(self, request: ARDiffusionRequest) -> DiffusionOutput:
        output = super().forward(request)
        identity = dict(output.metadata["ar_diffusion"])
        identity["chunk_index"] += 1
        return replace(output, metadata={"ar_diffusion": identity})


class DividesByZeroLater(Sound):
    """One number of the sixth chunk is not finite."""

    def forward(self, request: ARDiffusionRequest) -> DiffusionOutput:
        output = super().forward(request)
        if request.tick is not None and request.tick.chunk_index == 5:
            output.payload["latents"][0, 0, 0] = float("inf")
        return output


class UsesGlobalRandomness(Sound):
    """Ignores the session's random state."""

    def noise(self, generator: torch.Generator | None) -> torch.Tensor:
        return super().noise(None)


class NamesMatter(Sound):
    """The name of a session finds its way into the world."""

    def forward(self, request: ARDiffusionRequest) -> DiffusionOutput:
        assert request.tick is not None
        state = self.model_states.setdefault(request.tick.session_id, ModelState(None))
        if request.tick.chunk_index == 0:
            state.tone = float(sum(map(ord, request.tick.session_id)))
        return super().forward(request)


class KeepsTheState(Sound):
    """Does not let go of the KV state when the call is over."""

    @contextmanager
    def bind_ar_diffusion_state(self, session_id: str, state: ARDiffusionKVState) -> Iterator[None]:
        self.current_ar_state = state
        yield


class NeverCommits(Sound):
    """Every pass is over scratch, so that a chunk never sees the ones before it."""

    def denoise(self, kv: ARDiffusionKVState, latents: torch.Tensor) -> torch.Tensor:
        handles = kv.get_kv_caches("main", seq_len=latents.shape[1], commit_current=False)
        kv.prepare_paged_context("main", extra_tokens=self.transformer.max_register_tokens)
        return self.transformer(latents, handles, kv.get_cross_attention_kv("main", "text"))


class ProjectsThePromptOnce(Sound):
    """Never looks at the prompt again."""

    def use_prompt(self, kv: ARDiffusionKVState, state: ModelState, prompt: str | None) -> None:
        if not kv.is_cross_attention_populated("main", "text"):
            super().use_prompt(kv, state, prompt)


class StartsOverWithEachPrompt(Sound):
    """Throws the past away when the prompt changes."""

    def use_prompt(self, kv: ARDiffusionKVState, state: ModelState, prompt: str | None) -> None:
        if state.prompt is not None and state.prompt != prompt:
            kv.reset()
        super().use_prompt(kv, state, prompt)


class IgnoresReset(Sound):
    def reset_ar_diffusion_session(self, session_id: str) -> None:
        pass


class IgnoresClose(Sound):
    def close_ar_diffusion_session(self, session_id: str) -> None:
        pass


class LeaksATensor(Sound):
    """Drops the session, but not what a cache of its own holds of it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.cached: list[torch.Tensor] = []

    def close_ar_diffusion_session(self, session_id: str) -> None:
        super().close_ar_diffusion_session(session_id)
        self.cached.append(torch.zeros(64))


class OneToneForAll(Sound):
    """Keeps the state of the session that ran last, whichever that is."""

    def forward(self, request: ARDiffusionRequest) -> DiffusionOutput:
        assert request.tick is not None
        last = next(iter(self.model_states.values()), None)
        known = request.tick.chunk_index > 0 and last is not None
        self.model_states = {request.tick.session_id: last} if known and last is not None else {}
        return super().forward(request)


class SlotsByCount(Sound):
    """Gives a new session the slot of its number, also when that one is taken."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.slots: dict[str, int] = {}
        self.by_slot: dict[int, ModelState] = {}

    def close_ar_diffusion_session(self, session_id: str) -> None:
        super().close_ar_diffusion_session(session_id)
        self.slots.pop(session_id, None)

    reset_ar_diffusion_session = close_ar_diffusion_session

    def forward(self, request: ARDiffusionRequest) -> DiffusionOutput:
        assert request.tick is not None
        session_id = request.tick.session_id
        slot = self.slots.setdefault(session_id, len(self.slots))
        if request.tick.chunk_index > 0:
            self.model_states[session_id] = self.by_slot[slot]
        output = super().forward(request)
        self.by_slot[slot] = self.model_states[session_id]
        return output


class HidesFailures(Sound):
    """Answers with something, whatever went wrong."""

    def forward(self, request: ARDiffusionRequest) -> DiffusionOutput:
        assert request.tick is not None
        try:
            return super().forward(request)
        except Exception:  # noqa: BLE001 - that is the fault
            return DiffusionOutput(payload={"latents": torch.zeros(1)})


class StaysBusy(Sound):
    """Marks itself busy, and forgets that a forward can fail."""

    busy = False

    def denoise(self, kv: ARDiffusionKVState, latents: torch.Tensor) -> torch.Tensor:
        assert not self.busy, "one forward at a time"
        self.busy = True
        latents = super().denoise(kv, latents)
        self.busy = False
        return latents


class KnowsOnlyItsOwn(Sound):
    """Its hook takes no session that it does not know."""

    def close_ar_diffusion_session(self, session_id: str) -> None:
        del self.model_states[session_id]


class KeepsEveryChunk(Sound):
    """Keeps more for a session than its spec declares."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.history: dict[str, list[torch.Tensor]] = {}

    def close_ar_diffusion_session(self, session_id: str) -> None:
        super().close_ar_diffusion_session(session_id)
        self.history.pop(session_id, None)

    reset_ar_diffusion_session = close_ar_diffusion_session

    def forward(self, request: ARDiffusionRequest) -> DiffusionOutput:
        assert request.tick is not None
        output = super().forward(request)
        self.history.setdefault(request.tick.session_id, []).append(output.payload["latents"])
        return output


BROKEN: Mapping[str, tuple[type[Sound], ...]] = {
    "spec": (CannotBeBuilt,),
    "identity": (SaysTheNextIndex,),
    "finite_output": (DividesByZeroLater,),
    "determinism": (UsesGlobalRandomness, NamesMatter),
    "binding": (KeepsTheState,),
    "rolling_window": (NeverCommits,),
    "prompt_switch": (ProjectsThePromptOnce, StartsOverWithEachPrompt),
    "step_execution": (StepsElsewhere,),
    "reset": (IgnoresReset,),
    "release": (IgnoresClose, LeaksATensor),
    "interleaving": (OneToneForAll,),
    "eviction": (SlotsByCount,),
    "failure": (HidesFailures, StaysBusy),
    "hooks": (KnowsOnlyItsOwn,),
    "memory": (KeepsEveryChunk,),
}
"""Check -> the pipelines that fail it, and it alone."""
