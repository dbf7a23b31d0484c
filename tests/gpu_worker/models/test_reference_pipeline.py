"""The reference world, driven as the worker drives it."""

from typing import Any

import numpy as np
import pytest
import torch

from contracts.errors import InvalidArgumentError, KVStateError
from contracts.events import ARDiffusionControlInput
from contracts.tick import ARDiffusionTickRequest, metadata_from_envelope
from gpu_worker.capability import ARDiffusionRequest, DiffusionOutput
from gpu_worker.kv.state import ARDiffusionKVState
from gpu_worker.models.reference.pipeline import ReferencePipeline
from gpu_worker.models.reference.sampler import SIGMAS
from gpu_worker.models.reference.spec import owned_state_bytes
from gpu_worker.models.reference.transformer import ReferenceTransformer
from gpu_worker.runner import ARDiffusionModelRunner, RunnerOptions
from gpu_worker.stepwise import StepRequest, StepSchedule
from support.kv_cache import CPU

ROOMY = RunnerOptions(available_bytes=1 << 28)


def keys(*frames: str) -> tuple[ARDiffusionControlInput, ...]:
    """A camera control: the keys held in each latent frame, as one string a frame."""
    data = {"mode": "frames", "frames": [list(frame) for frame in frames]}
    return (ARDiffusionControlInput("camera", "lingbot.camera_actions.v1", data),)


class Worlds:
    """Ticks for a runner, counted for each session."""

    def __init__(
        self, *, dtype: torch.dtype = torch.float32, options: RunnerOptions = ROOMY, **config: int
    ) -> None:
        self.pipeline = ReferencePipeline(device=CPU, dtype=dtype, config=config)
        self.runner = ARDiffusionModelRunner(self.pipeline, device=CPU, dtype=dtype, options=options)
        self.runner.load()
        self._next: dict[str, int] = {}

    def tick(
        self,
        session: str = "w",
        prompt: str | None = None,
        controls: tuple[ARDiffusionControlInput, ...] = (),
        *,
        seed: int = 1,
        **fields: Any,
    ) -> DiffusionOutput:
        index = fields.pop("chunk_index", self._next.get(session, 0))
        tick = ARDiffusionTickRequest(session, f"{session}-{index}", index, (), prompt, controls, **fields)
        output = self.runner.execute_model(ARDiffusionRequest(prompt=prompt, tick=tick), seed=seed)
        self._next[session] = index + 1
        return output

    def latents(self, *arguments: Any, **fields: Any) -> torch.Tensor:
        latents: torch.Tensor = self.tick(*arguments, **fields).payload["latents"]
        return latents


@pytest.fixture
def worlds() -> Worlds:
    return Worlds()


# ---------------------------------------------------------------------------------------------------- output


def test_a_chunk_has_latents_pictures_and_its_identity(worlds: Worlds) -> None:
    output = worlds.tick("w-1", "a castle", keys("w", "wl", ""))
    latents, frames = output.payload["latents"], output.frames
    assert (tuple(latents.shape), latents.dtype) == ((1, 16, 3, 4, 4), torch.float32)
    assert frames is not None
    assert (tuple(frames.shape), frames.dtype) == ((12, 96, 96, 3), torch.uint8)
    assert bool(latents.isfinite().all())
    assert metadata_from_envelope(output.metadata).to_dict() == {
        "session_id": "w-1",
        "request_id": "w-1-0",
        "chunk_index": 0,
        "applied_event_ids": [],
    }


def test_pictures_are_smooth_and_colourful_and_move(worlds: Worlds) -> None:
    chunks = [worlds.tick(prompt="a lake", controls=keys("d", "d", "d")).frames for _ in range(3)]
    video = np.concatenate([np.asarray(frames) for frames in chunks if frames is not None]).astype(np.int16)
    assert np.abs(np.diff(video, axis=2)).max() < 30, "neighbouring pixels are alike"
    assert video.std(axis=(1, 2)).mean() > 10, "a picture is no flat colour"
    steps = np.abs(np.diff(video, axis=0)).mean(axis=(1, 2, 3))
    assert steps[4:].min() > 0.2, "the world moves in every pixel frame"
    assert steps.max() < 40, "and never jumps, from chunk to chunk neither"


def test_moving_right_moves_the_picture_left(worlds: Worlds) -> None:
    frames = worlds.tick(controls=keys("d", "d", "d")).frames
    assert frames is not None
    video = np.asarray(frames).astype(np.float64)
    early, late = video[4], video[11]

    def difference(shift: int) -> float:
        return float(np.abs(early[:, 24 + shift : 72 + shift] - late[:, 24:72]).mean())

    assert min(range(-20, 21), key=difference) > 5


# ---------------------------------------------------------------------------------------------------- function of


def test_a_session_is_a_function_of_seed_params_and_ticks() -> None:
    def rollout() -> list[torch.Tensor]:
        worlds = Worlds()
        torch.manual_seed(len(worlds.runner.session_ids))
        return [
            worlds.latents("w", "sea"),
            worlds.latents("w", "sea", keys("w", "", "l")),
            worlds.latents("w", "storm"),
        ]

    for ours, again in zip(rollout(), rollout(), strict=True):
        assert torch.equal(ours, again)


@pytest.mark.parametrize(
    "change",
    [{"seed": 2}, {"prompt": "a desert"}, {"controls": keys("w", "", "")}, {"controls": keys("", "", "j")}],
)
def test_seed_prompt_and_keys_matter(worlds: Worlds, change: dict[str, Any]) -> None:
    plain = worlds.tick("plain", prompt="a lake")
    changed = worlds.tick("changed", **{"prompt": "a lake", **change})
    difference = (plain.payload["latents"] - changed.payload["latents"]).abs().mean()
    assert difference > 0.01
    assert plain.frames is not None
    assert changed.frames is not None
    assert (plain.frames.float() - changed.frames.float()).abs().mean() > 1


def test_no_keys_and_no_control_are_the_same(worlds: Worlds) -> None:
    assert torch.equal(worlds.latents("a"), worlds.latents("b", controls=keys("", "", "")))
    other = (ARDiffusionControlInput("music", "any.v1", {}),)
    assert torch.equal(worlds.latents("c", controls=other), worlds.latents("d"))


def test_no_prompt_is_a_text_of_its_own(worlds: Worlds) -> None:
    nothing, something = worlds.latents("a"), worlds.latents("b", "a lake")
    assert not torch.equal(nothing, something)


def test_another_seed_of_the_weights_is_another_kind_of_world() -> None:
    assert not torch.allclose(Worlds().latents(), Worlds(weights_seed=8).latents())


def test_building_the_model_leaves_the_process_wide_random_state_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    Worlds()
    assert torch.equal(torch.rand(1), expected)


def test_interleaved_sessions_equal_each_alone() -> None:
    plans: dict[str, list[dict[str, Any]]] = {
        "a": [{"prompt": "sea"}] * 4,
        "b": [{"prompt": "sea", "controls": keys("w", "w", "w")}, {"prompt": "fire"}, {}, {}],
        "c": [{"controls": keys("j", "", "d")}] * 4,
    }
    alone = {}
    for seed, (session, ticks) in enumerate(plans.items()):
        worlds = Worlds()
        alone[session] = [worlds.latents(session, seed=seed, **tick) for tick in ticks]
    together = Worlds()
    for step in range(4):
        for seed, (session, ticks) in enumerate(plans.items()):
            assert torch.equal(together.latents(session, seed=seed, **ticks[step]), alone[session][step])
    together.runner.check_integrity()


def test_half_precision_weights_run() -> None:
    latents = Worlds(dtype=torch.bfloat16).latents("w", "a lake")
    assert latents.dtype == torch.float32
    assert bool(latents.isfinite().all())


# ---------------------------------------------------------------------------------------------------- steps


class FlowOfOne:
    """In place of the transformer: a flow of 1 leads from the noisy latents to clean ones."""

    dtype = torch.float32

    def __init__(self, transformer: ReferenceTransformer) -> None:
        self.text_kv = transformer.text_kv
        self.passes: list[tuple[float, bool, int]] = []
        self.committed: list[torch.Tensor] = []

    def __call__(
        self, latents: torch.Tensor, timestep: float, *_: Any, start_frame: int, kv: Any, text: Any
    ) -> torch.Tensor:
        commit = kv[0].context.commit
        self.passes.append((round(timestep, 2), commit, start_frame))
        if commit:
            self.committed.append(latents)
        return latents - timestep / 1000


def recurrence(generator: torch.Generator) -> torch.Tensor:
    """The sampler by hand: one draw to start with, three to go back to a lower noise level."""
    latents = torch.randn(1, 16, 3, 4, 4, generator=generator)
    for step, sigma in enumerate(SIGMAS):
        latents = latents - sigma
        if step < 3:
            noise = torch.randn(1, 16, 3, 4, 4, generator=generator)
            latents = (1 - SIGMAS[step + 1]) * latents + SIGMAS[step + 1] * noise
    return latents


def test_a_chunk_is_four_probes_and_a_commit_and_follows_the_recurrence(worlds: Worlds) -> None:
    flow = FlowOfOne(worlds.pipeline._transformer)
    worlds.pipeline._transformer = flow  # type: ignore[assignment]
    generator = torch.Generator().manual_seed(17)
    for chunk in range(2):
        latents = worlds.latents(seed=17)
        torch.testing.assert_close(latents, recurrence(generator), atol=1e-6, rtol=1e-6)
        assert torch.equal(flow.committed[chunk], latents)
    probes = [1000.0, 937.5, 833.33, 625.0]
    assert flow.passes == [
        (timestep, commit, start)
        for start in (0, 3)
        for timestep, commit in [*((timestep, False) for timestep in probes), (0.0, True)]
    ]


def test_ticks_through_the_step_functions_equal_the_forward() -> None:
    plain = Worlds()
    stepped = Worlds(options=RunnerOptions(available_bytes=1 << 28, step_execution=True))
    stepped.pipeline.forward = lambda _request: 1 / 0  # type: ignore[assignment, method-assign, return-value]
    for prompt, controls in (("sea", ()), ("sea", keys("w", "l", "")), ("fire", keys("d", "d", "d"))):
        ours, theirs = (w.tick("w", prompt, controls) for w in (stepped, plain))
        assert torch.equal(ours.payload["latents"], theirs.payload["latents"])
        assert torch.equal(torch.as_tensor(ours.frames), torch.as_tensor(theirs.frames))
        assert ours.metadata == theirs.metadata


@pytest.mark.parametrize("grouped", [False, True])
def test_a_stepwise_request_makes_the_chunks_that_ticks_would(grouped: bool) -> None:
    ticks = Worlds()
    expected = [ticks.latents("request", "sea", seed=3) for _ in range(3)]
    runner = Worlds(options=RunnerOptions(available_bytes=1 << 28, group_steps=grouped)).runner
    request: ARDiffusionRequest | None = ARDiffusionRequest(prompt="sea", params={"chunks": 3})
    chunks, calls, finished = [], 0, False
    while not finished:
        result = runner.execute_stepwise(StepSchedule((StepRequest("request", request, seed=3),)))
        assert result is not None
        request, calls, finished = None, calls + 1, result.finished
        if result.output is not None:
            chunks.append(result.output)
    assert calls == (3 if grouped else 12)
    for index, (chunk, latents) in enumerate(zip(chunks, expected, strict=True)):
        assert torch.equal(chunk.payload["latents"], latents)
        assert metadata_from_envelope(chunk.metadata).chunk_index == index
    assert runner.session_ids == ()
    assert len(runner.timings_ms) == 3


@pytest.mark.parametrize("chunks", [0, True, 1.5, 10_001])
def test_a_bad_number_of_chunks_is_named(worlds: Worlds, chunks: Any) -> None:
    request = ARDiffusionRequest(params={"chunks": chunks})
    with pytest.raises(InvalidArgumentError, match=r"params\.chunks"):
        worlds.runner.execute_stepwise(StepSchedule((StepRequest("request", request),)))


# ---------------------------------------------------------------------------------------------------- rollout


def test_a_rollout_past_the_window_keeps_sink_and_recent_frames(worlds: Worlds) -> None:
    first = worlds.latents(prompt="sea")
    runner = worlds.runner
    adapter = runner.cache.request_ids
    assert adapter == ("ar::w::main",)
    sink_pages: list[torch.Tensor] = []
    for chunk in range(1, 14):
        latents = worlds.latents(prompt="sea", controls=keys("", "", ""))
        assert bool(latents.isfinite().all())
        assert not torch.equal(latents, first)
        in_use = runner.cache.pool.num_usable - runner.cache.pool.num_free
        assert in_use == min(3 * (chunk + 1), 9)
        sink_pages.append(runner.cache.k_pages[0][1:4].clone())
        runner.check_integrity()
    assert all(torch.equal(pages, sink_pages[0]) for pages in sink_pages)


def test_staged_history_changes_nothing() -> None:
    plain = Worlds()
    staged = Worlds(options=RunnerOptions(available_bytes=1 << 28, kv={"reuse_history_staging": True}))
    for _ in range(5):
        torch.testing.assert_close(
            plain.latents("w", "sea"), staged.latents("w", "sea"), atol=1e-5, rtol=1e-5
        )


def test_the_deployment_may_shorten_the_window() -> None:
    short = Worlds(options=RunnerOptions(available_bytes=1 << 28, kv={"window_chunks": 3, "sink_chunks": 0}))
    for _ in range(4):
        short.tick()
    assert short.runner.cache.pool.num_usable - short.runner.cache.pool.num_free == 3


# ---------------------------------------------------------------------------------------------------- prompt


def test_a_prompt_switch_rebuilds_cross_attention_and_keeps_the_past(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    published: list[str] = []
    original = ARDiffusionKVState.populate_cross_attention

    def counting(state: ARDiffusionKVState, branch: str, name: str, layer_kv: Any) -> None:
        published.append(state.session_id)
        original(state, branch, name, layer_kv)

    monkeypatch.setattr(ARDiffusionKVState, "populate_cross_attention", counting)
    for session in ("kept", "switched"):
        for _ in range(2):
            worlds.tick(session, "sea")
    assert published == ["kept", "switched"]

    cache = worlds.runner.cache
    before = [pages.clone() for pages in cache.k_pages]
    used = cache.pool.num_usable - cache.pool.num_free
    kept, switched = worlds.latents("kept", "sea"), worlds.latents("switched", "fire")
    assert published == ["kept", "switched", "switched"]
    assert not torch.allclose(kept, switched)
    assert cache.pool.num_usable - cache.pool.num_free == used + 6
    for layer, pages in enumerate(cache.k_pages):
        assert torch.equal(pages[1:13], before[layer][1:13]), "what was committed stays, bit for bit"
    worlds.tick("switched", "fire")
    assert published == ["kept", "switched", "switched"]


def test_the_past_before_a_prompt_switch_still_matters(worlds: Worlds) -> None:
    worlds.tick("long", "sea")
    worlds.tick("other", "desert")
    switched = [worlds.latents(session, "fire") for session in ("long", "other")]
    assert not torch.allclose(*switched)


# ---------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({"mode": "frames", "frames": [["w"], ["w"]]}, "frames"),
        ({"mode": "frames", "frames": [["w"], ["x"], []]}, "frames[1]"),
        ({"mode": "frames", "frames": [["w"], "w", []]}, "frames[1]"),
        ({"mode": "frames"}, "frames"),
        ({"mode": "state", "transitions": []}, "mode"),
        ({"mode": "frames", "frames": [[], [], []], "speed": 2}, "speed"),
    ],
)
def test_a_malformed_control_names_the_field_and_harms_no_other_session(
    worlds: Worlds, data: dict[str, Any], field: str
) -> None:
    worlds.tick("other")
    control = ARDiffusionControlInput("camera", "lingbot.camera_actions.v1", data)
    with pytest.raises(InvalidArgumentError) as caught:
        worlds.tick("w", controls=(control,))
    assert caught.value.field == field
    assert worlds.runner.session_ids == ("other",)
    worlds.tick("other")
    worlds.runner.check_integrity()


def test_a_foreign_schema_is_named(worlds: Worlds) -> None:
    control = ARDiffusionControlInput("camera", "lingbot.camera_trajectory.v1", {"poses": []})
    with pytest.raises(InvalidArgumentError, match=r"lingbot\.camera_trajectory\.v1") as caught:
        worlds.tick(controls=(control,))
    assert caught.value.field == "schema"


@pytest.mark.parametrize("wrong", [0, 2])
def test_chunks_must_be_contiguous(worlds: Worlds, wrong: int) -> None:
    worlds.tick()
    with pytest.raises(InvalidArgumentError, match="must be contiguous: expected 1") as caught:
        worlds.tick(chunk_index=wrong)
    assert caught.value.field == "chunk_index"


def test_a_forward_outside_a_binding_is_refused(worlds: Worlds) -> None:
    with pytest.raises(RuntimeError, match="no session is bound"):
        worlds.pipeline.forward(ARDiffusionRequest(tick=ARDiffusionTickRequest("w", "r", 0)))


def test_a_binding_holds_one_session_and_its_own(worlds: Worlds) -> None:
    state = ARDiffusionKVState("w", worlds.runner.cache)
    bind = worlds.pipeline.bind_ar_diffusion_state
    with pytest.raises(InvalidArgumentError, match="bound as"):
        bind("other", state).__enter__()
    with bind("w", state):
        with pytest.raises(KVStateError, match="still bound"):
            bind("w", state).__enter__()
        with pytest.raises(InvalidArgumentError, match="ticks only"):
            worlds.pipeline.forward(ARDiffusionRequest())
        tick = ARDiffusionTickRequest("w", "r", 0)
        with pytest.raises(InvalidArgumentError, match="generator"):
            worlds.pipeline.forward(ARDiffusionRequest(tick=tick))
        other = ARDiffusionTickRequest("other", "r", 0)
        with pytest.raises(InvalidArgumentError, match="the tick is of 'other'"):
            worlds.pipeline.forward(ARDiffusionRequest(tick=other, generator=torch.Generator()))


def test_a_failed_tick_commits_nothing_of_the_model(worlds: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    first = worlds.latents(prompt="sea")
    with monkeypatch.context() as patch:
        patch.setattr(worlds.pipeline, "_decoder", lambda *_arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            worlds.tick(prompt="sea")
    assert worlds.pipeline._worlds == {}
    assert worlds.runner.cache.pool.num_free == worlds.runner.cache.pool.num_usable
    assert torch.equal(worlds.latents(prompt="sea", chunk_index=0), first)


# ---------------------------------------------------------------------------------------------------- memory


def test_reset_and_close_forget_the_world_of_that_session_only(worlds: Worlds) -> None:
    first = {name: worlds.latents(name) for name in "abc"}
    worlds.runner.reset_session("a")
    worlds.runner.close_session("b")
    assert worlds.runner.session_ids == tuple(worlds.pipeline._worlds) == ("c",)
    assert torch.equal(worlds.latents("a", chunk_index=0), first["a"])


def test_what_the_model_keeps_is_what_it_declares(worlds: Worlds) -> None:
    worlds.tick()
    last_frame = worlds.pipeline._worlds["w"].last_frame
    assert last_frame is not None
    assert last_frame.untyped_storage().nbytes() == owned_state_bytes()
    assert worlds.runner.spec.model_owned_state_bytes_per_session == owned_state_bytes()


def test_sixty_four_sessions_are_resident_at_once() -> None:
    worlds = Worlds()
    for number in range(65):
        worlds.tick(f"w{number}")
    assert worlds.runner.session_ids == tuple(f"w{number}" for number in range(1, 65))
    assert len(worlds.pipeline._worlds) == 64
    memory = worlds.runner.memory()
    assert memory["allocated_bytes"] <= memory["planned_bytes"] <= memory["budget_bytes"]
    worlds.runner.check_integrity()


def test_warm_up_leaves_no_trace(worlds: Worlds) -> None:
    expected = Worlds().latents("w", "sea")
    worlds.runner.warm_up()
    assert worlds.pipeline._worlds == {}
    assert worlds.runner.cache.pool.num_free == worlds.runner.cache.pool.num_usable
    assert torch.equal(worlds.latents("w", "sea"), expected)
