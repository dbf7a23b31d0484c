"""What a forward writes and sees: contexts, their tensors, their order."""

import pytest
import torch

from contracts.errors import InvalidArgumentError, KVStateError
from contracts.kv_spec import ARDiffusionKVBranchSpec
from support.kv_cache import cache_of, make_state, tiny_spec

CFG = (ARDiffusionKVBranchSpec("positive", 0), ARDiffusionKVBranchSpec("negative", 1))


def test_seq_len_is_needed_and_must_be_whole_frames() -> None:
    state = make_state(tiny_spec())
    with pytest.raises(ValueError, match="seq_len"):
        state.get_kv_caches("main")
    for seq_len in (17, 0, -16):
        with pytest.raises(AssertionError, match="frame-aligned"):
            state.get_kv_caches("main", seq_len=seq_len)


def test_a_commit_has_no_more_frames_than_a_tick() -> None:
    state = make_state(tiny_spec(frames_per_block=2))
    state.get_kv_caches("main", seq_len=32, commit_current=True)
    with pytest.raises(InvalidArgumentError, match="seq_len"):
        state.get_kv_caches("main", seq_len=48, commit_current=True)


def test_one_handle_a_layer_over_one_context() -> None:
    state = make_state(tiny_spec(num_layers=3))
    handles = state.get_kv_caches("main", seq_len=16)
    assert [int(handle.layer_idx) for handle in handles] == [0, 1, 2]
    assert all(handle.layer_idx.dim() == 0 and handle.layer_idx.dtype == torch.int64 for handle in handles)
    assert len({id(handle.context) for handle in handles}) == 1
    state.prepare_paged_context("main")
    assert len({id(handle.metadata) for handle in handles}) == 1


def test_nothing_is_allocated_before_prepare() -> None:
    state = make_state(tiny_spec())
    cache = cache_of(state)
    (handle,) = state.get_kv_caches("main", seq_len=16, commit_current=True)
    assert handle.context.slot_mapping is None
    assert cache.pool.num_free == cache.pool.num_usable
    q = torch.zeros(1, 16, 1, 1)
    with pytest.raises(RuntimeError, match="before prepare"):
        handle.write_and_attend(q, q, q)
    state.prepare_paged_context("main")
    assert handle.context.slot_mapping is not None
    assert handle.context.slot_mapping.tolist() == list(range(16, 32))
    assert cache.pool.num_free == cache.pool.num_usable - 1


def test_prepare_is_idempotent_and_needs_a_forward() -> None:
    state = make_state(tiny_spec(max_scratch_tokens_per_branch=3))
    with pytest.raises(KVStateError, match="get_kv_caches first"):
        state.prepare_paged_context("main")
    state.get_kv_caches("main", seq_len=16, commit_current=True)
    context = state.prepare_paged_context("main", extra_tokens=3)
    metadata = context.metadata
    assert state.prepare_paged_context("main", extra_tokens=3).metadata is metadata
    with pytest.raises(KVStateError, match="3 extra tokens"):
        state.prepare_paged_context("main", extra_tokens=2)


def test_a_commit_writes_managed_pages_and_a_probe_writes_scratch() -> None:
    state = make_state(tiny_spec())
    cache = cache_of(state)
    state.get_kv_caches("main", seq_len=16)
    probe = state.prepare_paged_context("main")
    assert list(probe.metadata.page_ids) == cache.scratch_block_ids(0, 0, 1)
    state.get_kv_caches("main", seq_len=16, commit_current=True)
    commit = state.prepare_paged_context("main")
    assert commit.metadata.page_ids == (1,)


def test_probes_change_neither_tables_nor_counters() -> None:
    state = make_state(tiny_spec(frames_per_block=2))
    adapter = state.adapter("main")
    for _ in range(5):
        state.get_kv_caches("main", seq_len=32)
        state.prepare_paged_context("main")
        state.commit_paged_context("main")
    assert (adapter.absolute_tokens, len(adapter.table)) == (0, 0)


def test_a_prepared_commit_must_be_committed_before_the_next_forward() -> None:
    state = make_state(tiny_spec())
    state.get_kv_caches("main", seq_len=16, commit_current=True)
    state.get_kv_caches("main", seq_len=16, commit_current=True)  # nothing was allocated yet
    state.prepare_paged_context("main")
    with pytest.raises(RuntimeError, match="did not happen"):
        state.get_kv_caches("main", seq_len=16)
    state.commit_paged_context("main")
    state.get_kv_caches("main", seq_len=16)


def test_a_commit_that_was_never_prepared_advances_nothing() -> None:
    state = make_state(tiny_spec())
    state.commit_paged_context("main")
    state.get_kv_caches("main", seq_len=16, commit_current=True)
    state.commit_paged_context("main")
    assert state.adapter("main").absolute_tokens == 0


def test_a_commit_advances_by_its_frames() -> None:
    state = make_state(tiny_spec(frames_per_block=3, window_frames=4))
    state.get_kv_caches("main", seq_len=48, commit_current=True)
    assert state.prepare_paged_context("main").start_frame == 0
    state.commit_paged_context("main")
    assert state.adapter("main").absolute_frames == 3


@pytest.mark.parametrize("how", ["commit", "replace", "reset", "close"])
def test_a_context_that_is_over_cannot_be_used(how: str) -> None:
    state = make_state(tiny_spec())
    (handle,) = state.get_kv_caches("main", seq_len=16, commit_current=how == "commit")
    context = state.prepare_paged_context("main")
    q = torch.zeros(1, 16, 1, 1)
    handle.write_and_attend(q, q, q)
    {
        "commit": lambda: state.commit_paged_context("main"),
        "replace": lambda: state.get_kv_caches("main", seq_len=16),
        "reset": state.reset,
        "close": state.close,
    }[how]()
    with pytest.raises(KVStateError, match="is closed" if how == "close" else "over"):
        context.write_and_attend(0, q, q, q)
    with pytest.raises(KVStateError, match="before prepare" if how == "replace" else "over"):
        handle.write_and_attend(q, q, q)


def test_a_branch_allocates_only_when_it_runs() -> None:
    state = make_state(tiny_spec(kv_branches=CFG))
    for branch in ("positive", "negative"):
        state.get_kv_caches(branch, seq_len=16, commit_current=True)
    state.prepare_paged_context("positive")
    assert len(state.adapter("positive").table) == 1
    assert len(state.adapter("negative").table) == 0


def test_the_row_of_a_growing_rollout_keeps_its_width() -> None:
    state = make_state(tiny_spec())
    rows = []
    for _ in range(4):
        state.get_kv_caches("main", seq_len=16, commit_current=True)
        metadata = state.prepare_paged_context("main").metadata
        assert metadata.block_table.dtype == metadata.seq_lens.dtype == torch.int32
        assert (metadata.max_seq_len, metadata.query_start_loc.tolist()) == (48, [0, 16])
        rows.append((metadata.block_table.tolist(), metadata.seq_lens.tolist()))
        state.commit_paged_context("main")
    assert rows == [([[1, 0, 0]], [16]), ([[1, 2, 0]], [32]), ([[2, 3, 0]], [32]), ([[3, 1, 0]], [32])]


def test_extra_tokens_go_to_scratch_behind_the_frames_of_a_probe_and_first_for_a_commit() -> None:
    state = make_state(tiny_spec(max_scratch_tokens_per_branch=20))
    cache = cache_of(state)
    scratch = cache.scratch_block_ids(0, 0, 3)
    state.get_kv_caches("main", seq_len=16)
    probe = state.prepare_paged_context("main", extra_tokens=20).metadata
    assert list(probe.page_ids) == scratch
    assert probe.extra_slots.tolist() == list(range(scratch[1] * 16, scratch[1] * 16 + 20))
    assert (probe.seq_lens.tolist(), probe.max_seq_len) == ([36], 64)
    assert probe.query_start_loc.tolist() == [0, 36]
    assert probe.block_table.tolist() == [[*scratch, 0]]

    state.get_kv_caches("main", seq_len=16, commit_current=True)
    commit = state.prepare_paged_context("main", extra_tokens=20).metadata
    assert commit.page_ids == (1, *scratch[:2])
    assert commit.extra_slots.tolist() == list(range(scratch[0] * 16, scratch[0] * 16 + 20))


def test_more_extra_tokens_than_declared_do_not_fit() -> None:
    state = make_state(tiny_spec(max_scratch_tokens_per_branch=16))
    state.get_kv_caches("main", seq_len=16)
    with pytest.raises(RuntimeError, match="scratch blocks exhausted"):
        state.prepare_paged_context("main", extra_tokens=17)
    with pytest.raises(InvalidArgumentError, match="extra_tokens"):
        state.prepare_paged_context("main", extra_tokens=-1)


def test_a_layer_that_passes_the_wrong_tokens_is_told_which() -> None:
    state = make_state(tiny_spec(max_scratch_tokens_per_branch=16))
    (handle,) = state.get_kv_caches("main", seq_len=16)
    state.prepare_paged_context("main", extra_tokens=2)
    good, extra = torch.zeros(1, 16, 1, 1), torch.zeros(1, 2, 1, 1)
    handle.write_and_attend(good, good, good, extra, extra)
    wrong_calls = {
        "q": (torch.zeros(2, 16, 1, 1), good, good, extra, extra),
        "k": (good, torch.zeros(1, 15, 1, 1), good, extra, extra),
        "v": (good, good, torch.zeros(1, 16, 2, 1), extra, extra),
        "extra_k": (good, good, good, None, None),
        "extra_v": (good, good, good, extra, torch.zeros(1, 3, 1, 1)),
    }
    for field, arguments in wrong_calls.items():
        with pytest.raises(KVStateError, match=field) as caught:
            handle.write_and_attend(*arguments)
        assert caught.value.field == field
