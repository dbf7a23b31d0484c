"""The arithmetic of windows, slots, scratch ranges and a forward's row over random sizes, against plain lists."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import PoolExhaustedError
from contracts.kv_spec import ARDiffusionKVBranchSpec
from gpu_worker.kv.block_table import KVRequestAdapter, slot_indices
from gpu_worker.kv.metadata import PagedMetadata, page_runs
from gpu_worker.kv.window import SlidingWindow
from support.geometries import slots
from support.kv_cache import CPU, make_cache, tiny_spec

CHUNK = st.integers(1, 64)
PAGES = st.lists(st.integers(1, 40), unique=True, max_size=24)


@given(
    chunk=CHUNK,
    window=st.integers(1, 12),
    sink=st.integers(0, 6),
    boundary=st.booleans(),
    tokens=st.integers(0, 4000),
)
def test_skipped_tokens_are_the_whole_frames_that_nothing_needs(
    chunk: int, window: int, sink: int, boundary: bool, tokens: int
) -> None:
    skipped = SlidingWindow(chunk, window, window * chunk, sink, boundary).skipped_tokens(tokens)
    first_kept = tokens if boundary else tokens - window * chunk  # tokens before it are behind the window
    droppable = [frame for frame in range(sink, tokens // chunk) if (frame + 1) * chunk <= first_kept]
    assert skipped == len(droppable) * chunk


@given(window=st.integers(1, 12), sink=st.integers(0, 6), pages=PAGES)
def test_visible_pages_are_the_sink_and_the_last_ones_each_once(
    window: int, sink: int, pages: list[int]
) -> None:
    seen = SlidingWindow(4, window, 4 * window, sink).visible(pages)
    expected = [page for i, page in enumerate(pages) if i < sink or i >= len(pages) - window]
    assert seen == expected


@given(pages=st.lists(st.integers(1, 50), min_size=1, max_size=10), size=CHUNK, data=st.data())
def test_a_slot_is_found_by_page_and_offset(pages: list[int], size: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(pages) * size))
    count = data.draw(st.integers(0, len(pages) * size - start))
    every = [page * size + offset for page in pages for offset in range(size)]
    assert slot_indices(pages, start, count, size) == every[start : start + count]


@given(pages=PAGES)
def test_runs_are_the_pages_in_order_and_as_few_as_can_be(pages: list[int]) -> None:
    runs = page_runs(pages)
    assert [page for first, count in runs for page in range(first, first + count)] == pages
    assert len(runs) == len(pages) - sum(later == page + 1 for page, later in itertools.pairwise(pages))


@given(chunk=CHUNK, prefill=st.integers(0, 100), steps=st.lists(st.booleans(), max_size=40))
def test_absolute_equals_computed_plus_compacted(chunk: int, prefill: int, steps: list[bool]) -> None:
    adapter = KVRequestAdapter("r", 0, chunk, prefill_tokens=prefill)
    committed, pages = 0, 0
    for drops in steps:
        if drops and len(adapter.table) > 0:
            pages += len(adapter.compact(0, chunk))
        else:
            adapter.table.append([committed + 1])
            adapter.advance()
            committed += 1
    assert adapter.absolute_tokens == prefill + committed * chunk
    assert adapter.num_computed_tokens == adapter.absolute_tokens - pages * chunk
    assert adapter.num_tokens == adapter.num_computed_tokens + chunk


@given(used=slots(), frames=st.integers(1, 4), extra=st.integers(0, 40), data=st.data())
def test_scratch_ranges_lie_behind_the_managed_pages_and_never_overlap(
    used: tuple[int, ...], frames: int, extra: int, data: st.DataObject
) -> None:
    spec = tiny_spec(
        kv_branches=tuple(ARDiffusionKVBranchSpec(str(n), slot) for n, slot in enumerate(used)),
        frames_per_block=frames,
        max_scratch_tokens_per_branch=extra,
    )
    cache = make_cache(spec)
    per_branch = frames + -(-extra // 16)
    ranges = [cache.scratch_block_ids(slot, 0, per_branch) for slot in sorted(set(used))]
    flat = [block for ids in ranges for block in ids]
    assert flat == list(range(cache.plan.num_blocks, cache.plan.total_blocks))
    slot = data.draw(st.sampled_from(used))
    start, count = data.draw(st.integers(0, per_branch)), data.draw(st.integers(0, per_branch + 1))
    if start + count <= per_branch:
        assert cache.scratch_block_ids(slot, start, count) == ranges[slot][start : start + count]
    else:
        with pytest.raises(PoolExhaustedError, match="scratch blocks exhausted"):
            cache.scratch_block_ids(slot, start, count)


@given(
    pages=st.lists(st.integers(1, 60), unique=True, min_size=1, max_size=12),
    size=st.integers(1, 20),
    extra_tokens=st.integers(0, 30),
    spare=st.integers(0, 5),
    data=st.data(),
)
def test_the_row_that_kernels_get(
    pages: list[int], size: int, extra_tokens: int, spare: int, data: st.DataObject
) -> None:
    current = pages[-data.draw(st.integers(1, len(pages))) :]
    extra = list(range(100, 100 + -(-extra_tokens // size)))
    retained = len(pages) + spare
    metadata = PagedMetadata(
        visible=pages,
        current=current,
        extra=extra,
        extra_tokens=extra_tokens,
        block_size=size,
        retained_blocks=retained,
        device=CPU,
    )
    row = metadata.block_table.tolist()
    width = retained + max(1, -(-extra_tokens // size))
    assert row == [[*pages, *extra, *[0] * (width - len(pages) - len(extra))]]
    assert metadata.max_seq_len == retained * size + max(1, -(-extra_tokens // size)) * size
    assert metadata.seq_lens.tolist() == [len(pages) * size + extra_tokens]
    assert metadata.query_start_loc.tolist() == [0, len(current) * size + extra_tokens]
    assert metadata.slot_mapping.tolist() == [page * size + i for page in current for i in range(size)]
    assert metadata.extra_slots.tolist() == [100 * size + i for i in range(extra_tokens)]
    assert metadata.block_table is metadata.block_table, "made once for all layers"
