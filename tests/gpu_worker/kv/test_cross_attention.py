"""Publishing a cross-attention cache is one transaction."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from contracts.errors import InvalidArgumentError, KVStateError
from contracts.kv_spec import ARDiffusionCrossAttentionKVSpec, ARDiffusionKVBranchSpec
from gpu_worker.kv.cache import ARDiffusionKVCache
from gpu_worker.kv.state import ARDiffusionKVState
from support.kv_cache import make_cache, tiny_spec

Pair = tuple[torch.Tensor, torch.Tensor]


def pair(value: float, tokens: int = 3, heads: int = 2) -> Pair:
    return torch.full((1, tokens, heads, 4), value), torch.full((1, tokens, heads, 4), -value)


@pytest.fixture
def cache() -> ARDiffusionKVCache:
    spec = tiny_spec(
        num_layers=2,
        num_kv_heads=2,
        head_size=4,
        kv_branches=(ARDiffusionKVBranchSpec("positive", 0), ARDiffusionKVBranchSpec("negative", 0)),
        cross_attention=(
            ARDiffusionCrossAttentionKVSpec("text", 3),
            ARDiffusionCrossAttentionKVSpec("image", 5, 1),
        ),
        session_capacity=2,
    )
    return make_cache(spec)


@pytest.fixture
def state(cache: ARDiffusionKVCache) -> ARDiffusionKVState:
    return ARDiffusionKVState("s", cache)


def test_a_complete_cache_can_be_read_layer_by_layer(state: ARDiffusionKVState) -> None:
    state.populate_cross_attention("positive", "text", (pair(value) for value in (1, 2)))
    layers = state.get_cross_attention_kv("positive", "text")
    assert [
        (layer["is_init"], float(layer["k"][0, 0, 0, 0]), float(layer["v"][0, 0, 0, 0])) for layer in layers
    ] == [
        (True, 1, -1),
        (True, 2, -2),
    ]
    assert tuple(layers[0]["k"].shape) == (1, 3, 2, 4)


def test_the_iterable_is_consumed_once_in_layer_order(state: ARDiffusionKVState) -> None:
    asked: list[int] = []

    def project() -> Iterator[Pair]:
        for layer in range(2):
            asked.append(layer)
            yield pair(layer)

    state.populate_cross_attention("positive", "text", project())
    assert asked == [0, 1]


def test_reading_before_publication_is_an_error(state: ARDiffusionKVState) -> None:
    assert not state.is_cross_attention_populated("positive", "text")
    with pytest.raises(RuntimeError, match="before it was populated"):
        state.get_cross_attention_kv("positive", "text")


def test_values_are_copied(state: ARDiffusionKVState) -> None:
    source = [pair(1), pair(2)]
    state.populate_cross_attention("positive", "text", source)
    source[0][0].fill_(99)
    assert float(state.get_cross_attention_kv("positive", "text")[0]["k"].max()) == 1


def test_a_cache_owns_compact_storage(state: ARDiffusionKVState) -> None:
    wide = torch.zeros(1, 3, 8, 4)
    state.populate_cross_attention("positive", "text", [(wide[:, :, 2:4], wide[:, :, 4:6])] * 2)
    k = state.get_cross_attention_kv("positive", "text")[0]["k"]
    assert k.is_contiguous()
    assert k.untyped_storage().nbytes() == k.nbytes


class ProjectionError(Exception):
    pass


def failing() -> Iterator[Pair]:
    yield pair(7)
    raise ProjectionError("projection failed")


BAD: list[tuple[str, Callable[[], Any], type[Exception], str]] = [
    ("too few layers", lambda: [pair(7)], ValueError, "expected 2 layers"),
    ("no layers", list, ValueError, "expected 2 layers"),
    ("too many layers", lambda: [pair(7)] * 3, ValueError, "expected 2 layers"),
    ("wrong length", lambda: [pair(7), pair(7, tokens=4)], ValueError, "k/v shape"),
    ("wrong heads", lambda: [pair(7), pair(7, heads=1)], ValueError, "k/v shape"),
    ("no tensor", lambda: [pair(7), (pair(7)[0], [1.0])], ValueError, "tensors"),
    ("no pair", lambda: [pair(7), pair(7)[0]], ValueError, "pair"),
    ("error of the iterable", failing, ProjectionError, "projection failed"),
]


@pytest.mark.parametrize(("make", "error", "text"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_a_failed_publication_keeps_the_previous_cache(
    state: ARDiffusionKVState, make: Callable[[], Any], error: type[Exception], text: str
) -> None:
    state.populate_cross_attention("positive", "text", [pair(1), pair(2)])
    with pytest.raises(error, match=text):
        state.populate_cross_attention("positive", "text", make())
    assert float(state.get_cross_attention_kv("positive", "text")[0]["k"].max()) == 1


@pytest.mark.parametrize(("make", "error", "text"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_a_failed_first_publication_leaves_nothing(
    cache: ARDiffusionKVCache,
    state: ARDiffusionKVState,
    make: Callable[[], Any],
    error: type[Exception],
    text: str,
) -> None:
    with pytest.raises(error, match=text):
        state.populate_cross_attention("positive", "text", make())
    assert not state.is_cross_attention_populated("positive", "text")
    assert cache.cross_attention.session_ids == ()
    assert cache.cross_attention.nbytes == 0


def test_branches_are_independent_even_on_one_slot(state: ARDiffusionKVState) -> None:
    state.populate_cross_attention("positive", "text", [pair(1), pair(2)])
    assert state.is_cross_attention_populated("positive", "text")
    assert not state.is_cross_attention_populated("negative", "text")


def test_a_cache_may_have_its_own_heads(state: ARDiffusionKVState) -> None:
    state.populate_cross_attention("positive", "image", [pair(1, tokens=5, heads=1)] * 2)
    assert tuple(state.get_cross_attention_kv("positive", "image")[0]["v"].shape) == (1, 5, 1, 4)


def test_as_many_sessions_as_are_planned_hold_caches(cache: ARDiffusionKVCache) -> None:
    states = [ARDiffusionKVState(name, cache) for name in "abc"]
    for state in states[:2]:
        state.populate_cross_attention("positive", "text", [pair(1), pair(2)])
    with pytest.raises(RuntimeError, match="no room") as caught:
        states[2].populate_cross_attention("positive", "text", failing())
    assert isinstance(caught.value, KVStateError)
    states[0].populate_cross_attention("positive", "text", [pair(3), pair(4)])
    states[0].close()
    states[2].populate_cross_attention("positive", "text", [pair(1), pair(2)])
    assert cache.cross_attention.session_ids == ("b", "c")


def test_unknown_names_are_key_errors_that_name_the_known(state: ARDiffusionKVState) -> None:
    for call in (
        lambda: state.populate_cross_attention("positive", "audio", [pair(1), pair(2)]),
        lambda: state.get_cross_attention_kv("positive", "audio"),
        lambda: state.is_cross_attention_populated("positive", "audio"),
        lambda: state.clear_cross_attention("positive", "audio"),
    ):
        with pytest.raises(KeyError, match=r"audio.*image.*text"):
            call()
    with pytest.raises(KeyError, match="unknown KV branch 'main'"):
        state.populate_cross_attention("main", "text", [pair(1), pair(2)])


def test_clearing_can_be_narrowed_to_a_branch_or_a_name(state: ARDiffusionKVState) -> None:
    def populated() -> list[tuple[str, str]]:
        every = [(b, n) for b in ("positive", "negative") for n in ("text", "image")]
        return [key for key in every if state.is_cross_attention_populated(*key)]

    def fill() -> None:
        for branch in ("positive", "negative"):
            state.populate_cross_attention(branch, "text", [pair(1)] * 2)
            state.populate_cross_attention(branch, "image", [pair(1, tokens=5, heads=1)] * 2)

    fill()
    state.clear_cross_attention("positive", "text")
    assert populated() == [("positive", "image"), ("negative", "text"), ("negative", "image")]
    state.clear_cross_attention(name="image")
    assert populated() == [("negative", "text")]
    fill()
    state.clear_cross_attention("negative")
    assert populated() == [("positive", "text"), ("positive", "image")]
    state.clear_cross_attention()
    assert populated() == []


def test_a_closed_state_publishes_nothing(cache: ARDiffusionKVCache, state: ARDiffusionKVState) -> None:
    state.close()
    with pytest.raises(RuntimeError, match="is closed"):
        state.populate_cross_attention("positive", "text", [pair(1), pair(2)])
    with pytest.raises(InvalidArgumentError, match="adapters"):
        ARDiffusionKVState("s", cache, {})
