"""Paged attention equals dense attention over random geometries and rollouts: heads, branches, frames, extra tokens."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.kv_spec import ARDiffusionKVBranchSpec
from gpu_worker.kv.metadata import page_runs
from support.kv_cache import cache_of, make_state, tiny_spec
from support.plain_kv import PlainTimeline


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """[T, H, S] attention written as sums in float64; query heads share K and V in groups."""
    groups = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(groups, 1) for t in (k, v))
    weights = (torch.einsum("qhd,khd->hqk", q.double(), k) / q.shape[2] ** 0.5).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).float()


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    layers=st.integers(1, 2),
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 2),
    head=st.sampled_from([1, 4, 16, 64]),
    block=st.integers(1, 9),
    frames=st.integers(1, 3),
    window=st.integers(1, 5),
    sink=st.integers(0, 3),
    shared=st.booleans(),
    staging=st.booleans(),
    scattered=st.booleans(),
)
def test_every_layer_branch_and_forward(  # noqa: PLR0917 - the dimensions of the property
    data: st.DataObject,
    layers: int,
    kv_heads: int,
    groups: int,
    head: int,
    block: int,
    frames: int,
    window: int,
    sink: int,
    shared: bool,
    staging: bool,
    scattered: bool,
) -> None:
    branches = (ARDiffusionKVBranchSpec("one", 0), ARDiffusionKVBranchSpec("two", 0 if shared else 1))
    spec = tiny_spec(
        num_layers=layers,
        num_kv_heads=kv_heads,
        head_size=head,
        tokens_per_frame=block,
        frames_per_block=frames,
        window_frames=window,
        sink_frames=sink,
        kv_branches=branches,
        max_scratch_tokens_per_branch=7,
    )
    state = make_state(spec, kv={"reuse_history_staging": staging}, spare_pages=3 * (window + sink + frames))
    if scattered:
        pool = cache_of(state).pool
        pool._free = pool._free[::2] + pool._free[1::2][::-1]
    plain = {branch.name: PlainTimeline(window, sink, False) for branch in branches}
    # Every frame ever committed: name -> layer -> frame -> (k, v), [block, kv_heads, head] each.
    past: dict[str, list[list[tuple[torch.Tensor, torch.Tensor]]]] = {
        name: [[] for _ in range(layers)] for name in plain
    }
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    for _ in range(data.draw(st.integers(1, 8))):
        name = data.draw(st.sampled_from(["one", "two"]))
        count, commit = data.draw(st.integers(1, frames)), data.draw(st.booleans())
        extra = data.draw(st.sampled_from([0, 0, 1, 7]))
        handles = state.get_kv_caches(name, seq_len=count * block, commit_current=commit)
        state.prepare_paged_context(name, extra_tokens=extra)
        seen = plain[name].visible_with(count)
        for handle, frames_so_far in zip(handles, past[name], strict=True):
            q = torch.randn(1, count * block + extra, kv_heads * groups, head)
            k, v, extra_k, extra_v = (
                torch.randn(1, tokens, kv_heads, head) for tokens in (count * block,) * 2 + (extra,) * 2
            )
            registers = (extra_k, extra_v) if extra else (None, None)
            out = handle.write_and_attend(q, k, v, *registers)
            every = [*frames_so_far, *zip(k[0].split(block), v[0].split(block), strict=True)]
            keys = torch.cat([*(every[frame][0] for frame in seen), extra_k[0]])
            values = torch.cat([*(every[frame][1] for frame in seen), extra_v[0]])
            torch.testing.assert_close(out[0], dense(q[0], keys, values), atol=1e-5, rtol=1e-5)
            if commit:
                frames_so_far.extend(every[len(frames_so_far) :])
        state.commit_paged_context(name)
        if commit:
            plain[name].commit(count)
    for name, timeline in plain.items():
        assert (
            len(state.adapter(name).table)
            == len(timeline.kept)
            >= len(page_runs(state.adapter(name).table.ids))
        )
    cache_of(state).check_integrity()
