"""Small paged caches for tests."""

from typing import Any

import torch

from contracts.capacity import plan_capacity
from contracts.kv_spec import ARDiffusionKVBranchSpec, ARDiffusionKVCacheSpec, resolve_kv_config
from gpu_worker.kv.block_table import KVRequestAdapter
from gpu_worker.kv.cache import ARDiffusionKVCache
from gpu_worker.kv.state import ARDiffusionKVState

torch.set_num_threads(1)

CPU = torch.device("cpu")


def tiny_spec(**changes: Any) -> ARDiffusionKVCacheSpec:
    """One layer, one head of size 1, block 16, window 2, one frame a tick, one branch."""
    values: dict[str, Any] = {
        "num_layers": 1,
        "num_kv_heads": 1,
        "head_size": 1,
        "tokens_per_frame": 16,
        "frames_per_block": 1,
        "window_frames": 2,
        "kv_branches": (ARDiffusionKVBranchSpec("main", 0),),
    }
    return ARDiffusionKVCacheSpec(**{**values, **changes})


def make_cache(
    spec: ARDiffusionKVCacheSpec, *, kv: dict[str, Any] | None = None, spare_pages: int = 0
) -> ARDiffusionKVCache:
    """A float32 cache for the spec's whole capacity, with `spare_pages` beyond what that needs."""
    config = resolve_kv_config(spec, {"gpu_memory_fraction": 1.0, **(kv or {})})
    roomy = plan_capacity(spec, config, available_bytes=1 << 40, itemsize=4)
    needed = roomy.required_bytes + spare_pages * roomy.memory.page_bytes
    plan = plan_capacity(spec, config, available_bytes=needed, itemsize=4)
    assert plan.num_blocks == plan.managed_blocks + spare_pages
    return ARDiffusionKVCache(spec, config, plan, device=CPU, dtype=torch.float32)


def make_state(spec: ARDiffusionKVCacheSpec, session_id: str = "s", **options: Any) -> ARDiffusionKVState:
    """One session on a cache of its own."""
    return ARDiffusionKVState(session_id, make_cache(spec, **options))


def cache_of(state: ARDiffusionKVState) -> ARDiffusionKVCache:
    """The cache under a state."""
    return state._cache


def write_positions(cache: ARDiffusionKVCache, adapter: KVRequestAdapter, frames: int) -> None:
    """Writes K = position and V = -position of the `frames` in flight, as a commit forward would."""
    first = adapter.absolute_tokens
    positions = torch.arange(first, first + frames * cache.block_size, dtype=torch.float32).view(
        frames, -1, 1, 1
    )
    done = adapter.num_computed_tokens // cache.block_size
    for offset, block in enumerate(adapter.table.ids[done : done + frames]):
        for layer in range(cache.spec.num_layers):
            cache.k_pages[layer][block] = positions[offset]
            cache.v_pages[layer][block] = -positions[offset]


def resident_frames(cache: ARDiffusionKVCache, adapter: KVRequestAdapter) -> list[int]:
    """Absolute frame numbers that the resident pages hold, read back from their contents."""
    frames = []
    for block in adapter.table.ids:
        k, v = cache.k_pages[0][block].flatten(), cache.v_pages[0][block].flatten()
        frame = int(k[0]) // cache.block_size
        expected = torch.arange(frame * cache.block_size, (frame + 1) * cache.block_size, dtype=torch.float32)
        assert torch.equal(k, expected)
        assert torch.equal(v, -expected)
        frames.append(frame)
    return frames
