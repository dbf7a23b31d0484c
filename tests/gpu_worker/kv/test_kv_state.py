"""The life of one session's KV."""

from collections.abc import Collection

import pytest
import torch

from contracts.capacity import plan_capacity
from contracts.errors import KVStateError
from contracts.kv_spec import ARDiffusionCrossAttentionKVSpec, ARDiffusionKVBranchSpec, resolve_kv_config
from gpu_worker.kv.cache import ARDiffusionKVCache
from gpu_worker.kv.errors import UnknownNameError
from gpu_worker.kv.state import ARDiffusionKVState
from support.kv_cache import cache_of, make_cache, make_state, tiny_spec

SPEC = tiny_spec(
    kv_branches=(ARDiffusionKVBranchSpec("positive", 0), ARDiffusionKVBranchSpec("negative", 1)),
    cross_attention=(ARDiffusionCrossAttentionKVSpec("text", 2), ARDiffusionCrossAttentionKVSpec("image", 3)),
)


def commit_one(state: ARDiffusionKVState, branch: str) -> None:
    state.get_kv_caches(branch, seq_len=16, commit_current=True)
    state.prepare_paged_context(branch)
    state.commit_paged_context(branch)


def publish(state: ARDiffusionKVState, branch: str, name: str, tokens: int) -> None:
    state.populate_cross_attention(branch, name, [(torch.ones(1, tokens, 1, 1), torch.ones(1, tokens, 1, 1))])


def test_timelines_are_named_after_session_and_branch() -> None:
    state = make_state(SPEC, "world-1")
    assert cache_of(state).request_ids == ("ar::world-1::positive", "ar::world-1::negative")
    assert state.adapter("negative").request_id == "ar::world-1::negative"


@pytest.mark.parametrize("names", [(), ("positive",), ("positive", "negative", "third")])
def test_adapters_must_be_those_of_the_branches(names: tuple[str, ...]) -> None:
    cache = make_cache(SPEC)
    adapters = {name: cache.begin_request(name, 0) for name in names}
    with pytest.raises(ValueError, match="adapters"):
        ARDiffusionKVState("s", cache, adapters)


def test_given_adapters_are_used() -> None:
    cache = make_cache(SPEC)
    adapters = cache.begin_session("s")
    assert ARDiffusionKVState("s", cache, adapters).adapter("positive") is adapters["positive"]


def test_an_unknown_branch_names_the_expected_ones() -> None:
    state = make_state(SPEC)
    for call in (
        lambda: state.adapter("main"),
        lambda: state.get_kv_caches("main", seq_len=16),
        lambda: state.prepare_paged_context("main"),
        lambda: state.commit_paged_context("main"),
    ):
        with pytest.raises(KeyError, match=r"main.*negative.*positive"):
            call()


def test_close_frees_every_branch_and_cross_cache_and_can_be_repeated() -> None:
    state = make_state(SPEC)
    cache = cache_of(state)
    commit_one(state, "positive")
    state.get_kv_caches("negative", seq_len=16, commit_current=True)
    state.prepare_paged_context("negative")  # in flight when the session goes
    publish(state, "positive", "text", 2)
    state.close()
    state.close()
    assert state.closed
    assert cache.pool.num_free == cache.pool.num_usable
    assert cache.request_ids == cache.cross_attention.session_ids == ()
    cache.check_integrity()


def test_a_closed_state_answers_nothing() -> None:
    state = make_state(SPEC)
    state.close()
    for call in (
        lambda: state.adapter("positive"),
        lambda: state.get_kv_caches("positive", seq_len=16),
        lambda: state.prepare_paged_context("positive"),
        lambda: state.commit_paged_context("positive"),
        lambda: state.get_cross_attention_kv("positive", "text"),
        lambda: state.is_cross_attention_populated("positive", "text"),
        state.clear_cross_attention,
        state.reset,
    ):
        with pytest.raises(RuntimeError, match="is closed"):
            call()


def test_a_prompt_switch_drops_cross_caches_only() -> None:
    state = make_state(SPEC)
    commit_one(state, "positive")
    publish(state, "positive", "text", 2)
    table = state.adapter("positive").table.ids
    state.clear_cross_attention()
    assert not state.is_cross_attention_populated("positive", "text")
    assert (state.adapter("positive").table.ids, state.adapter("positive").absolute_frames) == (table, 1)


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (False, set()),
        ((), set()),
        (True, {"text", "image"}),
        (("text",), {"text"}),
        ("text", {"text"}),
        ({"image"}, {"image"}),
    ],
)
def test_reset_starts_again_and_keeps_the_cross_caches_that_are_named(
    keep: bool | Collection[str], left: set[str]
) -> None:
    state = make_state(SPEC)
    cache = cache_of(state)
    commit_one(state, "positive")
    commit_one(state, "negative")
    publish(state, "positive", "text", 2)
    publish(state, "negative", "image", 3)
    state.reset(keep_cross_attention=keep)
    assert cache.pool.num_free == cache.pool.num_usable
    assert [state.adapter(branch).absolute_frames for branch in ("positive", "negative")] == [0, 0]
    kept = {"text": ("positive", "text"), "image": ("negative", "image")}
    assert {name for name, key in kept.items() if state.is_cross_attention_populated(*key)} == left
    commit_one(state, "positive")
    assert state.adapter("positive").absolute_frames == 1


def test_a_reset_that_names_no_cache_changes_nothing() -> None:
    state = make_state(SPEC)
    commit_one(state, "positive")
    for names in (["text", "audio"], "audio"):
        with pytest.raises(UnknownNameError, match="audio"):
            state.reset(keep_cross_attention=names)
    assert state.adapter("positive").absolute_frames == 1


def test_reset_drops_a_commit_in_flight() -> None:
    state = make_state(SPEC)
    state.get_kv_caches("positive", seq_len=16, commit_current=True)
    state.prepare_paged_context("positive")
    state.reset()
    state.commit_paged_context("positive")
    assert state.adapter("positive").absolute_frames == 0
    cache_of(state).check_integrity()


def test_a_session_whose_timelines_spell_those_of_another_leaves_nothing() -> None:
    branches = (ARDiffusionKVBranchSpec("main", 0), ARDiffusionKVBranchSpec("x::main", 1))
    cache = make_cache(tiny_spec(kv_branches=branches, session_capacity=2))
    ARDiffusionKVState("w", cache)
    before = cache.request_ids
    with pytest.raises(KVStateError, match=r"'ar::w::x::main' exists already"):
        ARDiffusionKVState("w::x", cache)
    assert cache.request_ids == before == ("ar::w::main", "ar::w::x::main")
    cache.check_integrity()


def test_a_device_is_known_by_any_of_its_names() -> None:
    spec = tiny_spec()
    config = resolve_kv_config(spec, {"gpu_memory_fraction": 1.0})
    plan = plan_capacity(spec, config, available_bytes=1 << 20, itemsize=4)
    cache = ARDiffusionKVCache(spec, config, plan, device=torch.device("cpu", 0), dtype=torch.float32)
    assert torch.device("cpu", 0) != torch.empty(0).device, "or there is nothing to test"
    state = ARDiffusionKVState("w", cache)
    (handle,) = state.get_kv_caches("main", seq_len=16)
    state.prepare_paged_context("main")
    x = torch.ones(1, 16, 1, 1)
    assert torch.equal(handle.write_and_attend(x, x, x), x)
