"""The steps of one block: noise, levels, calls, in exactly their order."""

from typing import Any

import numpy as np
import pytest
import torch

from contracts.errors import ConfigurationError, InvalidArgumentError
from gpu_worker.models.lingbot_world.sampler import DMDBlock
from gpu_worker.models.lingbot_world.schedule import (
    DMDSchedule,
    check_scheduler_config,
    parse_flow_shift,
    resolve_flow_shift,
)
from support.lingbot_model import random_condition, seeded
from support.lingbot_oracles.recurrence import block, levels

SCHEDULER = {
    "_class_name": "UniPCMultistepScheduler",
    "num_train_timesteps": 1000,
    "prediction_type": "flow_prediction",
    "predict_x0": True,
    "use_flow_sigmas": True,
    "use_dynamic_shifting": False,
    "use_beta_sigmas": False,
    "use_exponential_sigmas": False,
    "use_karras_sigmas": False,
    "final_sigmas_type": "zero",
    "timestep_spacing": "linspace",
    "flow_shift": 5.0,
}
CONDITION = random_condition()
SHAPE = (1, 16, 3, 4, 6)


class RecordingFlow:
    """Predicts a constant, and writes down what it was asked."""

    def __init__(self, flow: float = 1.0) -> None:
        self.flow = flow
        self.inputs: list[torch.Tensor] = []
        self.calls: list[tuple[float, bool]] = []

    def __call__(self, model_input: torch.Tensor, timestep: float, *, update_cache: bool) -> torch.Tensor:
        self.inputs.append(model_input)
        self.calls.append((timestep, update_cache))
        return torch.full(SHAPE, self.flow, dtype=model_input.dtype)


def made(flow: Any, condition: torch.Tensor = CONDITION, seed: int = 17, **options: Any) -> DMDBlock:
    return DMDBlock(flow, condition, DMDSchedule.of(), seeded(seed), **options)


def noises(seed: int = 17) -> list[torch.Tensor]:
    generator = seeded(seed)
    return [torch.randn(SHAPE, generator=generator) for _ in range(4)]


def test_a_block_is_four_probes_and_one_pass_that_stays() -> None:
    flow = RecordingFlow()

    made(flow).run()

    steps = [timestep for timestep, _ in flow.calls]
    assert steps == pytest.approx([1000, 937.5, 2500 / 3, 625, 0])
    assert [update for _, update in flow.calls] == [False, False, False, False, True]


def test_the_recurrence_with_constant_flow_is_exact() -> None:
    found = made(RecordingFlow(flow=1.0)).run()

    cur = noises()
    x, sigmas = cur[0], DMDSchedule.of().sigmas
    for step, sigma in enumerate(sigmas):
        clean = x - sigma
        if step < 3:
            x = (1 - sigmas[step + 1]) * clean + sigmas[step + 1] * cur[step + 1]
    assert torch.equal(found, clean)


def test_the_recurrence_equals_the_oracle() -> None:
    def flow(x: np.ndarray, timestep: float) -> np.ndarray:
        return np.sin(x) * timestep / 500

    def model(model_input: torch.Tensor, timestep: float, *, update_cache: bool) -> torch.Tensor:
        return model_input[:, :16].sin() * (timestep / 500)

    found = made(model).run()

    expected = block([noise.double().numpy() for noise in noises()], flow, 5.0)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)


def test_noise_is_drawn_once_to_begin_with_and_three_times_after() -> None:
    generator = seeded(17)
    expected = noises()
    block_in_the_making = DMDBlock(RecordingFlow(0.0), CONDITION, DMDSchedule.of(), generator)
    assert torch.equal(block_in_the_making.latents, expected[0])
    block_in_the_making.run()

    following = torch.randn(3, generator=generator)
    reference = seeded(17)
    for _ in range(4):
        torch.randn(SHAPE, generator=reference)
    assert torch.equal(following, torch.randn(3, generator=reference))


def test_noise_and_latents_are_float32_whatever_the_model_computes_in() -> None:
    flow = RecordingFlow(0.0)
    block_in_the_making = made(flow, CONDITION.bfloat16())
    assert torch.equal(block_in_the_making.latents, noises()[0])

    latents = block_in_the_making.run()

    assert latents.dtype == torch.float32
    assert {model_input.dtype for model_input in flow.inputs} == {torch.bfloat16}
    assert torch.equal(latents, made(RecordingFlow(0.0)).run())


def test_a_generator_restored_from_its_state_draws_on_as_if_it_had_never_stopped() -> None:
    def model(model_input: torch.Tensor, timestep: float, *, update_cache: bool) -> torch.Tensor:
        return model_input[:, :16].tanh()

    continuous = seeded(17)
    first, second = (DMDBlock(model, CONDITION, DMDSchedule.of(), continuous).run() for _ in range(2))

    once = seeded(17)
    assert torch.equal(DMDBlock(model, CONDITION, DMDSchedule.of(), once).run(), first)
    again = seeded(99)
    again.set_state(once.get_state())
    assert torch.equal(DMDBlock(model, CONDITION, DMDSchedule.of(), again).run(), second)
    assert not torch.equal(first, second)


def test_the_input_is_noise_mask_and_image_in_the_model_s_type() -> None:
    flow = RecordingFlow()
    condition = CONDITION.bfloat16()

    found = made(flow, condition).run()

    assert all(x.shape == (1, 36, 3, 4, 6) and x.dtype == torch.bfloat16 for x in flow.inputs)
    assert torch.equal(flow.inputs[0][:, :16], noises()[0].bfloat16())
    assert all(torch.equal(x[:, 16:], condition) for x in flow.inputs)
    assert torch.equal(flow.inputs[4][:, :16], found.bfloat16())
    assert found.dtype == torch.float32


def test_steps_taken_one_by_one_equal_the_run() -> None:
    flow = RecordingFlow(0.3)
    stepped = made(flow)
    for step in range(4):
        assert (stepped.step, stepped.complete) == (step, False)
        with pytest.raises(InvalidArgumentError, match="after 4 steps"):
            stepped.commit()
        stepped.advance(stepped.predict())
    assert stepped.complete

    assert torch.equal(stepped.commit(), made(RecordingFlow(0.3)).run())
    assert len(flow.calls) == 5


def test_reusing_the_last_step_saves_the_fifth_pass_and_changes_no_latent() -> None:
    flow = RecordingFlow()

    found = made(flow, reuse_last_step_kv=True).run()

    assert [update for _, update in flow.calls] == [False, False, False, True]
    assert torch.equal(found, made(RecordingFlow()).run())


@pytest.mark.parametrize("value", [1, "true", None])
def test_reusing_the_last_step_is_a_bool(value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="lingbot_reuse_last_step_kv"):
        made(RecordingFlow(), reuse_last_step_kv=value)


# ---------------------------------------------------------------------------------------------------- levels


@pytest.mark.parametrize(
    ("shift", "timesteps"),
    [(5.0, (1000, 937.5, 833.33333, 625)), (2.5, (1000, 882.35294, 714.28571, 454.54545))],
)
def test_the_shift_moves_the_levels(shift: float, timesteps: tuple[float, ...]) -> None:
    schedule = DMDSchedule.of(shift)

    assert schedule.timesteps == pytest.approx(timesteps)
    assert schedule.sigmas == pytest.approx(levels(shift))


@pytest.mark.parametrize(
    "value", [True, False, 0, -1.0, float("inf"), float("nan"), 10**400, -(10**400), "5", None]
)
def test_a_shift_is_positive_and_finite(value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="positive, finite") as caught:
        parse_flow_shift(value)
    assert caught.value.field == "flow_shift"
    assert len(caught.value.message) < 200


def test_the_request_s_shift_wins_then_the_deployment_s_then_the_scheduler_s() -> None:
    scheduler = {"flow_shift": 3.0, "shift": 4.0}

    assert resolve_flow_shift(1, 2.0, scheduler) == 1.0
    assert resolve_flow_shift(None, 2.0, scheduler) == 2.0
    assert resolve_flow_shift(None, None, scheduler) == 3.0
    assert resolve_flow_shift(None, None, {"flow_shift": None, "shift": 4.0}) == 4.0
    assert resolve_flow_shift(None, None, {}) == 5.0
    assert scheduler == {"flow_shift": 3.0, "shift": 4.0}


@pytest.mark.parametrize("place", [(0, None, {}), (None, "5", {}), (None, None, {"flow_shift": True})])
def test_a_bad_shift_is_refused_wherever_it_comes_from(place: tuple[Any, Any, dict[str, Any]]) -> None:
    with pytest.raises(InvalidArgumentError, match="flow_shift"):
        resolve_flow_shift(*place)


def test_the_published_scheduler_is_accepted() -> None:
    check_scheduler_config({**SCHEDULER, "solver_order": 2, "solver_type": "bh2"})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("_class_name", "FlowMatchEulerDiscreteScheduler"),
        ("num_train_timesteps", 500),
        ("num_train_timesteps", 1000.0),
        ("prediction_type", "epsilon"),
        ("predict_x0", False),
        ("predict_x0", 1),
        ("use_flow_sigmas", False),
        ("use_dynamic_shifting", True),
        ("use_beta_sigmas", True),
        ("use_exponential_sigmas", True),
        ("use_karras_sigmas", True),
        ("final_sigmas_type", "sigma_min"),
        ("timestep_spacing", "trailing"),
        ("flow_shift", 0),
        ("shift", "5"),
    ],
)
def test_a_scheduler_that_drifts_is_refused_by_the_field(field: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=field) as caught:
        check_scheduler_config({**SCHEDULER, field: value})
    assert caught.value.field == field


@pytest.mark.parametrize("field", ["_class_name", "prediction_type", "use_flow_sigmas"])
def test_a_field_whose_absence_means_something_else_must_be_there(field: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_scheduler_config({name: value for name, value in SCHEDULER.items() if name != field})
    assert caught.value.field == field
