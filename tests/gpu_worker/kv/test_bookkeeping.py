"""The book-keeping of a chunk costs the device nothing and does not grow: not with layers, not with the session."""

import gc
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_worker.kv.state import ARDiffusionKVState
from support.kv_cache import cache_of, make_state, tiny_spec

KV_FOLDER = str(Path(sys.modules[ARDiffusionKVState.__module__].__file__ or "").parent)
FRAMES = 3
STEADY = 10
"""Chunks after which sink and window are full."""


def new_state(layers: int = 4) -> ARDiffusionKVState:
    return make_state(
        tiny_spec(num_layers=layers, frames_per_block=FRAMES, window_frames=6, sink_frames=3), spare_pages=9
    )


def book_keeping(state: ARDiffusionKVState, chunks: int) -> None:
    """All of `chunks` chunks but attention: four probes and a commit each, with what that evicts."""
    for _ in range(chunks):
        for commit in (False, False, False, False, True):
            state.get_kv_caches("main", seq_len=FRAMES * 16, commit_current=commit)
            state.prepare_paged_context("main")
            state.commit_paged_context("main")


class CountingOperators(TorchDispatchMode):
    """Counts every operator that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def python_calls(function: Callable[[], None]) -> int:
    """Calls of Python functions and builtins while `function` runs."""
    count = 0

    def profile(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event in {"call", "c_call"}

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_a_chunk_runs_no_operator_and_so_allocates_no_tensor() -> None:
    state = new_state()
    book_keeping(state, STEADY)
    with CountingOperators() as counting:
        book_keeping(state, 50)
        torch.zeros(1)
    assert counting.calls == {"aten.zeros.default": 1}, "nothing but what proves that the counting works"


def test_reading_and_writing_takes_one_copy_a_run() -> None:
    state = new_state(layers=1)
    book_keeping(state, STEADY)
    tokens = torch.zeros(1, FRAMES * 16, 1, 1)
    (handle,) = state.get_kv_caches("main", seq_len=FRAMES * 16, commit_current=True)
    metadata = state.prepare_paged_context("main").metadata
    with CountingOperators() as counting:
        handle.write_and_attend(tokens, tokens, tokens)
    assert counting.calls["aten.copy_.default"] == 2 * len(metadata.write_runs)
    assert counting.calls["aten.cat.default"] == (2 if len(metadata.read_runs) > 1 else 0)
    assert not [name for name in counting.calls if "index" in name]


def test_book_keeping_keeps_no_memory() -> None:
    state = new_state()
    book_keeping(state, STEADY)
    folder = tracemalloc.Filter(inclusive=True, filename_pattern=f"{KV_FOLDER}/*")

    def held() -> int:
        gc.collect()
        snapshot = tracemalloc.take_snapshot().filter_traces([folder])
        return sum(trace.size for trace in snapshot.traces)

    tracemalloc.start()
    try:
        book_keeping(state, 30)
        early = held()
        book_keeping(state, 300)
        late = held()
    finally:
        tracemalloc.stop()
    assert 0 < late <= early + 64, "a counter may have become a longer integer, nothing else"


def test_a_chunk_takes_the_same_steps_whatever_the_number_of_layers() -> None:
    counts = []
    for layers in (1, 80):
        state = new_state(layers)
        book_keeping(state, STEADY)
        counts.append(python_calls(lambda state=state: book_keeping(state, 3)))  # type: ignore[misc]
    assert counts[0] == counts[1] > 0


def test_a_chunk_takes_the_same_steps_however_long_the_session() -> None:
    state = new_state(1)
    book_keeping(state, STEADY)
    early = python_calls(lambda: book_keeping(state, 3))
    adapter = state.adapter("main")
    for _ in range(10_000 - STEADY - 3):
        cache_of(state).allocate(adapter, FRAMES * 16)
        for _ in range(FRAMES):
            cache_of(state).commit_chunk(adapter)
    assert adapter.absolute_frames == 30_000
    assert python_calls(lambda: book_keeping(state, 3)) == early
    assert len(adapter.table) == 9


@pytest.mark.parametrize("attribute", ["slot_mapping", "block_table", "seq_lens", "query_start_loc"])
def test_what_a_kernel_asks_for_is_made_once_for_all_layers(attribute: str) -> None:
    state = new_state()
    handles = state.get_kv_caches("main", seq_len=FRAMES * 16)
    state.prepare_paged_context("main")
    first, *others = [getattr(handle.metadata, attribute) for handle in handles]
    assert all(other is first for other in others)
