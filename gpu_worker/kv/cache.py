"""The paged pool of one worker: memory, timelines, commit and eviction."""

from __future__ import annotations

import math

import numpy as np
import torch

from contracts.capacity import NULL_BLOCK_ID, CapacityPlan
from contracts.errors import InvalidArgumentError, KVStateError, PoolExhaustedError
from contracts.kv_spec import ARDiffusionKVCacheSpec, ARDiffusionKVConfig
from gpu_worker.kv.attention import AttentionBackend, SdpaBackend
from gpu_worker.kv.block_pool import BlockPool
from gpu_worker.kv.block_table import KVRequestAdapter
from gpu_worker.kv.cross_attention import CrossAttentionStore
from gpu_worker.kv.staging import HistoryStaging
from gpu_worker.kv.window import SlidingWindow


class ARDiffusionKVCache:
    """Self-attention pages of all resident sessions, and the store of their cross-attention caches.

    Per layer K and V are separate allocations of shape [blocks, block_size, kv_heads, head_size]. Ids
    [1, num_blocks) are managed by a free queue; ids [num_blocks, total) are scratch, one fixed range a local branch.

    Args:
        spec: the pipeline's geometry.
        config: window and sink in force; must be usable.
        plan: how many pages and sessions.
        device: where the pool lives; a type without an index stands for its current device.
        dtype: element type of K and V.
        attention: how layers attend; None for torch's own.
    """

    def __init__(
        self,
        spec: ARDiffusionKVCacheSpec,
        config: ARDiffusionKVConfig,
        plan: CapacityPlan,
        *,
        device: torch.device,
        dtype: torch.dtype,
        attention: AttentionBackend | None = None,
    ) -> None:
        self.attention = SdpaBackend() if attention is None else attention
        self.window = SlidingWindow.from_config(config)
        self.spec = spec
        self.plan = plan
        self.dtype = dtype
        self.block_size = self.window.chunk_size
        self.pool = BlockPool(plan.num_blocks)
        self.cross_attention = CrossAttentionStore(spec, plan.capacity, device=device, dtype=dtype)
        shape = (plan.total_blocks, self.block_size, spec.num_kv_heads, spec.head_size)
        self.k_pages = [zero_pages(shape, device, dtype) for _ in range(spec.num_layers)]
        self.v_pages = [zero_pages(shape, device, dtype) for _ in range(spec.num_layers)]
        self.device = self.k_pages[0].device  # "cuda" is not equal to the "cuda:0" that its tensors are on
        self._staging = self._make_staging() if config.reuse_history_staging else None
        self._adapters: dict[str, KVRequestAdapter] = {}

    def _make_staging(self) -> list[HistoryStaging]:
        shape = (self.window.retained_blocks * self.block_size, self.spec.num_kv_heads, self.spec.head_size)
        return [
            HistoryStaging(self.spec.num_layers, shape, device=self.device, dtype=self.dtype)
            for _ in range(self.spec.num_local_kv_branches)
        ]

    # ------------------------------------------------------------------------------------------------ timelines

    def begin_request(self, request_id: str, local_index: int) -> KVRequestAdapter:
        """A new timeline at position 0. It holds no page until its first commit."""
        self._check_unused(request_id)
        if not 0 <= local_index < self.spec.num_local_kv_branches:
            raise InvalidArgumentError(f"local_index {local_index} has no KV slot", field="local_index")
        adapter = KVRequestAdapter(request_id, local_index, self.block_size)
        self._adapters[request_id] = adapter
        return adapter

    def begin_session(self, session_id: str) -> dict[str, KVRequestAdapter]:
        """One timeline a logical branch, named `ar::{session}::{branch}`."""
        names = {branch: f"ar::{session_id}::{branch.name}" for branch in self.spec.kv_branches}
        for (
            name
        ) in names.values():  # all or none: session "a::b" and branch "c" could spell what "a" and "b::c" do
            self._check_unused(name)
        return {branch.name: self.begin_request(name, branch.local_index) for branch, name in names.items()}

    def _check_unused(self, request_id: str) -> None:
        if request_id in self._adapters:
            raise KVStateError(f"KV timeline {request_id!r} exists already")

    def end_request(self, adapter: KVRequestAdapter) -> None:
        """Frees a timeline's pages, in-flight ones too, and forgets it; nothing happens the second time."""
        if self._adapters.get(adapter.request_id) is adapter:
            del self._adapters[adapter.request_id]
            self.pool.free(adapter.reset())

    def reset_request(self, adapter: KVRequestAdapter) -> None:
        """Frees a timeline's pages and puts it back to position 0."""
        self.pool.free(adapter.reset())

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The timelines that exist."""
        return tuple(self._adapters)

    # ------------------------------------------------------------------------------------------------ pages

    def allocate(self, adapter: KVRequestAdapter, num_tokens: int) -> None:
        """Extends the table to hold `num_tokens` behind the computed ones. Nothing is dropped before the commit."""
        wanted = -(-(adapter.num_computed_tokens + num_tokens) // self.block_size)
        missing = wanted - len(adapter.table)
        if missing > 0:
            adapter.table.append(self.pool.allocate(missing))

    def commit_chunk(self, adapter: KVRequestAdapter) -> None:
        """Commits one allocated frame and frees what the window no longer needs."""
        if adapter.num_tokens > len(adapter.table) * self.block_size:
            raise KVStateError(f"KV timeline {adapter.request_id!r} commits a frame that was never allocated")
        adapter.advance()
        skipped = self.window.skipped_tokens(adapter.num_computed_tokens)
        if skipped:
            self.pool.free(adapter.compact(self.window.sink_chunks, skipped))

    def scratch_block_ids(self, local_index: int, start: int, count: int) -> list[int]:
        """Scratch page ids of a local branch, behind the managed ones."""
        if start < 0 or count < 0:
            raise InvalidArgumentError(f"scratch range [{start}, +{count}) is negative", field="start")
        per_branch = self.plan.memory.scratch_blocks_per_branch
        if start + count > per_branch:
            raise PoolExhaustedError(
                f"scratch blocks exhausted: {start + count} asked for, {per_branch} reserved"
            )
        base = self.plan.num_blocks + per_branch * local_index + start
        return list(range(base, base + count))

    def staging(self, adapter: KVRequestAdapter) -> HistoryStaging | None:
        """The staging buffer of a timeline's slot, None when staging is off."""
        return None if self._staging is None else self._staging[adapter.local_index]

    # ------------------------------------------------------------------------------------------------ accounting

    def layout(self) -> list[tuple[str, int, int, tuple[int, ...]]]:
        """Each timeline's name, absolute and computed tokens, and pages."""
        return [
            (adapter.request_id, adapter.absolute_tokens, adapter.num_computed_tokens, adapter.table.ids)
            for adapter in self._adapters.values()
        ]

    def allocated_bytes(self) -> int:
        """Bytes of device memory held now, cross-attention and staging included."""
        paged = sum(page.nbytes for page in (*self.k_pages, *self.v_pages))
        staged = sum(buffer.nbytes for buffer in self._staging or ())
        return paged + staged + self.cross_attention.nbytes

    def check_integrity(self) -> None:
        """KVStateError unless free and owned pages make up the pool and no timeline holds more than it may."""
        most = self.window.retained_blocks + self.spec.frames_per_block
        owned: list[int] = []
        for adapter in self._adapters.values():
            if len(adapter.table) > most:
                raise KVStateError(
                    f"KV timeline {adapter.request_id!r} holds {len(adapter.table)} pages, limit {most}"
                )
            owned.extend(adapter.table.ids)
        if NULL_BLOCK_ID in owned:
            raise KVStateError("a table holds the null page")
        self.pool.check_conservation(owned)


def zero_pages(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Zeroed storage for pages, `shape` of `dtype`.

    On the CPU it comes from the system's own zero pages, so that a pool takes memory as it fills, not when it is made.
    """
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)
