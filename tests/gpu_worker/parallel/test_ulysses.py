"""Ranks that share every sequence make what one process makes, with the bytes and the exchanges that are planned."""

import random

import numpy as np
import pytest

from support.lingbot_ranks import ThreadRank, on_ranks
from support.rank_processes import RankProcesses
from support.rank_rollouts import Geometry, life, many, mixed_timesteps

PUBLISHED = Geometry(heads=8, head_dim=32, layers=2, rows=32, columns=32)
"""The size that the tolerances were published for."""

TINY = Geometry(heads=4, head_dim=12, layers=2, rows=4, columns=4)
"""4 tokens a frame, 12 a block: with 2 and with 4 ranks a share ends within a frame."""

LIMITS = {"float32": 1e-5, "bfloat16": 1e-2}


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


# ---------------------------------------------------------------------------------------------------- exchanges


@pytest.mark.parametrize("batch", [1, 2])
def test_tokens_of_all_heads_become_all_tokens_of_some_heads_and_back(
    ranks: RankProcesses, batch: int
) -> None:
    found = ranks.run("support.rank_rollouts:exchanges", batch=batch)

    degree = len(found)
    for rank, made in enumerate(found):
        whole = made["whole"]
        tokens = np.split(whole, degree, axis=1)[rank]
        assert np.array_equal(made["mine"], tokens)
        assert np.array_equal(made["by_heads"], np.split(whole, degree, axis=3)[rank])
        assert np.array_equal(made["back"], tokens[:, :, 0])
        assert np.array_equal(made["gathered"], whole[:, :, 0, 0])


# ---------------------------------------------------------------------------------------------------- equal results


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_equal_one_process_over_rolling_window_prompt_switch_and_reset(
    two_ranks: RankProcesses, dtype: str
) -> None:
    geometry = Geometry(**{**vars(PUBLISHED), "dtype": dtype})
    expected = life(None, geometry)["flows"]

    for made in two_ranks.run("support.rank_rollouts:life", geometry=geometry):
        assert len(made["flows"]) == len(expected) == 15
        assert max(map(distance, made["flows"], expected)) <= LIMITS[dtype]
    assert distance(expected[0], expected[9]) > 0.1, "blocks differ"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_four_ranks_equal_one_process_at_a_size_where_shares_split_frames(
    four_ranks: RankProcesses, dtype: str
) -> None:
    geometry = Geometry(**{**vars(TINY), "dtype": dtype})
    expected = life(None, geometry)["flows"]

    for made in four_ranks.run("support.rank_rollouts:life", geometry=geometry):
        assert max(map(distance, made["flows"], expected)) <= LIMITS[dtype]


@pytest.mark.parametrize(
    "geometry",
    [
        pytest.param(TINY, id="4 x 4"),
        pytest.param(Geometry(heads=4, head_dim=12, layers=1, rows=4, columns=12), id="4 x 12"),
        pytest.param(Geometry(heads=4, head_dim=10, layers=1, rows=12, columns=8), id="12 x 8"),
        pytest.param(Geometry(heads=12, head_dim=4, layers=1, rows=8, columns=10), id="8 x 10"),
    ],
)
def test_a_frame_that_is_split_keeps_its_own_noise_level(ranks: RankProcesses, geometry: Geometry) -> None:
    expected = mixed_timesteps(None, geometry)

    for made in ranks.run("support.rank_rollouts:mixed_timesteps", geometry=geometry):
        assert max(map(distance, made, expected)) <= 1e-5


def test_odd_sizes_make_what_one_process_makes(ranks: RankProcesses) -> None:
    choose, geometries = random.Random(7), []
    while len(geometries) < 10:
        rows, columns = 2 * choose.randint(1, 7), 2 * choose.randint(1, 7)
        if 3 * rows * columns // 4 % ranks.degree == 0:
            heads, head_dim = ranks.degree * choose.randint(1, 3), 2 * choose.randint(3, 9)
            geometries.append(Geometry(heads, head_dim, 1, rows, columns))
    expected = many(None, geometries)

    for made in ranks.run("support.rank_rollouts:many", geometries=geometries):
        for geometry, flows, alone in zip(geometries, made, expected, strict=True):
            assert max(map(distance, flows, alone)) <= 1e-5, geometry


def test_all_ranks_make_the_same_bit_for_bit(ranks: RankProcesses) -> None:
    first, *others = ranks.run("support.rank_rollouts:life", geometry=TINY)

    for made in others:
        assert all(map(np.array_equal, made["flows"], first["flows"]))


# ---------------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("geometry", [TINY, Geometry(heads=8, head_dim=4, layers=3, rows=8, columns=10)])
def test_each_rank_holds_the_kv_bytes_of_its_heads(ranks: RankProcesses, geometry: Geometry) -> None:
    made = ranks.run("support.rank_rollouts:life", geometry=geometry)

    degree, frame_tokens = len(made), geometry.rows * geometry.columns // 4
    # One session: 1 sink and 6 recent frames, 3 in flight, 2 to spare, 3 of scratch; K and V, float32.
    per_token = 2 * (geometry.heads // degree) * geometry.head_dim * 4 * geometry.layers
    expected = (7 + 3 + 2 + 3) * frame_tokens * per_token + 6 * per_token
    for found in made:
        assert found["kv_bytes"] == found["planned_bytes"] == expected


def test_each_rank_keeps_the_camera_of_its_own_tokens(ranks: RankProcesses) -> None:
    for found in ranks.run("support.rank_rollouts:life", geometry=TINY):
        expected = 2 * TINY.layers * (12 // ranks.degree) * 48 * 4
        assert found["camera_bytes"] == found["planned_camera_bytes"] == expected


def test_text_kv_is_the_rank_s_slice_of_the_heads_compact_and_contiguous(ranks: RankProcesses) -> None:
    whole = life(None, TINY)["text"]

    made = ranks.run("support.rank_rollouts:life", geometry=TINY)

    for rank, found in enumerate(made):
        assert found["compact"]
        for layer, pair in enumerate(found["text"]):
            for value, expected in zip(pair, whole[layer], strict=True):
                assert np.array_equal(value, np.split(expected, len(made), axis=2)[rank])


# ---------------------------------------------------------------------------------------------------- exchanges


@pytest.mark.parametrize("layers", [1, 3])
def test_a_layer_exchanges_four_times_and_nothing_else_crosses_ranks(
    ranks: RankProcesses, layers: int
) -> None:
    geometry = Geometry(**{**vars(TINY), "layers": layers})

    for found in ranks.run("support.rank_rollouts:collectives", geometry=geometry):
        assert found["prompt"] == {}
        assert found["forward"] == {"alltoall_base_": 4 * layers, "allgather_": 1}
        assert found["chunk"] == {"alltoall_base_": 5 * 4 * layers, "allgather_": 5}
        assert found["own"] == {"all_to_all": 4 * layers, "all_gather": 1}


def test_modulation_that_is_expanded_to_tokens_changes_no_bit() -> None:
    """One rank that shards like several, against the path that knows no ranks."""
    (shared,) = on_ranks(1, lambda rank: mixed_timesteps(_One(rank), TINY))

    assert all(map(np.array_equal, shared, mixed_timesteps(None, TINY)))


class _One:
    """What a rollout needs of `Ranks`."""

    def __init__(self, rank: ThreadRank) -> None:
        self.ulysses, self.degree = rank, rank.degree


# ---------------------------------------------------------------------------------------------------- refusals


def test_shares_of_different_chunks_are_refused_before_they_mix(ranks: RankProcesses) -> None:
    for kind, message in ranks.run("support.rank_rollouts:misfit", geometry=TINY):
        assert kind == "ShardError"
        assert "SP input hooks" in message


def test_a_block_whose_tokens_the_ranks_cannot_share_is_refused(four_ranks: RankProcesses) -> None:
    geometry = Geometry(heads=4, head_dim=12, layers=1, rows=4, columns=6)  # 18 tokens

    for message, field in four_ranks.run("support.rank_rollouts:unequal", geometry=geometry):
        assert message == "the 18 tokens of a block must be divisible by ulysses_degree 4"
        assert field == "ulysses_degree"
