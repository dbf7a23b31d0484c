"""Commit and eviction over long rollouts: what stays, where, and that nothing leaks."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from contracts.errors import InvalidArgumentError, KVStateError, PoolExhaustedError
from contracts.kv_spec import ARDiffusionKVBranchSpec, resolve_kv_config
from gpu_worker.kv.block_table import KVRequestAdapter, slot_indices
from gpu_worker.kv.cache import ARDiffusionKVCache
from support.kv_cache import CPU, make_cache, make_state, resident_frames, tiny_spec, write_positions


@pytest.mark.parametrize("reset_at_boundary", [False, True])
@pytest.mark.parametrize("sink", [0, 2])
@pytest.mark.parametrize(
    ("frames", "block", "calls"), [(1, 16, 1000), (3, 16, 1000), (1, 1560, 241), (3, 1560, 241)]
)
def test_a_long_rollout_keeps_the_sink_and_the_last_frames(
    frames: int, block: int, calls: int, sink: int, reset_at_boundary: bool
) -> None:
    spec = tiny_spec(
        tokens_per_frame=block,
        frames_per_block=frames,
        window_frames=3,
        sink_frames=sink,
        max_model_len=113,
        reset_at_boundary=reset_at_boundary,
    )
    cache = make_cache(spec)
    free_at_first = cache.pool.num_free
    adapter = cache.begin_request("r", 0)
    retained = sink + (0 if reset_at_boundary else 3)

    for call in range(1, calls + 1):
        cache.allocate(adapter, frames * block)
        assert len(adapter.table) <= retained + frames
        write_positions(cache, adapter, frames)
        for _ in range(frames):
            cache.commit_chunk(adapter)

        done = call * frames
        expected = list(range(min(sink, done)))
        if not reset_at_boundary:
            expected += range(max(sink, done - 3), done)
        assert resident_frames(cache, adapter) == expected
        assert len(adapter.table) <= retained
        assert adapter.absolute_tokens == done * block
    cache.check_integrity()

    assert adapter.absolute_tokens > spec.max_model_len
    cache.reset_request(adapter)
    assert (adapter.absolute_tokens, adapter.num_computed_tokens, adapter.compacted_tokens) == (0, 0, 0)
    assert cache.pool.num_free == free_at_first


def test_ten_frames_through_a_window_of_two() -> None:
    cache = make_cache(tiny_spec())
    free_at_first = cache.pool.num_free
    adapter = cache.begin_request("r", 0)
    free_counts = []
    for _ in range(10):
        cache.allocate(adapter, 16)
        start = adapter.num_computed_tokens
        slots = slot_indices(adapter.table.ids, start, 16, 16)
        assert len(slots) == 16
        assert min(slots) >= 16, "the null page was written"
        assert len(adapter.table) <= 3
        cache.commit_chunk(adapter)
        assert len(adapter.table) <= 2
        free_counts.append(cache.pool.num_free)
    assert free_counts[2:] == [free_at_first - 2] * 8
    cache.end_request(adapter)
    assert cache.pool.num_free == free_at_first


def test_freed_pages_are_those_behind_the_sink_in_table_order() -> None:
    cache = make_cache(tiny_spec(sink_frames=1))
    adapter = cache.begin_request("r", 0)
    tables = []
    for _ in range(5):
        cache.allocate(adapter, 16)
        cache.commit_chunk(adapter)
        tables.append(adapter.table.ids)
    assert tables == [(1,), (1, 2), (1, 2, 3), (1, 3, 4), (1, 4, 2)]


def test_a_commit_of_several_frames_allocates_its_full_span_before_it_drops_anything() -> None:
    cache = make_cache(tiny_spec(frames_per_block=3, window_frames=3, sink_frames=3))
    adapter = cache.begin_request("r", 0)
    for _ in range(3):
        cache.allocate(adapter, 48)
        for _ in range(3):
            cache.commit_chunk(adapter)
    cache.allocate(adapter, 48)
    assert len(adapter.table) == 9
    assert cache.pool.num_free == 1  # of 11 pages: the null page, 6 retained, 3 in flight, one spare


def test_two_full_sessions_and_a_third_tick_in_flight_fit() -> None:
    spec = tiny_spec(frames_per_block=3, window_frames=3, sink_frames=3, session_capacity=2)
    cache = make_cache(spec)
    assert cache.plan.num_blocks == 17
    adapters = [cache.begin_request(name, 0) for name in "ab"]
    for adapter in adapters:
        for _ in range(4):
            cache.allocate(adapter, 48)
            for _ in range(3):
                cache.commit_chunk(adapter)
    assert [len(adapter.table) for adapter in adapters] == [6, 6]
    third = cache.begin_request("c", 0)
    cache.allocate(third, 48)
    assert len(third.table) == 3
    cache.check_integrity()


def test_compaction_is_per_timeline() -> None:
    cache = make_cache(tiny_spec(session_capacity=2))
    a, b = cache.begin_request("a", 0), cache.begin_request("b", 0)
    for adapter, frames in ((a, 4), (b, 2), (a, 4)):
        for _ in range(frames):
            cache.allocate(adapter, 16)
            cache.commit_chunk(adapter)
    assert (a.absolute_tokens, a.compacted_tokens, a.num_computed_tokens) == (128, 96, 32)
    assert (b.absolute_tokens, b.compacted_tokens, b.num_computed_tokens) == (32, 0, 32)
    assert set(a.table.ids).isdisjoint(b.table.ids)
    cache.check_integrity()


def test_an_exhausted_pool_is_a_typed_error_and_loses_no_page() -> None:
    cache = make_cache(tiny_spec())
    adapters = [cache.begin_request(name, 0) for name in "abc"]
    for adapter in adapters[:2]:
        for _ in range(2):
            cache.allocate(adapter, 16)
            cache.commit_chunk(adapter)
    with pytest.raises(RuntimeError, match="pool exhausted") as caught:
        cache.allocate(adapters[2], 16)
    assert isinstance(caught.value, PoolExhaustedError)
    cache.check_integrity()
    for adapter in adapters:
        cache.end_request(adapter)
    assert cache.pool.num_free == cache.pool.num_usable


def test_a_frame_that_was_never_allocated_cannot_be_committed() -> None:
    cache = make_cache(tiny_spec())
    adapter = cache.begin_request("r", 0)
    with pytest.raises(KVStateError, match="never allocated"):
        cache.commit_chunk(adapter)
    assert adapter.absolute_tokens == 0


def test_a_timeline_begins_once_and_ends_once() -> None:
    cache = make_cache(tiny_spec())
    adapter = cache.begin_request("r", 0)
    with pytest.raises(KVStateError, match="exists already"):
        cache.begin_request("r", 0)
    with pytest.raises(InvalidArgumentError, match="local_index"):
        cache.begin_request("other", 1)
    cache.end_request(adapter)
    newer = cache.begin_request("r", 0)
    cache.end_request(adapter)  # the old one again: it must not end its successor
    assert cache.request_ids == ("r",)
    cache.end_request(newer)
    assert cache.request_ids == ()


def test_integrity_finds_a_page_that_left_its_table() -> None:
    cache = make_cache(tiny_spec())
    adapter = cache.begin_request("r", 0)
    cache.allocate(adapter, 16)
    cache.check_integrity()
    adapter.table.clear()
    with pytest.raises(KVStateError, match="in use"):
        cache.check_integrity()


def test_integrity_finds_a_timeline_that_holds_too_much_and_a_null_page() -> None:
    cache = make_cache(tiny_spec(), spare_pages=10)
    adapter = cache.begin_request("r", 0)
    cache.allocate(adapter, 16 * 4)
    with pytest.raises(KVStateError, match="limit 3"):
        cache.check_integrity()
    cache.reset_request(adapter)
    adapter.table.append([0])
    with pytest.raises(KVStateError, match="null page"):
        cache.check_integrity()


# ---------------------------------------------------------------------------------------------------- memory


def test_k_and_v_of_each_layer_are_separate_and_the_flat_view_is_the_same_memory() -> None:
    cache = make_cache(tiny_spec(num_layers=2, num_kv_heads=3, head_size=4))
    storages = {pages.data_ptr() for pages in (*cache.k_pages, *cache.v_pages)}
    assert len(storages) == 4
    pages = cache.k_pages[0]
    assert tuple(pages.shape) == (cache.plan.total_blocks, 16, 3, 4)
    pages.view(-1, 3, 4)[17] = 5.0
    assert torch.all(pages[1, 1] == 5.0)
    assert torch.all(pages[0] == 0)


def test_allocated_bytes_are_what_the_plan_says() -> None:
    cache = make_cache(tiny_spec(num_layers=2, head_size=4))
    assert cache.allocated_bytes() == cache.plan.planned_bytes
    staged = make_cache(tiny_spec(num_layers=2, head_size=4), kv={"reuse_history_staging": True})
    assert staged.allocated_bytes() == staged.plan.planned_bytes > cache.allocated_bytes()


def test_scratch_lies_behind_the_managed_pages_one_range_a_local_branch() -> None:
    branches = (
        ARDiffusionKVBranchSpec("positive", 0),
        ARDiffusionKVBranchSpec("negative", 1),
        ARDiffusionKVBranchSpec("shared", 0),
    )
    cache = make_cache(tiny_spec(kv_branches=branches, frames_per_block=2, max_scratch_tokens_per_branch=17))
    per_branch = 2 + 2
    managed = cache.plan.num_blocks
    assert cache.scratch_block_ids(0, 0, 3) == [managed, managed + 1, managed + 2]
    assert cache.scratch_block_ids(1, 1, 2) == [managed + per_branch + 1, managed + per_branch + 2]
    assert cache.scratch_block_ids(1, 4, 0) == []
    state = cache.begin_session("s")
    assert state["shared"].local_index == state["positive"].local_index
    assert cache.plan.total_blocks == managed + 2 * per_branch


@pytest.mark.parametrize(("start", "count"), [(-1, 1), (0, -1)])
def test_a_negative_scratch_range_is_refused(start: int, count: int) -> None:
    with pytest.raises(ValueError, match="negative"):
        make_cache(tiny_spec()).scratch_block_ids(0, start, count)


def test_scratch_beyond_its_reservation_is_refused() -> None:
    with pytest.raises(RuntimeError, match="scratch blocks exhausted"):
        make_cache(tiny_spec()).scratch_block_ids(0, 1, 1)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"enable": False}, "enable"),
        ({"window_chunks": None}, "window_chunks"),
        ({"chunk_size": 0}, "chunk_size"),
    ],
)
def test_a_pool_needs_a_config_that_is_complete(change: dict[str, Any], field: str) -> None:
    whole = make_cache(tiny_spec())
    config = replace(resolve_kv_config(whole.spec), **change)
    with pytest.raises(ValueError, match=field):
        ARDiffusionKVCache(whole.spec, config, whole.plan, device=CPU, dtype=torch.float32)


def test_frames_of_a_tick_are_committed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    state = make_state(tiny_spec(frames_per_block=3, window_frames=2))
    seen: list[int] = []
    original = ARDiffusionKVCache.commit_chunk

    def counting(cache: ARDiffusionKVCache, adapter: KVRequestAdapter) -> None:
        original(cache, adapter)
        seen.append(adapter.absolute_frames)

    monkeypatch.setattr(ARDiffusionKVCache, "commit_chunk", counting)
    state.get_kv_caches("main", seq_len=48, commit_current=True)
    state.prepare_paged_context("main")
    state.commit_paged_context("main")
    assert seen == [1, 2, 3]
    assert len(state.adapter("main").table) == 2
