"""One forward's view of a timeline: where it writes, what it sees."""

from __future__ import annotations

import torch

from contracts.capacity import NULL_BLOCK_ID
from contracts.errors import InvalidArgumentError, KVStateError
from gpu_worker.kv.attention import (
    PagedMetadata,
    attend,
    check_tokens,
    read_visible,
    single_run,
    write_tokens,
)
from gpu_worker.kv.block_table import KVRequestAdapter, slot_indices
from gpu_worker.kv.cache import ARDiffusionKVCache
from gpu_worker.kv.staging import HistoryStaging, StagingKey


class PagedForwardContext:
    """The pages of one forward over one branch.

    A commit context writes managed pages behind the history; any other writes scratch, so that it changes neither
    tables nor counters and the next one overwrites it. Nothing is allocated before `prepare`.

    Args:
        cache: the pool.
        adapter: the timeline.
        seq_len: tokens of the current frames, a multiple of a frame.
        commit: whether the frames are to stay.
    """

    def __init__(
        self, cache: ARDiffusionKVCache, adapter: KVRequestAdapter, seq_len: int, *, commit: bool
    ) -> None:
        self.cache = cache
        self.adapter = adapter
        self.seq_len = seq_len
        self.commit = commit
        self.num_frames = seq_len // cache.block_size
        self.extra_tokens = 0
        self._metadata: PagedMetadata | None = None
        self._staging: HistoryStaging | None = None
        self._retired = False

    @property
    def prepared(self) -> bool:
        """Whether pages are assigned."""
        return self._metadata is not None

    @property
    def slot_mapping(self) -> torch.Tensor | None:
        """[seq_len] slots of the current frames, None before `prepare`."""
        return None if self._metadata is None else self._metadata.slot_mapping

    @property
    def start_frame(self) -> int:
        """Absolute index of the first current frame; positional encodings use it."""
        return self.adapter.absolute_frames

    @property
    def metadata(self) -> PagedMetadata:
        """Pages and slots; KVStateError before `prepare` and once the context is over."""
        if self._retired:
            raise KVStateError("this paged context is over: its frames were committed, replaced or released")
        if self._metadata is None:
            raise KVStateError("paged layer inputs were used before prepare_paged_context")
        return self._metadata

    def retire(self) -> None:
        """Ends the context: it can no longer read or write."""
        self._retired = True

    def prepare(self, extra_tokens: int = 0) -> None:
        """Assigns pages; the second time does nothing.

        Args:
            extra_tokens: action or register tokens beside the frames, the same in every layer.
        """
        if self._metadata is not None:
            if extra_tokens != self.extra_tokens:
                raise KVStateError(
                    f"paged context was prepared for {self.extra_tokens} extra tokens", field="extra_tokens"
                )
            return
        if extra_tokens < 0:
            raise InvalidArgumentError(
                f"extra_tokens must not be negative, got {extra_tokens}", field="extra_tokens"
            )
        block_size = self.cache.block_size
        extra_pages = -(-extra_tokens // block_size)
        offset = 0 if self.commit else self.num_frames
        extra_ids = self.cache.scratch_block_ids(self.adapter.local_index, offset, extra_pages)
        current = self._current_ids()
        history = list(self.adapter.table.ids[: self.adapter.num_computed_tokens // block_size])
        self.extra_tokens = extra_tokens
        self._metadata = self._build(history, current, extra_ids)
        self._stage(self._metadata, tuple(history))

    def _current_ids(self) -> list[int]:
        if not self.commit:
            return self.cache.scratch_block_ids(self.adapter.local_index, 0, self.num_frames)
        self.cache.allocate(self.adapter, self.seq_len)
        first = self.adapter.num_computed_tokens // self.cache.block_size
        return list(self.adapter.table.ids[first : first + self.num_frames])

    def _build(self, history: list[int], current: list[int], extra_ids: list[int]) -> PagedMetadata:
        cache, block_size = self.cache, self.cache.block_size
        visible = cache.window.visible([*history, *current])
        pages = [*visible, *extra_ids]
        # A row of constant width keeps kernels and captured graphs independent of how far the rollout is.
        extra_width = max(1, len(extra_ids))
        width = cache.window.retained_blocks + extra_width
        num_visible = len(visible) * block_size + self.extra_tokens

        def tensor(values: list[int], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=cache.device)

        return PagedMetadata(
            slot_mapping=tensor(slot_indices(current, 0, self.seq_len, block_size), torch.int64),
            extra_slots=tensor(slot_indices(extra_ids, 0, self.extra_tokens, block_size), torch.int64),
            block_table=tensor([*pages, *[NULL_BLOCK_ID] * (width - len(pages))], torch.int32).unsqueeze(0),
            seq_lens=tensor([num_visible], torch.int32),
            query_start_loc=tensor([0, self.seq_len + self.extra_tokens], torch.int32),
            max_seq_len=width * block_size,
            page_ids=tensor(pages, torch.int64),
            run=single_run(pages),
            num_visible=num_visible,
            num_current_pages=self.num_frames,
        )

    def _stage(self, metadata: PagedMetadata, history: tuple[int, ...]) -> None:
        # Extra tokens lie behind the current frames, and frames beyond the window hide each other: neither is staged.
        if self.extra_tokens or self.num_frames > self.cache.window.window_chunks:
            return
        self._staging = self.cache.staging(self.adapter)
        if self._staging is not None:
            adapter = self.adapter
            self._staging.begin(
                StagingKey(
                    adapter,
                    adapter.resets,
                    adapter.absolute_tokens,
                    adapter.num_computed_tokens,
                    history,
                    metadata.max_seq_len,
                    self.seq_len,
                )
            )

    def write_and_attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        extra_k: torch.Tensor | None = None,
        extra_v: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes the current frames' K and V of one layer, then attends to everything visible.

        Args:
            layer: layer index.
            q: [1, queries, heads, head].
            k: [1, seq_len, kv_heads, head], after norm and positional encoding.
            v: as k.
            extra_k: [1, extra_tokens, kv_heads, head] to scratch, or None where `prepare` was told of none.
            extra_v: as extra_k.

        Returns:
            [1, queries, heads, head].
        """
        metadata = self.metadata
        k_pages, v_pages = self.cache.k_pages[layer], self.cache.v_pages[layer]
        heads, head_size = k_pages.shape[2:]
        if q.dim() != 4 or q.shape[0] != 1 or q.shape[3] != head_size:
            raise KVStateError(
                f"q must have shape (1, queries, heads, {head_size}) in this forward, got {tuple(q.shape)}",
                field="q",
            )
        for name, pages, values in (("k", k_pages, k), ("v", v_pages, v)):
            check_tokens(name, values, self.seq_len, heads, head_size)
            write_tokens(pages, metadata.slot_mapping, values[0])
        for name, pages, extra in (("extra_k", k_pages, extra_k), ("extra_v", v_pages, extra_v)):
            if (extra is not None) != (self.extra_tokens > 0):
                raise KVStateError(
                    f"{name} must hold the {self.extra_tokens} extra tokens of this forward", field=name
                )
            if extra is not None:
                check_tokens(name, extra, self.extra_tokens, heads, head_size)
                write_tokens(pages, metadata.extra_slots, extra[0])
        if self._staging is not None:
            keys, values = self._staging.gather(layer, k_pages, v_pages, metadata)
        else:
            keys, values = read_visible(k_pages, metadata), read_visible(v_pages, metadata)
        return attend(q, keys.unsqueeze(0), values.unsqueeze(0))
