"""Random KV geometries: the same one as our spec and as plain numbers."""

from hypothesis import strategies as st

from contracts.kv_spec import (
    ARDiffusionCrossAttentionKVSpec,
    ARDiffusionKVBranchSpec,
    ARDiffusionKVCacheSpec,
)
from support.plain_plan import PlainGeometry


@st.composite
def slots(draw: st.DrawFn) -> tuple[int, ...]:
    """Slots of one to four branches, contiguous from 0 in some order, shared or not."""
    count = draw(st.integers(1, 4))
    used = draw(st.integers(1, count))
    rest = draw(st.lists(st.integers(0, used - 1), min_size=count - used, max_size=count - used))
    return tuple(draw(st.permutations([*range(used), *rest])))


def geometries(
    *, most_layers: int = 48, most_heads: int = 48, most_cap: int = 70
) -> st.SearchStrategy[PlainGeometry]:
    """Geometries up to those sizes."""
    caches = st.lists(st.tuples(st.integers(1, 600), st.integers(1, most_heads)), max_size=3).map(tuple)
    return st.builds(
        PlainGeometry,
        layers=st.integers(1, most_layers),
        heads=st.integers(1, most_heads),
        head_size=st.integers(1, 128),
        itemsize=st.sampled_from([2, 4]),
        tokens=st.integers(1, 2000),
        frames=st.integers(1, 6),
        window=st.integers(1, 20),
        sink=st.integers(0, 10),
        slots=slots(),
        cross=caches,
        extra_tokens=st.integers(0, 4000),
        owned=st.integers(0, 10**9),
        cap=st.integers(1, most_cap),
        scratch_minimum=st.integers(0, 12),
    )


def spec_of(plain: PlainGeometry) -> ARDiffusionKVCacheSpec:
    """The spec of a plain geometry. A cache with the heads of self-attention leaves them out."""
    return ARDiffusionKVCacheSpec(
        num_layers=plain.layers,
        num_kv_heads=plain.heads,
        head_size=plain.head_size,
        tokens_per_frame=plain.tokens,
        frames_per_block=plain.frames,
        window_frames=plain.window,
        sink_frames=plain.sink,
        kv_branches=tuple(
            ARDiffusionKVBranchSpec(f"branch {number}", slot) for number, slot in enumerate(plain.slots)
        ),
        cross_attention=tuple(
            ARDiffusionCrossAttentionKVSpec(
                f"cache {number}", tokens, None if heads == plain.heads else heads
            )
            for number, (tokens, heads) in enumerate(plain.cross)
        ),
        max_scratch_tokens_per_branch=plain.extra_tokens,
        session_capacity=plain.cap,
        model_owned_state_bytes_per_session=plain.owned,
    )
