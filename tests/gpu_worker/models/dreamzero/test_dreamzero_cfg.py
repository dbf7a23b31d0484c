"""Guidance over two ranks: over gloo, it is what one process computes."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from contracts.errors import ConfigurationError
from gpu_worker.models.dreamzero.cfg import SplitGuidedModel, exchange, guided
from gpu_worker.models.dreamzero.guidance import GuidedModel
from gpu_worker.models.dreamzero.passes import PagedModel
from gpu_worker.models.dreamzero.spec import NEGATIVE, POSITIVE
from gpu_worker.models.dreamzero.transformer import Flow
from support.dreamzero_model import random_action, random_latents, tiny_model
from support.dreamzero_ranks import STEPS, Life
from support.lingbot_ranks import on_ranks
from support.rank_processes import RankProcesses

BLOCKS = 3


@pytest.fixture(scope="module")
def two() -> Iterator[RankProcesses]:
    group = RankProcesses(2)
    yield group
    group.end()


def flow(seed: int) -> Flow:
    return Flow(random_latents(2, seed), random_action(seed))


def test_the_video_is_guided_and_the_actions_are_the_positive_branch_s() -> None:
    positive, negative = flow(1), flow(2)

    found = guided(positive, negative, 5.0)

    assert torch.equal(found.video, negative.video + 5.0 * (positive.video - negative.video))
    assert found.action is positive.action


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_are_one_process(two: RankProcesses, dtype: str) -> None:
    expected = Life(dtype, 5.0, None).run()

    first, second = two.run("support.dreamzero_ranks:life", dtype=dtype, scale=5.0)

    assert len(expected) == 2 * BLOCKS
    for one, left, right in zip(expected, first["samples"], second["samples"], strict=True):
        assert np.array_equal(left, one)
        assert np.array_equal(right, one)


def test_a_rank_runs_its_own_branch_and_a_step_costs_one_collective(two: RankProcesses) -> None:
    first, second = two.run("support.dreamzero_ranks:life", dtype="float32", scale=5.0)

    assert first["frames"] == {POSITIVE: 1, NEGATIVE: 0}
    assert second["frames"] == {POSITIVE: 0, NEGATIVE: 1}
    assert first["text"] == {POSITIVE: True, NEGATIVE: False}
    assert second["text"] == {POSITIVE: False, NEGATIVE: True}
    assert first["calls"] == second["calls"] == {"all_gather": STEPS * BLOCKS}


def test_without_guidance_the_negative_branch_is_left_alone_and_nothing_is_exchanged(
    two: RankProcesses,
) -> None:
    session = Life("float32", 1.0, None)
    expected = session.run()

    for answer in two.run("support.dreamzero_ranks:life", dtype="float32", scale=1.0):
        assert answer["calls"] == {}
        assert answer["frames"] == {POSITIVE: 1, NEGATIVE: 0}
        for one, found in zip(expected, answer["samples"], strict=True):
            assert np.array_equal(found, one)
    assert session.kv.adapter(NEGATIVE).absolute_frames == 0


def test_guidance_changes_what_is_imagined() -> None:
    with_it, without = Life("float32", 5.0, None).run(), Life("float32", 1.0, None).run()

    assert not np.allclose(with_it[0], without[0])


@pytest.mark.parametrize("action", [True, False])
def test_both_ranks_know_both_flows(action: bool) -> None:
    flows = [Flow(random_latents(2, rank), random_action(rank) if action else None) for rank in range(2)]

    for found in on_ranks(2, lambda rank: exchange(rank, flows[rank.rank])):
        for expected, got in zip(flows, found, strict=True):
            assert torch.equal(got.video, expected.video)
            if expected.action is None:
                assert got.action is None
            else:
                assert got.action is not None
                assert torch.equal(got.action, expected.action)


@pytest.mark.parametrize("degree", [1, 3])
def test_there_are_two_ranks(degree: int) -> None:
    class Ranks:
        rank = 0

        def __init__(self) -> None:
            self.degree = degree

        def gather(self, x: torch.Tensor) -> torch.Tensor:
            return x

    model: Any = tiny_model()
    with pytest.raises(ConfigurationError) as caught:
        SplitGuidedModel(PagedModel(model, Life("float32", 1.0, None).kv), model, scale=5.0, ranks=Ranks())
    assert caught.value.field == "cfg_parallel"


def test_one_process_and_two_ranks_run_the_same_way() -> None:
    public = {name for name in dir(GuidedModel) if not name.startswith("_")}
    assert public == {name for name in dir(SplitGuidedModel) if not name.startswith("_")}
