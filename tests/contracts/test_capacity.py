"""The memory plan: every formula, on tiny and on shipped geometries."""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.capacity import (
    CapacityPlan,
    MemoryModel,
    compute_num_blocks,
    cross_attention_bytes_per_session,
    page_bytes,
    plan_capacity,
    scratch_blocks_per_branch,
)
from contracts.errors import CapacityError, InvalidArgumentError
from contracts.kv_spec import (
    ARDiffusionCrossAttentionKVSpec,
    ARDiffusionKVBranchSpec,
    ARDiffusionKVCacheSpec,
    resolve_kv_config,
)

GIB = 1 << 30
MAIN = (ARDiffusionKVBranchSpec("main", 0),)

TINY = ARDiffusionKVCacheSpec(
    num_layers=1,
    num_kv_heads=1,
    head_size=1,
    tokens_per_frame=1,
    frames_per_block=3,
    window_frames=3,
    sink_frames=3,
    kv_branches=MAIN,
    cross_attention=(ARDiffusionCrossAttentionKVSpec("text", 2),),
    session_capacity=2,
)

LINGBOT = ARDiffusionKVCacheSpec(
    num_layers=40,
    num_kv_heads=40,
    head_size=128,
    tokens_per_frame=1560,
    frames_per_block=3,
    window_frames=9,
    sink_frames=9,
    kv_branches=MAIN,
    cross_attention=(ARDiffusionCrossAttentionKVSpec("text", 512),),
    session_capacity=2,
    model_owned_state_bytes_per_session=7_488_000,
)


def dreamzero(negative_slot: int) -> ARDiffusionKVCacheSpec:
    return ARDiffusionKVCacheSpec(
        num_layers=40,
        num_kv_heads=40,
        head_size=128,
        tokens_per_frame=880,
        frames_per_block=2,
        window_frames=9,
        kv_branches=(
            ARDiffusionKVBranchSpec("positive", 0),
            ARDiffusionKVBranchSpec("negative", negative_slot),
        ),
        cross_attention=(
            ARDiffusionCrossAttentionKVSpec("text", 512),
            ARDiffusionCrossAttentionKVSpec("image", 257),
        ),
        max_scratch_tokens_per_branch=25,
        session_capacity=64,
        model_owned_state_bytes_per_session=632_291_328,
    )


def memory_of(spec: ARDiffusionKVCacheSpec, itemsize: int) -> MemoryModel:
    return MemoryModel.of(spec, resolve_kv_config(spec), itemsize=itemsize)


def plan(spec: ARDiffusionKVCacheSpec, *, fraction: float, itemsize: int, **arguments: Any) -> CapacityPlan:
    config = resolve_kv_config(spec, {"gpu_memory_fraction": fraction})
    return plan_capacity(spec, config, itemsize=itemsize, **arguments)


# ---------------------------------------------------------------------------------------------------- tiny


def test_tiny_required_bytes_by_hand() -> None:
    memory = memory_of(TINY, 4)
    assert memory.page_bytes == 8
    assert memory.managed_blocks(1) == 11
    assert memory.required_bytes(1) == (11 + 3) * 8 + 16 == 128
    assert memory.required_bytes(2) == (17 + 3) * 8 + 32 == 192


def test_tiny_fits_two_sessions_exactly() -> None:
    two = plan(TINY, fraction=1, itemsize=4, available_bytes=192)
    assert (two.capacity, two.managed_blocks, two.num_blocks, two.total_blocks) == (2, 17, 17, 20)
    assert two.planned_bytes == two.required_bytes == 192


def test_one_byte_less_fits_one() -> None:
    one = plan(TINY, fraction=1, itemsize=4, available_bytes=191)
    assert (one.capacity, one.requested_capacity) == (1, 2)
    assert one.num_blocks == (191 - 3 * 8 - 16) // 8 == 18


def test_too_little_memory_names_both_numbers() -> None:
    with pytest.raises(ValueError, match="cannot fit one session") as caught:
        plan(TINY, fraction=1, itemsize=4, available_bytes=127)
    error = caught.value
    assert isinstance(error, CapacityError)
    assert "available=127 bytes" in str(error)
    assert "required=128 bytes" in str(error)
    assert (error.available_bytes, error.required_bytes) == (127, 128)


# ---------------------------------------------------------------------------------------------------- shipped


def test_lingbot_at_the_default_fraction_admits_one_session_beyond_its_budget() -> None:
    shipped = plan(LINGBOT, fraction=0.1, itemsize=2, available_bytes=100 * GIB)
    assert shipped.memory.page_bytes == 1_277_952_000
    assert shipped.memory.scratch_blocks == 3
    assert shipped.memory.managed_blocks(1) == 23
    assert shipped.memory.cross_bytes_per_session == 419_430_400
    assert shipped.memory.required_bytes(1) == 33_653_670_400
    assert shipped.configured_bytes == 10_737_418_240
    assert shipped.budget_bytes == 33_653_670_400
    assert shipped.capacity == 1


def test_lingbot_at_a_tuned_fraction_admits_two() -> None:
    tuned = plan(LINGBOT, fraction=0.6, itemsize=2, available_bytes=100 * GIB)
    assert tuned.budget_bytes == 64_424_509_440
    assert tuned.memory.required_bytes(2) == 57_083_724_800
    assert tuned.capacity == 2


@pytest.mark.parametrize(
    ("negative_slot", "one", "two"),
    [
        pytest.param(1, 23_519_100_928, 38_387_449_856, id="two local slots"),
        pytest.param(0, 13_426_556_928, 21_806_841_856, id="CFG in parallel, one slot"),
    ],
)
def test_dreamzero_counts_local_slots_for_pages_and_logical_branches_for_cross_attention(
    negative_slot: int, one: int, two: int
) -> None:
    memory = memory_of(dreamzero(negative_slot), 2)
    assert memory.page_bytes == 720_896_000
    assert memory.scratch_blocks_per_branch == 3
    assert memory.cross_bytes_per_session == 1_259_929_600
    assert (memory.required_bytes(1), memory.required_bytes(2)) == (one, two)


# ---------------------------------------------------------------------------------------------------- terms


def test_scratch_covers_the_tick_in_flight_and_its_extra_tokens() -> None:
    spec = replace(TINY, tokens_per_frame=16, frames_per_block=6, max_scratch_tokens_per_branch=17)
    assert scratch_blocks_per_branch(spec) == 8
    assert scratch_blocks_per_branch(spec, 0) == 8
    assert scratch_blocks_per_branch(spec, 1) == 8
    assert scratch_blocks_per_branch(spec, 11) == 11


@pytest.mark.parametrize("value", [-1, 1.5, True, "3"])
def test_the_scratch_setting_is_a_number_of_pages(value: Any) -> None:
    with pytest.raises(ValueError, match="AR_DIFFUSION_KV_SCRATCH_BLOCKS_PER_BRANCH"):
        scratch_blocks_per_branch(TINY, value)


def test_cross_attention_may_have_its_own_number_of_heads() -> None:
    own = replace(TINY, num_kv_heads=8, cross_attention=(ARDiffusionCrossAttentionKVSpec("text", 2, 3),))
    assert cross_attention_bytes_per_session(own, 4) == 2 * 1 * 2 * 3 * 1 * 4 * 1


def test_an_override_of_window_and_sink_changes_the_pages() -> None:
    config = resolve_kv_config(TINY, {"window_chunks": 5, "sink_chunks": 0})
    memory = MemoryModel.of(TINY, config, itemsize=4)
    assert memory.managed_blocks(2) == 1 * (2 * 5 + 3) + 2


def test_staging_costs_one_window_a_local_branch() -> None:
    config = resolve_kv_config(TINY, {"reuse_history_staging": True})
    staged = MemoryModel.of(TINY, config, itemsize=4)
    assert staged.required_bytes(1) == 128 + 6 * 8


def test_number_of_blocks_in_a_share_of_the_memory() -> None:
    assert compute_num_blocks(1 << 20, 0.5, 16 << 10) == 32
    assert compute_num_blocks((1 << 20) - 1, 0.5, 16 << 10) == 31
    assert compute_num_blocks(100, 0.5, 51) == 0
    assert compute_num_blocks(-100, 0.5, 51) == 0


@pytest.mark.parametrize(
    ("fraction", "page", "field"),
    [(0, 1, "gpu_memory_fraction"), (1.1, 1, "gpu_memory_fraction"), (0.5, 0, "page_size_bytes")],
)
def test_number_of_blocks_refuses_what_makes_no_sense(fraction: float, page: int, field: str) -> None:
    with pytest.raises(InvalidArgumentError, match=field):
        compute_num_blocks(100, fraction, page)


def test_a_requested_capacity_is_bounded_by_the_models_cap() -> None:
    assert plan(TINY, fraction=1, itemsize=4, available_bytes=10_000).capacity == 2
    assert plan(TINY, fraction=1, itemsize=4, available_bytes=10_000, requested_capacity=1).capacity == 1
    assert plan(TINY, fraction=1, itemsize=4, available_bytes=10_000, requested_capacity=9).capacity == 2
    for wrong in (0, True, 1.5, "2"):
        with pytest.raises(InvalidArgumentError, match="session_capacity"):
            plan(TINY, fraction=1, itemsize=4, available_bytes=10_000, requested_capacity=wrong)  # type: ignore[arg-type]


def test_element_size_must_be_positive() -> None:
    with pytest.raises(InvalidArgumentError, match="itemsize"):
        page_bytes(TINY, 0)


# ---------------------------------------------------------------------------------------------------- properties


@given(
    available=st.integers(128, 20_000),
    fraction=st.floats(0.01, 1),
    cap=st.integers(1, 50),
    owned=st.integers(0, 40),
)
def test_capacity_is_the_largest_that_fits_and_the_rest_becomes_pages(
    available: int, fraction: float, cap: int, owned: int
) -> None:
    spec = replace(TINY, session_capacity=cap, model_owned_state_bytes_per_session=owned)
    required = memory_of(spec, 4).required_bytes
    if required(1) > available:
        with pytest.raises(CapacityError):
            plan(spec, fraction=fraction, itemsize=4, available_bytes=available)
        return
    found = plan(spec, fraction=fraction, itemsize=4, available_bytes=available)
    budget = max(int(available * fraction), required(1))
    assert found.budget_bytes == budget
    assert found.capacity == max(c for c in range(1, cap + 1) if required(c) <= budget)
    assert found.managed_blocks <= found.num_blocks
    assert 0 <= budget - found.planned_bytes < found.memory.page_bytes


def test_planning_loads_no_torch() -> None:
    code = "import sys, contracts.capacity; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("available", [2**53 + 3, 2**63 - 1])
def test_rounding_makes_no_budget_larger_than_what_is_there(available: int) -> None:
    found = plan(TINY, fraction=1, itemsize=4, available_bytes=available)
    assert int(available * 1.0) > available, "or there is nothing to test"
    assert found.configured_bytes == found.budget_bytes == available
    assert found.planned_bytes <= available
    assert compute_num_blocks(available, 1.0, 1) == available


@pytest.mark.parametrize(
    "available", [10**400, 2**63, 1e9, "1GB", True, None], ids=lambda value: f"{value!r:.9}"
)
def test_available_memory_is_a_number_of_bytes_that_a_device_can_have(available: object) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        plan(TINY, fraction=1, itemsize=4, available_bytes=available)  # type: ignore[arg-type]
    assert caught.value.field == "available_bytes"
