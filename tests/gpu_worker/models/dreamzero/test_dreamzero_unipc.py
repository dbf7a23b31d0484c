"""The sampler: its table, and its steps against plain NumPy."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler

from contracts.errors import InvalidArgumentError
from gpu_worker.models.dreamzero.unipc import UniPCSampler, UniPCSchedule
from support.dreamzero_oracles import unipc as oracle
from support.lingbot_model import seeded

SIGMAS = (0.9998, 0.986634, 0.972006, 0.955657, 0.937265, 0.916422, 0.892602, 0.865118)
SIGMAS += (0.833055, 0.795165, 0.7497, 0.694136, 0.624687, 0.535408, 0.416389, 0.2498)
TIMESTEPS = (999, 986, 972, 955, 937, 916, 892, 865, 833, 795, 749, 694, 624, 535, 416, 249)


def random(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 2, 3, generator=seeded(seed), dtype=torch.float64)


def run(schedule: UniPCSchedule, noise: torch.Tensor, flows: torch.Tensor) -> list[torch.Tensor]:
    sampler = UniPCSampler(schedule, noise)
    return [sampler.advance(flow) for flow in flows]


def test_the_table_of_sixteen_steps() -> None:
    schedule = UniPCSchedule.of(16, 5.0)

    assert schedule.sigmas[:-1] == pytest.approx(SIGMAS, abs=6e-7)
    assert schedule.sigmas[-1] == 0
    assert schedule.timesteps == TIMESTEPS
    assert UniPCSchedule.of() == schedule


@pytest.mark.parametrize(("steps", "shift"), [(1, 5.0), (4, 1.0), (16, 5.0), (50, 3.0)])
def test_levels_are_a_lattice_that_is_shifted(steps: int, shift: float) -> None:
    schedule = UniPCSchedule.of(steps, shift)

    np.testing.assert_allclose(schedule.sigmas, oracle.levels(steps, shift), atol=1e-15)
    assert schedule.steps == steps


@pytest.mark.parametrize(("steps", "shift"), [(1, 5.0), (2, 5.0), (3, 1.0), (16, 5.0)])
def test_steps_equal_the_formulas(steps: int, shift: float) -> None:
    schedule = UniPCSchedule.of(steps, shift)
    noise, flows = random(1)[0], random(steps, 1)

    found = run(schedule, noise, flows)

    expected = oracle.run(list(schedule.sigmas), noise.numpy(), list(flows.numpy()))
    np.testing.assert_allclose(torch.stack(found).numpy(), np.stack(expected), atol=1e-9, rtol=1e-9)


def test_steps_are_those_of_a_library_that_is_given_the_same_levels() -> None:
    schedule = UniPCSchedule.of()
    noise, flows = random(1)[0], random(16, 1)
    library = UniPCMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=5.0,
        solver_order=2,
        solver_type="bh2",
    )
    library.set_timesteps(16)
    library.sigmas = torch.tensor(schedule.sigmas, dtype=torch.float64)

    sample = noise
    for found, flow, timestep in zip(run(schedule, noise, flows), flows, library.timesteps, strict=True):
        sample = library.step(flow, timestep, sample, return_dict=False)[0]
        torch.testing.assert_close(found, sample, atol=1e-12, rtol=1e-12)


def test_a_decoupled_video_stays_noisy() -> None:
    schedule = UniPCSchedule.of().decoupled(0.8)
    noise, flows = random(1)[0], random(16, 1)

    most = SIGMAS[0]
    expected = [sigma * (most - 0.8) / most + 0.8 for sigma in (*SIGMAS, 0.0)]
    assert schedule.sigmas == pytest.approx(expected, abs=1e-6)
    assert schedule.timesteps == tuple(int(1000 * sigma) for sigma in schedule.sigmas[:-1])
    assert (schedule.sigmas[-1], schedule.timesteps[0], schedule.timesteps[-1]) == (0.8, 999, 849)
    found = run(schedule, noise, flows)
    steps = oracle.run(list(schedule.sigmas), noise.numpy(), list(flows.numpy()))
    np.testing.assert_allclose(torch.stack(found).numpy(), np.stack(steps), atol=1e-9, rtol=1e-9)


def test_a_straight_line_is_followed_exactly() -> None:
    schedule = UniPCSchedule.of()
    noise, data = random(1)[0], random(1, 1)[0]

    samples = run(schedule, noise, (noise - data).expand(16, 2, 3))

    start = schedule.sigmas[0]
    for sample, sigma in zip(samples, schedule.sigmas[1:], strict=True):
        torch.testing.assert_close(sample, noise + (sigma - start) * (noise - data))


def test_more_steps_come_closer_to_the_curve() -> None:
    """A flow that bends: data of variance 1/4, for which the exact way is known."""

    def error(steps: int) -> float:
        schedule = UniPCSchedule.of(steps, 1.0)
        sampler = UniPCSampler(schedule, torch.ones(1, dtype=torch.float64))
        for sigma in schedule.sigmas[:-1]:
            spread = (1 - sigma) ** 2 / 4 + sigma**2
            sampler.advance(sampler.sample * (sigma - (1 - sigma) / 4) / spread)
        start = schedule.sigmas[0]
        return abs(float(sampler.sample) - 0.5 / ((1 - start) ** 2 / 4 + start**2) ** 0.5)

    errors = [error(steps) for steps in (4, 16, 64, 256)]
    assert all(later < earlier / 8 for earlier, later in pairwise(errors)), errors


def test_the_sample_keeps_its_type() -> None:
    noise = random(1)[0].float()
    sampler = UniPCSampler(UniPCSchedule.of(2), noise)

    found = [sampler.advance(flow.bfloat16()) for flow in random(2, 1)]

    assert [sample.dtype for sample in found] == [torch.float32] * 2
    assert torch.equal(noise, random(1)[0].float())  # the first sample is the caller's


def test_a_sampler_tells_its_timestep_until_it_is_complete() -> None:
    sampler = UniPCSampler(UniPCSchedule.of(2), random(1)[0])

    told = []
    while not sampler.complete:
        told.append(sampler.timestep)
        sampler.advance(random(1, 1)[0])

    assert told == [999, 833]
    for beyond in (lambda: sampler.timestep, lambda: sampler.advance(random(1)[0])):
        with pytest.raises(InvalidArgumentError, match="2 steps"):
            beyond()


def test_a_flow_has_the_sample_s_shape() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        UniPCSampler(UniPCSchedule.of(2), random(1)[0]).advance(torch.zeros(3))
    assert caught.value.field == "flow"


@pytest.mark.parametrize("steps", [0, -1, 1001, True, 2.5, "16", None])
def test_steps_are_counted_from_1_to_1000(steps: Any) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        UniPCSchedule.of(steps)
    assert caught.value.field == "steps"


@pytest.mark.parametrize("shift", [0, -1.0, float("nan"), float("inf"), True, "5", None])
def test_a_shift_is_a_positive_number(shift: Any) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        UniPCSchedule.of(16, shift)
    assert caught.value.field == "shift"


@pytest.mark.parametrize("noise", [-0.1, 1.0, float("nan"), True, "0.8", None])
def test_a_final_noise_leaves_something_to_do(noise: Any) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        UniPCSchedule.of().decoupled(noise)
    assert caught.value.field == "final_noise"
