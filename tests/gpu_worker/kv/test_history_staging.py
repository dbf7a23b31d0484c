"""Staged history: when it is reused, what is rewritten, and that it changes no output."""

import pytest
import torch

from contracts.kv_spec import ARDiffusionKVBranchSpec
from gpu_worker.kv.state import ARDiffusionKVState
from support.kv_cache import cache_of, make_state, tiny_spec

BLOCK = 16


def staged_state(**changes: object) -> ARDiffusionKVState:
    spec = tiny_spec(window_frames=3, num_kv_heads=2, head_size=8, max_scratch_tokens_per_branch=2, **changes)
    return make_state(spec, kv={"reuse_history_staging": True})


def forward(
    state: ARDiffusionKVState, *, commit: bool = False, extra: int = 0, attend: bool = True
) -> torch.Tensor:
    (handle,) = state.get_kv_caches("main", seq_len=BLOCK, commit_current=commit)
    state.prepare_paged_context("main", extra_tokens=extra)
    tokens = torch.randn(1, BLOCK, 2, 8)
    extra_tokens = torch.randn(1, extra, 2, 8) if extra else None
    out = handle.write_and_attend(tokens, tokens, tokens, extra_tokens, extra_tokens) if attend else tokens
    state.commit_paged_context("main")
    return out


def staged_layers(state: ARDiffusionKVState) -> frozenset[int]:
    staging = cache_of(state).staging(state.adapter("main"))
    assert staging is not None
    return staging.staged_layers


def test_staging_is_off_by_default() -> None:
    state = make_state(tiny_spec())
    assert cache_of(state).staging(state.adapter("main")) is None


def test_history_is_gathered_once_a_tick() -> None:
    state = staged_state()
    for _ in range(2):
        forward(state, commit=True)
    forward(state)
    # Ruin the committed pages: only a forward that gathers again would notice.
    intact = [pages[0].clone() for pages in (cache_of(state).k_pages, cache_of(state).v_pages)]
    torch.manual_seed(1)
    before = forward(state)
    for pages in (cache_of(state).k_pages, cache_of(state).v_pages):
        pages[0][list(state.adapter("main").table.ids)] = 1e3
    torch.manual_seed(1)
    assert torch.equal(forward(state), before)
    for pages, saved in zip((cache_of(state).k_pages, cache_of(state).v_pages), intact, strict=True):
        pages[0].copy_(saved)


def test_a_commit_ends_the_reuse() -> None:
    state = staged_state()
    forward(state, commit=True)
    forward(state)
    assert staged_layers(state) == {0}
    forward(state, commit=True)
    forward(state, attend=False)
    assert staged_layers(state) == frozenset()


def test_a_reset_ends_the_reuse_even_where_pages_and_counters_repeat() -> None:
    state = staged_state()
    for _ in range(2):
        # With extra tokens a commit is not staged, so the probe before and the one after the reset look alike.
        forward(state, commit=True, extra=2)
        forward(state, attend=False)
        assert staged_layers(state) == frozenset()
        forward(state)
        assert staged_layers(state) == {0}
        state.reset()


def test_another_timeline_on_the_slot_ends_the_reuse() -> None:
    state = staged_state()
    forward(state)
    other = ARDiffusionKVState("other", cache_of(state))
    forward(other, attend=False)
    assert staged_layers(state) == frozenset()


@pytest.mark.parametrize("reset_at_boundary", [False, True])
@pytest.mark.parametrize("sink", [0, 1])
def test_staged_and_unstaged_outputs_are_equal(sink: int, reset_at_boundary: bool) -> None:
    staged = staged_state(sink_frames=sink, reset_at_boundary=reset_at_boundary)
    plain = make_state(cache_of(staged).spec)
    for call in range(24):
        commit, extra = call % 3 == 2, 2 if call % 4 == 1 else 0
        outputs = []
        for state in (staged, plain):
            torch.manual_seed(call)
            outputs.append(forward(state, commit=commit, extra=extra))
        torch.testing.assert_close(*outputs, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("order", ["passes", "layers"])
def test_branches_that_take_turns_on_one_slot_see_their_own_history(order: str) -> None:
    branches = tuple(ARDiffusionKVBranchSpec(name, 0) for name in ("positive", "negative"))
    spec = tiny_spec(num_layers=2, num_kv_heads=2, head_size=8, window_frames=3, kv_branches=branches)
    outputs = []
    for kv in ({"reuse_history_staging": True}, {}):
        state = make_state(spec, kv=kv, spare_pages=20)
        torch.manual_seed(0)
        outputs.append([])
        for commit in (True, True, False, False, True, False):
            handles = {}
            for branch in spec.branch_names:
                handles[branch] = state.get_kv_caches(branch, seq_len=BLOCK, commit_current=commit)
                state.prepare_paged_context(branch)
            calls = [(branch, layer) for branch in spec.branch_names for layer in range(2)]
            for branch, layer in calls if order == "passes" else sorted(calls, key=lambda call: call[1]):
                q, k, v = torch.randn(3, 1, BLOCK, 2, 8)
                outputs[-1].append(handles[branch][layer].write_and_attend(q, k, v))
            for branch in spec.branch_names:
                state.commit_paged_context(branch)
    torch.testing.assert_close(*outputs, atol=1e-6, rtol=1e-6)


def test_a_forward_of_more_frames_than_the_window_sees_what_it_sees_without_staging() -> None:
    spec = tiny_spec(frames_per_block=3, window_frames=2, sink_frames=1, num_kv_heads=2, head_size=8)
    outputs = []
    for kv in ({"reuse_history_staging": True}, {}):
        state = make_state(spec, kv=kv)
        torch.manual_seed(0)
        outputs.append([])
        for commit in (True, False, False, True, False, False):
            (handle,) = state.get_kv_caches("main", seq_len=3 * BLOCK, commit_current=commit)
            state.prepare_paged_context("main")
            q, k, v = torch.randn(3, 1, 3 * BLOCK, 2, 8)
            outputs[-1].append(handle.write_and_attend(q, k, v))
            state.commit_paged_context("main")
    torch.testing.assert_close(*outputs, atol=1e-6, rtol=1e-6)
