"""One forward's view of a timeline: where it writes, what it sees."""

from __future__ import annotations

import torch

from contracts.errors import InvalidArgumentError, KVStateError
from gpu_worker.kv.attention import attend, check_query, check_tokens, write_extra, write_frames
from gpu_worker.kv.block_table import KVRequestAdapter
from gpu_worker.kv.cache import ARDiffusionKVCache
from gpu_worker.kv.lease import Lease
from gpu_worker.kv.metadata import PagedMetadata
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
        lease: says whether the session's KV may be used.
    """

    def __init__(
        self,
        cache: ARDiffusionKVCache,
        adapter: KVRequestAdapter,
        seq_len: int,
        *,
        commit: bool,
        lease: Lease,
    ) -> None:
        self.cache = cache
        self.adapter = adapter
        self.seq_len = seq_len
        self.commit = commit
        self.num_frames = seq_len // cache.block_size
        self.extra_tokens = 0
        self._lease = lease
        self._metadata: PagedMetadata | None = None
        self._staging: HistoryStaging | None = None
        self._staged: StagingKey | None = None
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
        """Pages and slots; KVStateError before `prepare`, outside a call, and once the context is over."""
        self._lease.check()
        if self._retired:
            raise KVStateError("this paged context is over: its frames were committed, replaced or released")
        if self._metadata is None:
            raise KVStateError("paged layer inputs were used before prepare_paged_context")
        return self._metadata

    def retire(self) -> None:
        """Ends the context: it can no longer read or write."""
        self._retired = True

    # ------------------------------------------------------------------------------------------- pages

    def prepare(self, extra_tokens: int = 0) -> None:
        """Assigns pages; the second time does nothing.

        Args:
            extra_tokens: action or register tokens beside the frames, the same in every layer.
        """
        _check_count(extra_tokens)
        if self._metadata is None:
            self._assign(extra_tokens)
        elif extra_tokens != self.extra_tokens:
            raise KVStateError(
                f"paged context was prepared for {self.extra_tokens} extra tokens", field="extra_tokens"
            )

    def _assign(self, extra_tokens: int) -> None:
        cache, adapter = self.cache, self.adapter
        offset = 0 if self.commit else self.num_frames
        extra_pages = -(-extra_tokens // cache.block_size)
        extra = cache.scratch_block_ids(adapter.local_index, offset, extra_pages)
        current = self._current_ids()
        history = adapter.table.ids[: adapter.num_computed_tokens // cache.block_size]
        self.extra_tokens = extra_tokens
        self._metadata = PagedMetadata(
            visible=cache.window.visible([*history, *current]),
            current=current,
            extra=extra,
            extra_tokens=extra_tokens,
            block_size=cache.block_size,
            retained_blocks=cache.window.retained_blocks,
            device=cache.device,
        )
        self._stage(self._metadata, history)

    def _current_ids(self) -> list[int]:
        if not self.commit:
            return self.cache.scratch_block_ids(self.adapter.local_index, 0, self.num_frames)
        self.cache.allocate(self.adapter, self.seq_len)
        first = self.adapter.num_computed_tokens // self.cache.block_size
        return list(self.adapter.table.ids[first : first + self.num_frames])

    def _stage(self, metadata: PagedMetadata, history: tuple[int, ...]) -> None:
        # Extra tokens lie behind the current frames, and frames beyond the window hide each other: neither is staged.
        if self.extra_tokens or self.num_frames > self.cache.window.window_chunks:
            return
        self._staging = self.cache.staging(self.adapter)
        if self._staging is not None:
            adapter = self.adapter
            self._staged = StagingKey(
                adapter,
                adapter.resets,
                adapter.absolute_tokens,
                adapter.num_computed_tokens,
                history,
                metadata.max_seq_len,
                self.seq_len,
            )
            self._staging.begin(self._staged)

    # ------------------------------------------------------------------------------------------- layers

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

        Raises:
            KVStateError: a tensor is wrong, named in `field`, and nothing was written; or this is not the time.
        """
        metadata = self.metadata
        k_pages, v_pages = self.cache.k_pages[layer], self.cache.v_pages[layer]
        self._check(q, k, v, extra_k, extra_v)
        write_frames(k_pages, metadata, k[0])
        write_frames(v_pages, metadata, v[0])
        if extra_k is not None and extra_v is not None:
            write_extra(k_pages, metadata, extra_k[0])
            write_extra(v_pages, metadata, extra_v[0])
        if self._staging is None or self._staged is None:
            return self.cache.attention.attend(q, k_pages, v_pages, metadata)
        # Said in each layer: another branch on the slot may have had its turn since the last one.
        self._staging.begin(self._staged)
        keys, values = self._staging.gather(layer, k_pages, v_pages, metadata)
        return attend(q, keys.unsqueeze(0), values.unsqueeze(0))

    def _check(self, q: object, k: object, v: object, extra_k: object, extra_v: object) -> None:
        device, spec = self.cache.device, self.cache.spec
        check_query(q, spec.num_kv_heads, spec.head_size, device)
        for name, value in (("k", k), ("v", v)):
            check_tokens(name, value, (1, self.seq_len, spec.num_kv_heads, spec.head_size), device)
        for name, value in (("extra_k", extra_k), ("extra_v", extra_v)):
            if (value is not None) != (self.extra_tokens > 0):
                raise KVStateError(
                    f"{name} must hold the {self.extra_tokens} extra tokens of this forward", field=name
                )
            if value is not None:
                check_tokens(name, value, (1, self.extra_tokens, spec.num_kv_heads, spec.head_size), device)


def _check_count(extra_tokens: object) -> None:
    if isinstance(extra_tokens, bool) or not isinstance(extra_tokens, int) or extra_tokens < 0:
        raise InvalidArgumentError(
            f"extra_tokens must be an integer >= 0, got {extra_tokens!r:.80}", field="extra_tokens"
        )
