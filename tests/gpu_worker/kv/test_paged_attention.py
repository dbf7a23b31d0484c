"""Paged attention equals dense attention over what is visible."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name that torch code uses

from contracts.kv_spec import ARDiffusionKVCacheSpec
from gpu_worker.kv.attention import attend
from gpu_worker.kv.metadata import page_runs
from gpu_worker.kv.state import ARDiffusionKVState
from support.kv_cache import cache_of, make_state, tiny_spec

HEADS, HEAD, BLOCK = 4, 64, 16


class Tokens(NamedTuple):
    """Random q, k, v, [1, tokens, heads, head] each."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def random_tokens(count: int, heads: int = HEADS) -> Tokens:
    return Tokens(*(torch.randn(1, count, heads, HEAD) for _ in range(3)))


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / HEAD**0.5
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.double()).float()


def spec(**changes: object) -> ARDiffusionKVCacheSpec:
    values: dict[str, object] = {"num_kv_heads": HEADS, "head_size": HEAD, "max_scratch_tokens_per_branch": 3}
    return tiny_spec(**{**values, **changes})


def forward(
    state: ARDiffusionKVState, tokens: Tokens, *, commit: bool, extra: Tokens | None = None, layer: int = 0
) -> torch.Tensor:
    handle = state.get_kv_caches("main", seq_len=tokens.k.shape[1], commit_current=commit)[layer]
    extra_count = 0 if extra is None else extra.k.shape[1]
    state.prepare_paged_context("main", extra_tokens=extra_count)
    q = tokens.q if extra is None else torch.cat((tokens.q, extra.q), 1)
    out = handle.write_and_attend(
        q, tokens.k, tokens.v, None if extra is None else extra.k, None if extra is None else extra.v
    )
    state.commit_paged_context("main")
    return out


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("commit", [False, True])
@pytest.mark.parametrize("extra_count", [0, 3])
@pytest.mark.parametrize("history_frames", [0, 1, 3])
def test_paged_equals_dense(history_frames: int, extra_count: int, commit: bool) -> None:
    state = make_state(spec())
    history = [random_tokens(BLOCK) for _ in range(history_frames)]
    for tokens in history:
        forward(state, tokens, commit=True)
    current = random_tokens(BLOCK)
    extra = random_tokens(extra_count) if extra_count else None
    out = forward(state, current, commit=commit, extra=extra)

    seen = [*history, current][-2:]
    if extra is not None:
        seen.append(extra)
    q = current.q if extra is None else torch.cat((current.q, extra.q), 1)
    expected = dense(q, torch.cat([t.k for t in seen], 1), torch.cat([t.v for t in seen], 1))
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("staging", [False, True])
def test_several_frames_with_sink_probes_and_commits_over_a_long_rollout(staging: bool) -> None:
    state = make_state(
        spec(frames_per_block=3, window_frames=4, sink_frames=2, num_layers=2),
        kv={"reuse_history_staging": staging},
    )
    frames_k: list[torch.Tensor] = []
    frames_v: list[torch.Tensor] = []
    for _ in range(7):
        for commit in (False, False, True):
            tokens = random_tokens(3 * BLOCK)
            k = [*frames_k, *tokens.k.split(BLOCK, 1)]
            v = [*frames_v, *tokens.v.split(BLOCK, 1)]
            picked = range(len(k)) if len(k) <= 6 else [0, 1, *range(len(k) - 4, len(k))]
            handles = state.get_kv_caches("main", seq_len=3 * BLOCK, commit_current=commit)
            state.prepare_paged_context("main")
            for scale, handle in enumerate(handles, start=1):
                out = handle.write_and_attend(tokens.q, tokens.k * scale, tokens.v * scale)
                expected = dense(
                    tokens.q,
                    torch.cat([k[i] for i in picked], 1) * scale,
                    torch.cat([v[i] for i in picked], 1) * scale,
                )
                torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
            state.commit_paged_context("main")
            if commit:
                frames_k, frames_v = k, v


def test_a_probe_leaves_committed_bytes_alone_and_the_next_one_overwrites_it() -> None:
    state = make_state(spec())
    forward(state, random_tokens(BLOCK), commit=True)
    cache = cache_of(state)
    before = cache.k_pages[0][: cache.plan.num_blocks].clone()
    first, second = random_tokens(BLOCK), random_tokens(BLOCK)
    forward(state, first, commit=False)
    alone = forward(state, second, commit=False)
    again = forward(state, second, commit=False)
    assert torch.equal(cache.k_pages[0][: cache.plan.num_blocks], before)
    assert torch.equal(alone, again)


def test_grouped_query_heads_share_kv_heads() -> None:
    state = make_state(spec(num_kv_heads=2))
    tokens = Tokens(torch.randn(1, BLOCK, 4, HEAD), *random_tokens(BLOCK, heads=2)[1:])
    out = forward(state, tokens, commit=True)
    expected = dense(tokens.q, tokens.k.repeat_interleave(2, 2), tokens.v.repeat_interleave(2, 2))
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_the_order_of_visible_pages_does_not_matter() -> None:
    tokens = random_tokens(3 * BLOCK)
    turned = [torch.cat((t[:, BLOCK:], t[:, :BLOCK]), 1) for t in (tokens.k, tokens.v)]
    torch.testing.assert_close(attend(*tokens), attend(tokens.q, *turned), atol=1e-5, rtol=1e-5)


def test_attention_is_never_causal() -> None:
    tokens = random_tokens(BLOCK)
    with pytest.raises(NotImplementedError, match="causal"):
        attend(*tokens, causal=True)
    assert not torch.allclose(
        attend(*tokens),
        F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in tokens), is_causal=True).transpose(1, 2),
    )


@pytest.mark.parametrize(
    ("pages", "runs"),
    [
        ([4, 5, 6], ((4, 3),)),
        ([5, 6, 4], ((5, 2), (4, 1))),
        ([4, 6, 7], ((4, 1), (6, 2))),
        ([7], ((7, 1),)),
        ([], ()),
    ],
)
def test_pages_that_lie_together_are_one_run(pages: list[int], runs: tuple[tuple[int, int], ...]) -> None:
    assert page_runs(pages) == runs


@pytest.mark.parametrize("staging", [False, True])
def test_a_world_is_the_same_bit_for_bit_on_whatever_pages_it_gets(staging: bool) -> None:
    wide = spec(frames_per_block=3, window_frames=6, sink_frames=3, tokens_per_frame=64)
    generator = torch.Generator().manual_seed(3)
    tokens = [Tokens(*torch.randn(3, 1, 192, HEADS, HEAD, generator=generator)) for _ in range(24)]
    states = [make_state(wide, kv={"reuse_history_staging": staging}, spare_pages=spare) for spare in (0, 40)]
    scattered = cache_of(states[1]).pool
    scattered._free = scattered._free[::-1]  # no heap any more: pages come in some other order
    runs = []
    for call, values in enumerate(tokens):
        here, there = (forward(state, values, commit=call % 3 == 2) for state in states)
        assert torch.equal(here, there)
        runs.append(states[1].adapter("main").table.ids)
    assert any(len(page_runs(ids)) > 3 for ids in runs), "the pages were scattered indeed"


def test_a_run_that_ends_in_partly_filled_scratch_is_cut_there() -> None:
    state = make_state(spec())
    cache = cache_of(state)
    cache.pool.allocate(2)  # so that the frames get pages 3 and 4, and scratch is page 5
    history, current, extra = random_tokens(BLOCK), random_tokens(BLOCK), random_tokens(3)
    forward(state, history, commit=True)
    handle = state.get_kv_caches("main", seq_len=BLOCK, commit_current=True)[0]
    assert state.prepare_paged_context("main", extra_tokens=3).metadata.run == (3, 3)
    out = handle.write_and_attend(current.q, current.k, current.v, extra.k, extra.v)
    seen = (history, current, extra)
    expected = dense(current.q, torch.cat([t.k for t in seen], 1), torch.cat([t.v for t in seen], 1))
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_a_run_is_read_without_a_copy() -> None:
    state = make_state(spec())
    handle = state.get_kv_caches("main", seq_len=BLOCK, commit_current=True)[0]
    metadata = state.prepare_paged_context("main").metadata
    assert metadata.run == (1, 1)
    tokens = random_tokens(BLOCK)
    in_place = handle.write_and_attend(*tokens)
    gathered = attend(
        tokens.q,
        *(
            pages[0][list(metadata.page_ids)].view(1, -1, HEADS, HEAD)
            for pages in (cache_of(state).k_pages, cache_of(state).v_pages)
        ),
    )
    assert torch.equal(in_place, gathered)
