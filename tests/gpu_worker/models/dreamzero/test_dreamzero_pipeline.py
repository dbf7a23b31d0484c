"""The pipeline on the runner's seam: which forwards run and which stay, what resets let go of, what failures leave."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from contracts.dreamzero import ObservationMissingError, observation_control
from contracts.errors import ConfigurationError, InvalidArgumentError, KVStateError, ModelError
from contracts.tick import ARDiffusionTickRequest
from gpu_worker.capability import (
    WARMUP_SESSION_ID,
    ARDiffusionRequest,
    DiffusionOutput,
    SupportsARDiffusionPipeline,
    SupportsStepExecution,
    SupportsWarmup,
)
from gpu_worker.kv.state import ARDiffusionKVState
from gpu_worker.models.dreamzero import rollout
from gpu_worker.models.dreamzero.clip import ClipImageTower
from gpu_worker.models.dreamzero.passes import PagedModel
from gpu_worker.models.dreamzero.pipeline import DreamZeroPipeline
from gpu_worker.models.dreamzero.spec import IMAGE, NEGATIVE, POSITIVE, TEXT
from gpu_worker.models.dreamzero.transformer import DreamZeroTransformer
from gpu_worker.models.lingbot_world.text import TextEncoder
from support.dreamzero_worlds import (
    LANGUAGE,
    OTHER_LANGUAGE,
    STEPS,
    Robots,
    arm,
    observed,
    pictures_of,
    sentence,
    shared_checkpoint,
    tiny_pipeline,
)
from support.kv_cache import CPU
from support.lingbot_ranks import ThreadRank, on_ranks

BOTH = (POSITIVE, NEGATIVE)


@pytest.fixture(scope="module")
def pipeline() -> DreamZeroPipeline:
    """One for all tests of this module; each closes its sessions."""
    return tiny_pipeline()


@pytest.fixture
def robots(pipeline: DreamZeroPipeline) -> Iterator[Robots]:
    robots = Robots(pipeline)
    yield robots
    for session_id in robots.runner.session_ids:
        robots.runner.close_session(session_id)
    assert pipeline._states == {}


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What is seen and done: ("see",), ("text" | "image", branch), ("prefill" | "denoise", branch, start, frames)."""
    calls: list[tuple[Any, ...]] = []
    tower = ClipImageTower.forward
    prefill, denoise, populate = (
        PagedModel.prefill,
        PagedModel.denoise,
        ARDiffusionKVState.populate_cross_attention,
    )

    def logged_prefill(self: PagedModel, branch: str, frames: Any) -> None:
        calls.append(("prefill", branch, frames.start_frame, frames.latents.shape[2]))
        assert frames.timestep == 0
        prefill(self, branch, frames)

    def logged_denoise(self: PagedModel, branch: str, frames: Any, registers: Any) -> Any:
        calls.append(("denoise", branch, frames.start_frame, frames.latents.shape[2]))
        assert registers.action.shape[1] + registers.state.shape[1] == 4 + 1
        before = positions(self._kv, branch)
        flow = denoise(self, branch, frames, registers)
        assert positions(self._kv, branch) == before, "a denoising forward left something"
        return flow

    def logged_populate(self: ARDiffusionKVState, branch: str, name: str, layer_kv: Any) -> None:
        calls.append((name, branch))
        populate(self, branch, name, layer_kv)

    def logged_tower(self: ClipImageTower, picture: Any) -> Any:
        calls.append(("see",))
        return tower(self, picture)

    monkeypatch.setattr(ClipImageTower, "forward", logged_tower)
    monkeypatch.setattr(PagedModel, "prefill", logged_prefill)
    monkeypatch.setattr(PagedModel, "denoise", logged_denoise)
    monkeypatch.setattr(ARDiffusionKVState, "populate_cross_attention", logged_populate)
    return calls


def positions(kv: ARDiffusionKVState, branch: str) -> tuple[Any, ...]:
    adapter = kv.adapter(branch)
    return adapter.absolute_tokens, adapter.num_computed_tokens, tuple(adapter.table.ids)


def kv_of(robots: Robots, session_id: str = "robot") -> ARDiffusionKVState:
    return robots.runner._sessions.use(session_id).kv  # type: ignore[union-attr]


def steps(start: int) -> list[tuple[Any, ...]]:
    return [("denoise", branch, start, 2) for _ in range(STEPS) for branch in BOTH]


def actions(output: DiffusionOutput) -> np.ndarray:
    return np.asarray(output.payload["actions"])


# ---------------------------------------------------------------------------------------------------- the seam


def test_it_implements_what_the_runner_asks_for(pipeline: DreamZeroPipeline) -> None:
    assert isinstance(pipeline, SupportsARDiffusionPipeline)
    assert isinstance(pipeline, SupportsWarmup)
    assert not isinstance(pipeline, SupportsStepExecution)


def test_binding_twice_or_under_another_name_is_refused(pipeline: DreamZeroPipeline, robots: Robots) -> None:
    robots.act(0)
    kv = kv_of(robots)
    with (
        pytest.raises(InvalidArgumentError, match="can't be bound"),
        pipeline.bind_ar_diffusion_state("other", kv),
    ):
        pass
    with (
        pipeline.bind_ar_diffusion_state("robot", kv),
        pytest.raises(KVStateError, match="still bound"),
        pipeline.bind_ar_diffusion_state("robot", kv),
    ):
        pass


def test_without_a_session_nothing_runs(pipeline: DreamZeroPipeline) -> None:
    tick = ARDiffusionTickRequest("robot", "r", 0, controls=(observed(0),))
    with pytest.raises(KVStateError, match="no session is bound"):
        pipeline.forward(ARDiffusionRequest(images=pictures_of(0), tick=tick))


def test_a_session_that_is_closed_or_reset_is_forgotten_and_the_others_are_not(
    pipeline: DreamZeroPipeline, robots: Robots
) -> None:
    for name in ("one", "two", "three"):
        robots.act(0, name)
    robots.runner.close_session("one")
    robots.runner.reset_session("two")

    assert list(pipeline._states) == ["three"]
    pipeline.close_ar_diffusion_session("never seen")
    pipeline.reset_ar_diffusion_session("never seen")


def test_a_chunk_out_of_order_is_refused_and_changes_nothing(
    pipeline: DreamZeroPipeline, robots: Robots
) -> None:
    robots.act(0)
    known = pipeline._states["robot"]
    tick = ARDiffusionTickRequest("robot", "r", 2, controls=(observed(1),))
    kv = kv_of(robots)
    with (
        pytest.raises(InvalidArgumentError, match=r"contiguous: expected 1, got 2"),
        kv.lend(),
        pipeline.bind_ar_diffusion_state("robot", kv),
    ):
        pipeline.forward(ARDiffusionRequest(images=pictures_of(1), tick=tick))
    assert pipeline._states["robot"] is known


# ---------------------------------------------------------------------------------------------------- forwards


def test_the_first_observation_sees_publishes_prefills_one_frame_and_denoises(
    robots: Robots, log: list[Any]
) -> None:
    robots.act(0)

    published = [("text", POSITIVE), ("image", POSITIVE), ("text", NEGATIVE), ("image", NEGATIVE)]
    assert log == [("see",)] + published + [("prefill", branch, 0, 1) for branch in BOTH] + steps(1)


def test_later_ones_prefill_what_was_seen_where_it_was_imagined(robots: Robots, log: list[Any]) -> None:
    for number in range(4):
        del log[:]
        robots.act(number)
        if number:
            start = 1 + 2 * number
            assert log == [("prefill", branch, start - 2, 2) for branch in BOTH] + steps(start)
    assert robots.pipeline._states["robot"].start == 9


def test_committed_frames_never_exceed_seven(robots: Robots) -> None:
    frames = []
    for number in range(9):
        robots.act(number)
        frames.append([kv_of(robots).adapter(branch).absolute_frames for branch in BOTH])

    assert frames == [[n, n] for n in (1, 3, 5, 7, 1, 3, 5, 7, 1)]


def test_at_the_end_of_a_rollout_image_and_past_go_and_the_text_stays(robots: Robots, log: list[Any]) -> None:
    for number in range(4):
        robots.act(number)
    before = storages(robots, TEXT), storages(robots, IMAGE)
    del log[:]

    robots.act(4)

    assert log == [("see",), ("image", POSITIVE), ("image", NEGATIVE)] + [
        ("prefill", branch, 0, 1) for branch in BOTH
    ] + steps(1)
    assert storages(robots, TEXT) == before[0]
    assert storages(robots, IMAGE) != before[1]


def storages(robots: Robots, name: str) -> list[int]:
    store = robots.runner.cache.cross_attention
    return [layer["k"].data_ptr() for branch in BOTH for layer in store.get("robot", branch, name)]


def test_another_task_drops_everything(robots: Robots, log: list[Any], pipeline: DreamZeroPipeline) -> None:
    for number in range(2):
        robots.act(number)
    stream = pipeline._states["robot"].stream
    del log[:]

    robots.act(2, control=observed(2, language=OTHER_LANGUAGE))

    published = [("text", POSITIVE), ("image", POSITIVE), ("text", NEGATIVE), ("image", NEGATIVE)]
    assert log[:5] == [("see",), *published]
    assert log[5:7] == [("prefill", branch, 0, 1) for branch in BOTH]
    found = pipeline._states["robot"]
    assert found.stream is not None
    assert found.stream is not stream
    assert (len(found.stream.latents), found.stream.waiting, found.calls, found.start) == (1, (), 1, 3)
    assert found.next_chunk == 3


def test_the_same_task_in_other_white_space_and_case_goes_on(robots: Robots, log: list[Any]) -> None:
    robots.act(0)
    del log[:]

    robots.act(1, control=observed(1, language=f"  {LANGUAGE.upper()} "))

    assert log[0] == ("prefill", POSITIVE, 1, 2)


def test_a_branch_is_published_only_where_it_lacks_something(robots: Robots, log: list[Any]) -> None:
    robots.act(0)
    for branch, name in ((NEGATIVE, TEXT), (POSITIVE, IMAGE)):
        robots.runner.cache.cross_attention.clear("robot", branch, name)
        del log[:]
        robots.act(robots._chunks["robot"])
        assert [call for call in log if len(call) == 2] == [(name, branch)]
        assert log.count(("see",)) == (name == IMAGE)


def test_text_is_embedded_only_where_a_branch_lacks_it(
    robots: Robots, pipeline: DreamZeroPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    embed = TextEncoder.__call__

    def logged(self: TextEncoder, prompt: object) -> torch.Tensor:
        read.append(str(prompt))
        return embed(self, prompt)

    monkeypatch.setattr(TextEncoder, "__call__", logged)
    for number in range(6):
        robots.act(number)
    robots.act(0, "plain", cfg_scale=1.0)

    assert read == [sentence(LANGUAGE), "rain and night", sentence(LANGUAGE)]


def test_what_the_cameras_showed_goes_on_over_the_end_of_a_rollout(
    robots: Robots, pipeline: DreamZeroPipeline
) -> None:
    latents = []
    for number in range(6):
        robots.act(number)
        stream = pipeline._states["robot"].stream
        assert stream is not None
        latents.append((len(stream.latents), len(stream.waiting)))

    assert latents == [(1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1)]


# ---------------------------------------------------------------------------------------------------- guidance


def test_without_guidance_the_negative_branch_is_left_alone(robots: Robots, log: list[Any]) -> None:
    for number in range(6):
        robots.act(number, cfg_scale=1.0)

    assert {call[1] for call in log if call != ("see",)} == {POSITIVE}
    adapter = kv_of(robots).adapter(NEGATIVE)
    assert (adapter.absolute_tokens, len(adapter.table)) == (0, 0)
    assert not robots.runner.cache.cross_attention.is_populated("robot", NEGATIVE, TEXT)
    assert not robots.runner.cache.cross_attention.is_populated("robot", NEGATIVE, IMAGE)


def test_guidance_changes_the_video_at_once_and_leaves_the_first_actions_to_the_positive_branch(
    robots: Robots,
) -> None:
    one_step = {"num_inference_steps": 1, "output_type": "latent"}
    plain, strong = (robots.act(0, f"scale-{scale}", cfg_scale=scale, **one_step) for scale in (1, 7.5))

    assert np.array_equal(actions(plain), actions(strong))
    assert not torch.equal(plain.payload["latents"], strong.payload["latents"])


# ---------------------------------------------------------------------------------------------------- what comes out


def test_actions_are_what_comes_out_unless_more_is_asked_for(robots: Robots) -> None:
    for number, (kind, names, count) in enumerate(
        [
            ("actions", {"actions"}, 0),
            ("latent", {"actions", "latents"}, 0),
            ("pixel", {"actions", "latents"}, 8),
        ]
    ):
        output = robots.act(number, output_type=kind)
        assert set(output.payload) == names
        assert actions(output).shape == (4, 8)
        assert actions(output).dtype == np.float32
        assert (0 if output.frames is None else len(output.frames)) == count
        assert output.metadata["ar_diffusion"] == {
            "session_id": "robot",
            "request_id": f"r-{number}",
            "chunk_index": number,
            "applied_event_ids": [number],
        }


def test_imagined_pictures_are_those_of_the_rollout_so_far(
    robots: Robots, pipeline: DreamZeroPipeline
) -> None:
    made = [robots.act(number, output_type="pixel") for number in range(5)]

    assert [tuple(output.frames.shape) for output in made] == [(9, 32, 48, 3)] + [(8, 32, 48, 3)] * 3 + [  # type: ignore[union-attr]
        (9, 32, 48, 3)
    ]
    vae = pipeline._policy._decoder._vae
    clip = torch.cat([output.payload["latents"] for output in made[:4]], dim=2)
    shift, scale = (
        torch.tensor(values).view(1, 16, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    with torch.no_grad():
        whole = vae.decode(clip * scale + shift).sample
    expected = ((whole[0] / 2 + 0.5).clamp(0, 1) * 255).round().permute(1, 2, 3, 0)
    found = torch.cat([output.frames for output in made[:4]])  # type: ignore[misc]
    assert (found.float() - expected).abs().max() <= 1


def test_noise_is_the_same_at_every_observation_and_comes_from_the_seed_alone(robots: Robots) -> None:
    first = actions(robots.act(3, "one", seed=5))
    again = actions(robots.act(3, "two", seed=5))
    other = actions(robots.act(3, "three", seed=6))

    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_noise_of_video_and_actions_is_drawn_in_the_model_s_type_each_from_the_seed(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    drawn: list[torch.Tensor] = []

    class Watched(rollout.UniPCSampler):
        def __init__(self, schedule: rollout.UniPCSchedule, noise: torch.Tensor) -> None:
            drawn.append(noise)
            super().__init__(schedule, noise)

    monkeypatch.setattr(rollout, "UniPCSampler", Watched)
    Robots(tiny_pipeline(dtype=dtype), dtype=dtype).act(0, seed=7)

    for noise, shape in zip(drawn, [(1, 16, 2, 4, 6), (1, 4, 10)], strict=True):
        expected = torch.randn(shape, generator=torch.Generator().manual_seed(7), dtype=dtype)
        assert noise.dtype == torch.float32
        assert torch.equal(noise, expected.float())


def test_the_published_seed_is_that_of_sessions_without_one(
    pipeline: DreamZeroPipeline, robots: Robots
) -> None:
    assert pipeline.ar_diffusion_default_seed == 1140
    kv = robots.runner._sessions.create("bare", robots.runner.cache, 0).kv
    tick = ARDiffusionTickRequest("bare", "r", 0, controls=(observed(0),))
    with kv.lend(), pipeline.bind_ar_diffusion_state("bare", kv):
        bare = pipeline.forward(ARDiffusionRequest(images=pictures_of(0), tick=tick))

    assert np.array_equal(actions(bare), actions(robots.act(0, "seeded", seed=1140)))


def test_sessions_that_take_turns_answer_as_each_alone(robots: Robots) -> None:
    alone = [[actions(robots.act(10 * r + n, f"alone-{r}")) for n in range(6)] for r in range(2)]
    robots.runner.close_session("alone-0")
    turns: list[list[np.ndarray]] = [[], []]
    for number in range(6):
        for robot in range(2):
            turns[robot].append(actions(robots.act(10 * robot + number, f"turn-{robot}")))

    for robot in range(2):
        assert all(map(np.array_equal, turns[robot], alone[robot]))


def test_what_a_session_keeps_is_what_is_declared(robots: Robots, pipeline: DreamZeroPipeline) -> None:
    for number in range(9):
        robots.act(number)
    declared = pipeline.ar_diffusion_kv_cache_spec().model_owned_state_bytes_per_session
    assert pipeline._states["robot"].nbytes == declared


def test_a_rollout_in_bfloat16_is_finite() -> None:
    robots = Robots(tiny_pipeline(dtype=torch.bfloat16), dtype=torch.bfloat16)
    for number in range(5):
        output = robots.act(number, output_type="latent")
        assert np.isfinite(actions(output)).all()
        assert output.payload["latents"].dtype == torch.float32


# ---------------------------------------------------------------------------------------------------- warm-up, dummy


def test_warm_up_runs_two_observations_and_leaves_nothing(
    pipeline: DreamZeroPipeline, log: list[Any]
) -> None:
    robots = Robots(pipeline)
    free = robots.runner.cache.pool.num_free

    robots.runner.warm_up()

    assert [call[2] for call in log if call[0] == "prefill" and call[1] == POSITIVE] == [0, 1]
    assert robots.runner.session_ids == ()
    assert robots.runner.cache.pool.num_free == free
    assert all(
        request.tick.session_id == WARMUP_SESSION_ID for request in pipeline.ar_diffusion_warmup_requests()
    )  # type: ignore[union-attr]


def test_a_dummy_run_returns_zeros_of_the_models_shape_without_running(
    pipeline: DreamZeroPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DreamZeroTransformer, "forward", lambda *_, **__: pytest.fail("it ran"))

    output = pipeline.forward(ARDiffusionRequest(prompt="dummy run", extra_args={"num_inference_steps": 1}))

    assert torch.equal(output.payload["actions"], torch.zeros(4, 10))


@pytest.mark.parametrize("extra", [{}, {"num_inference_steps": 2}])
def test_any_other_request_without_an_observation_is_a_missing_key(
    robots: Robots, extra: dict[str, Any]
) -> None:
    with pytest.raises(KeyError) as caught:
        robots.runner.execute_model(ARDiffusionRequest(prompt="dummy run", extra_args=extra))
    assert isinstance(caught.value, ObservationMissingError)
    assert caught.value.field == "robot_obs"


def test_a_request_without_a_tick_brings_its_observation_along(robots: Robots) -> None:
    data = observed(0).to_dict()["data"]
    request = ARDiffusionRequest(images=pictures_of(0), extra_args={"robot_obs": data, "session_id": "plain"})

    output = robots.runner.execute_model(request, seed=1140)

    assert output.metadata == {}
    assert np.array_equal(actions(output), actions(robots.act(0)))


# ---------------------------------------------------------------------------------------------------- failures


def test_a_failure_at_any_forward_leaves_the_sessions_own_state_as_it_was(
    pipeline: DreamZeroPipeline, robots: Robots, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2):
        robots.act(number)
    known = dict(pipeline._states)
    left: list[Any] = []

    def fails(*_: Any, **__: Any) -> Any:
        left.append(dict(pipeline._states))
        raise ModelError("the device is on fire", field="device")

    monkeypatch.setattr(DreamZeroTransformer, "forward", fails)
    with pytest.raises(ModelError, match="on fire"):
        robots.act(2)

    assert left == [known]
    assert "robot" not in pipeline._states, "the runner has released it"
    monkeypatch.undo()
    robots.restarts()
    again = actions(robots.act(0))
    assert np.array_equal(again, actions(robots.act(0, "fresh")))


def test_actions_that_are_not_finite_fail_the_chunk(
    robots: Robots, pipeline: DreamZeroPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    robots.act(0, "neighbour")
    weight = pipeline._policy._transformer.action_decoder.layer2.b
    monkeypatch.setattr(weight, "data", torch.full_like(weight, float("nan")))
    with pytest.raises(ModelError, match="actions are not finite") as caught:
        robots.act(0)
    assert caught.value.field == "actions"
    monkeypatch.undo()
    robots.act(1, "neighbour")


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("images.wrist", {"images": {"left": "redis:a", "right": "redis:b"}}),
        ("images.above", {"images": dict.fromkeys(("left", "right", "wrist", "above"), "redis:a")}),
        ("state.gripper_position", {"state": {"joint_position": [0.0] * 7}}),
        ("state.joint_position", {"state": arm(0) | {"joint_position": [0.0] * 6}}),
        ("state.torso", {"state": arm(0) | {"torso": [0.0]}}),
    ],
)
def test_an_observation_that_is_not_the_robots_is_named_before_its_kv_is_touched(
    robots: Robots, log: list[Any], field: str, changes: dict[str, Any]
) -> None:
    data = observed(0).to_dict()["data"] | changes
    control = observation_control(data["images"], data["state"], data["language"])
    images = (pictures_of(0) * 2)[: len(data["images"])]
    with pytest.raises(InvalidArgumentError) as caught:
        robots.act(0, control=control, images=images)
    assert caught.value.field == field
    assert log == []


@pytest.mark.parametrize(
    ("images", "field"),
    [
        ((), "images"),
        (pictures_of(0)[:2], "images"),
        (pictures_of(0) + pictures_of(0)[:1], "images"),
        ((*pictures_of(0)[:1], b"no picture", *pictures_of(0)[2:]), "images.right"),
        ((None, *pictures_of(0)[1:]), "images.left"),
        ((*pictures_of(0)[:2], np.zeros((8, 8), np.uint8)), "images.wrist"),
    ],
)
def test_images_of_a_wrong_count_or_shape_are_named(
    robots: Robots, images: tuple[Any, ...], field: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        robots.act(0, images=images)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("output_type", {"output_type": "video"}),
        ("output_type", {"output_type": ["pixel"]}),
        ("cfg_scale", {"cfg_scale": 0.5}),
        ("cfg_scale", {"cfg_scale": True}),
        ("cfg_scale", {"cfg_scale": "5"}),
        ("cfg_scale", {"cfg_scale": float("nan")}),
        ("cfg_scale", {"cfg_scale": 10**400}),
        ("num_inference_steps", {"num_inference_steps": 0}),
        ("num_inference_steps", {"num_inference_steps": 1.0}),
        ("num_inference_steps", {"num_inference_steps": 1001}),
        ("colour", {"colour": "red"}),
    ],
)
def test_a_parameter_that_does_not_fit_is_named(robots: Robots, field: str, params: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        robots.act(0, **params)
    assert caught.value.field == field


def test_a_prompt_that_is_not_the_language_is_refused(robots: Robots) -> None:
    def ask(prompt: str) -> None:
        tick = ARDiffusionTickRequest("robot", "r", 0, prompt=prompt, controls=(observed(0),))
        robots.runner.execute_model(ARDiffusionRequest(prompt=prompt, images=pictures_of(0), tick=tick))

    ask(" Over the Snow")
    robots.runner.close_session("robot")
    with pytest.raises(InvalidArgumentError, match="language") as caught:
        ask("into the valley")
    assert caught.value.field == "prompt"


@pytest.mark.parametrize(
    ("field", "config"),
    [
        ("checkpoint", {"checkpoint": None}),
        ("checkpoint", {"checkpoint": "/nowhere/at/all"}),
        ("step_cache", {"step_cache": 1}),
        ("cfg_scale", {"cfg_scale": 0}),
        ("num_inference_steps", {"num_inference_steps": "16"}),
        ("dtype", {"dtype": "float32"}),
        ("engine_backend", {"engine_backend": "diffusion"}),
        ("engine_backend", {"engine_backend": None}),
        ("cfg_parallel", {"cfg_parallel": 2}),
        ("colour", {"colour": "red"}),
    ],
)
def test_a_setting_that_does_not_fit_is_named(field: str, config: dict[str, Any]) -> None:
    settings = {"checkpoint": str(shared_checkpoint())} | config
    with pytest.raises(ConfigurationError) as caught:
        DreamZeroPipeline(device=CPU, dtype=torch.float32, config=settings)
    assert caught.value.field == field


def test_settings_of_a_whole_machine_are_no_business_of_this_model() -> None:
    assert tiny_pipeline(lingbot_action_root="/somewhere", engine_backend="ar_diffusion")


# ---------------------------------------------------------------------------------------------------- step cache


def test_with_the_step_cache_fewer_steps_run_the_model() -> None:
    robots = Robots(tiny_pipeline(step_cache=True, num_inference_steps=16))
    for number in range(2):
        robots.act(number)

    pipeline = robots.pipeline
    assert pipeline.forwards + pipeline.reused == 2 * 16
    assert pipeline.reused > 0


def test_without_it_every_step_does(pipeline: DreamZeroPipeline, robots: Robots) -> None:
    before = pipeline.forwards
    robots.act(0)
    assert (pipeline.forwards - before, pipeline.reused) == (STEPS, 0)


# ---------------------------------------------------------------------------------------------------- two ranks


@pytest.mark.parametrize("scale", [5.0, 1.0])
def test_two_ranks_that_run_a_branch_each_answer_as_one_process(scale: float, robots: Robots) -> None:
    numbers = range(6)  # over the end of a rollout
    asked = {"cfg_scale": scale, "output_type": "latent"}
    alone = [robots.act(number, **asked) for number in numbers]

    def on_rank(rank: ThreadRank) -> tuple[list[DiffusionOutput], dict[str, int]]:
        settings = {"checkpoint": str(shared_checkpoint()), "num_inference_steps": STEPS, "cfg_parallel": 2}
        shared = Robots(DreamZeroPipeline(device=CPU, dtype=torch.float32, config=settings, parallel=rank))
        assert shared.pipeline.ar_diffusion_kv_cache_spec().num_local_kv_branches == 1
        made = [shared.act(number, **asked) for number in numbers]
        return made, {branch: kv_of(shared).adapter(branch).absolute_frames for branch in BOTH}

    (first, frames_of_first), (second, frames_of_second) = on_ranks(2, on_rank)

    for number in numbers:
        assert np.array_equal(actions(first[number]), actions(second[number])), "ranks stay alike bit by bit"
        np.testing.assert_allclose(actions(first[number]), actions(alone[number]), atol=1e-5)
        np.testing.assert_allclose(
            first[number].payload["latents"], alone[number].payload["latents"], atol=1e-4, rtol=1e-5
        )
    assert frames_of_first == {POSITIVE: 3, NEGATIVE: 0}
    assert frames_of_second == ({POSITIVE: 3, NEGATIVE: 0} if scale == 1 else {POSITIVE: 0, NEGATIVE: 3})


def test_other_than_two_ranks_are_refused() -> None:
    def on_rank(rank: ThreadRank) -> str | None:
        settings = {"checkpoint": str(shared_checkpoint())}
        with pytest.raises(ConfigurationError, match="3 were started") as caught:
            DreamZeroPipeline(device=CPU, dtype=torch.float32, config=settings, parallel=rank)
        return caught.value.field

    assert on_ranks(3, on_rank) == ["cfg_parallel"] * 3
