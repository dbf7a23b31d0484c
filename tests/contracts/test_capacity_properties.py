"""Every formula of the memory plan over random geometries, against plain sums."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.capacity import (
    MemoryModel,
    compute_num_blocks,
    cross_attention_bytes_per_session,
    page_bytes,
    plan_capacity,
    scratch_blocks_per_branch,
)
from contracts.errors import CapacityError
from contracts.kv_spec import resolve_kv_config
from support.geometries import geometries, spec_of
from support.plain_plan import PlainGeometry

SESSIONS = st.integers(1, 80)


def model_of(plain: PlainGeometry) -> MemoryModel:
    spec = spec_of(plain)
    return MemoryModel.of(
        spec,
        resolve_kv_config(spec),
        itemsize=plain.itemsize,
        scratch_blocks_minimum=plain.scratch_minimum,
    )


@given(plain=geometries())
def test_the_bytes_of_a_page(plain: PlainGeometry) -> None:
    assert page_bytes(spec_of(plain), plain.itemsize) == plain.page()


@given(plain=geometries())
def test_scratch_pages(plain: PlainGeometry) -> None:
    slots = len(set(plain.slots))
    assert scratch_blocks_per_branch(spec_of(plain), plain.scratch_minimum) * slots == plain.scratch_blocks()
    assert model_of(plain).scratch_blocks == plain.scratch_blocks()


@given(plain=geometries(), sessions=SESSIONS)
def test_managed_pages(plain: PlainGeometry, sessions: int) -> None:
    assert model_of(plain).managed_blocks(sessions) == plain.managed_blocks(sessions)


@given(plain=geometries())
def test_cross_attention_bytes(plain: PlainGeometry) -> None:
    assert cross_attention_bytes_per_session(spec_of(plain), plain.itemsize) == plain.cross_bytes()


@given(plain=geometries(), sessions=SESSIONS)
def test_required_bytes(plain: PlainGeometry, sessions: int) -> None:
    assert model_of(plain).required_bytes(sessions) == plain.required(sessions)


@given(
    plain=geometries(),
    share=st.fractions(min_value=Fraction(1, 4), max_value=40),
    fraction=st.floats(0.001, 1),
    wanted=st.integers(1, 80),
)
def test_budget_capacity_and_pages_of_a_plan(
    plain: PlainGeometry, share: Fraction, fraction: float, wanted: int
) -> None:
    available = int(plain.required(1) * share)
    spec = spec_of(plain)
    arguments = {
        "available_bytes": available,
        "itemsize": plain.itemsize,
        "requested_capacity": wanted,
        "scratch_blocks_minimum": plain.scratch_minimum,
    }
    config = resolve_kv_config(spec, {"gpu_memory_fraction": fraction})
    if plain.required(1) > available:
        with pytest.raises(CapacityError) as caught:
            plan_capacity(spec, config, **arguments)
        assert f"available={available} bytes, required={plain.required(1)} bytes" in str(caught.value)
        return
    plan = plan_capacity(spec, config, **arguments)
    assert plan.configured_bytes == int(available * fraction)
    assert plan.budget_bytes == plain.budget(available, fraction)
    assert plan.capacity == plain.capacity(available, fraction, wanted)
    assert plan.managed_blocks == plain.managed_blocks(plan.capacity)
    assert plan.num_blocks == plain.allocated_blocks(available, fraction, wanted)
    assert plan.total_blocks == plan.num_blocks + plain.scratch_blocks()
    assert plan.managed_blocks <= plan.num_blocks
    assert plan.planned_bytes <= plan.budget_bytes


@given(available=st.integers(-(10**12), 10**12), fraction=st.floats(0.001, 1), page=st.integers(1, 10**10))
def test_whole_pages_in_a_share(available: int, fraction: float, page: int) -> None:
    blocks = compute_num_blocks(available, fraction, page)
    share = max(0, int(available * fraction))
    assert blocks * page <= share < (blocks + 1) * page
