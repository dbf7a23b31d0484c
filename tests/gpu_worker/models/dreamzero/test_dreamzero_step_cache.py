"""The step cache: when a flow serves further steps, and when not."""

import math

import pytest
import torch

from gpu_worker.models.dreamzero.step_cache import StepCache
from gpu_worker.models.dreamzero.transformer import Flow


def pointing(degrees: float, length: float = 1.0) -> Flow:
    """A flow in a plane."""
    angle = math.radians(degrees)
    return Flow(length * torch.tensor([math.cos(angle), math.sin(angle)]).view(1, 1, 1, 1, 2), None)


def angle(cosine: float) -> float:
    return math.degrees(math.acos(cosine))


def forwards(cache: StepCache, flows: list[Flow], steps: int) -> list[int]:
    """The steps that needed a forward; the n-th of them makes the n-th flow."""
    needed: list[int] = []
    for step in range(steps):
        if cache.reuse() is None:
            cache.keep(flows[len(needed)])
            needed.append(step)
    return needed


@pytest.mark.parametrize(
    ("cosine", "skipped"),
    [(0.999, 4), (0.951, 4), (0.949, 2), (0.931, 2), (0.929, 0), (0.0, 0), (-0.99, 0)],
)
def test_the_more_alike_two_flows_are_the_more_steps_the_last_one_serves(cosine: float, skipped: int) -> None:
    cache = StepCache()
    first, second = pointing(10), pointing(10 + angle(cosine))

    cache.keep(first)
    assert cache.reuse() is None  # one flow alone says nothing
    cache.keep(second)

    served = []
    while (flow := cache.reuse()) is not None:
        served.append(flow)
    assert served == [second] * skipped
    assert (cache.hits, cache.forwards) == (skipped, 2)


def test_length_does_not_matter_direction_does() -> None:
    cache = StepCache()
    cache.keep(pointing(0, 1.0))
    cache.keep(pointing(0, 100.0))

    assert cache.reuse() is not None


def test_flows_are_compared_with_the_last_one_that_was_computed() -> None:
    flows = [pointing(0), pointing(20), pointing(21), pointing(60), pointing(80)]

    # 0 -> 20: cos 0.94, two steps are skipped; 20 -> 21: four; 21 -> 60: none; 60 -> 80: two.
    assert forwards(StepCache(), flows, 13) == [0, 1, 4, 9, 10]


def test_a_flow_that_is_no_number_serves_nothing() -> None:
    cache = StepCache()
    for _ in range(2):
        cache.keep(Flow(torch.full((1, 1, 1, 1, 2), math.nan), None))

    assert cache.reuse() is None


def test_rules_may_be_others() -> None:
    cache = StepCache(((0.5, 7),))
    cache.keep(pointing(0))
    cache.keep(pointing(45))

    assert sum(cache.reuse() is not None for _ in range(20)) == 7


def test_half_precision_flows_are_compared_in_float32() -> None:
    cache = StepCache()
    wide = torch.ones(1, 16, 2, 44, 80)
    cache.keep(Flow((3000 * wide).half(), None))  # the squares are beyond what half precision holds
    cache.keep(Flow((3000 * wide).half(), None))

    assert cache.reuse() is not None
