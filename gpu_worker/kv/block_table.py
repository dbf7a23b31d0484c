"""The pages of one KV timeline, and its two kinds of position.

A timeline's *absolute* position counts every token ever committed; positional encodings use it and it is never
re-based. Its *computed* position is the index into the table: dropping pages compacts the table, so it stays bounded
however long the rollout.
"""

from __future__ import annotations

from collections.abc import Sequence

from contracts.errors import InvalidArgumentError, KVStateError


def slot_indices(block_ids: Sequence[int], start: int, count: int, block_size: int) -> list[int]:
    """Slots in the flat pool of token positions [start, start + count) of a table."""
    if block_size <= 0:
        raise InvalidArgumentError(f"block_size must be positive, got {block_size}", field="block_size")
    return [
        block_ids[position // block_size] * block_size + position % block_size
        for position in range(start, start + count)
    ]


class BlockTable:
    """An ordered list of page ids: committed frames first, pages of the commit in flight behind them."""

    def __init__(self) -> None:
        self._ids: list[int] = []

    @property
    def ids(self) -> tuple[int, ...]:
        """The page ids in order."""
        return tuple(self._ids)

    def __len__(self) -> int:
        return len(self._ids)

    def append(self, ids: Sequence[int]) -> None:
        """Adds pages at the end."""
        self._ids.extend(ids)

    def compact(self, start: int, count: int) -> list[int]:
        """Takes `count` pages from `start` out; the later ones move up. Returns the removed ids in order."""
        removed = self._ids[start : start + count]
        if len(removed) != count:
            raise KVStateError(
                f"the block table has {len(self._ids)} pages, [{start}, {start + count}) is outside"
            )
        del self._ids[start : start + count]
        return removed

    def clear(self) -> list[int]:
        """Takes all pages out."""
        return self.compact(0, len(self._ids))


class KVRequestAdapter:
    """One KV timeline: a session's branch, its table and its counters. Only a commit advances it.

    Args:
        request_id: names the timeline.
        local_index: the worker-local slot whose scratch it uses.
        chunk_size: tokens of one frame.
        prefill_tokens: tokens before the first frame.
    """

    def __init__(self, request_id: str, local_index: int, chunk_size: int, prefill_tokens: int = 0) -> None:
        self.request_id = request_id
        self.local_index = local_index
        self.chunk_size = chunk_size
        self.prefill_tokens = prefill_tokens
        self.chunks = 0
        self.compacted_tokens = 0
        self.resets = 0
        self.table = BlockTable()

    @property
    def absolute_tokens(self) -> int:
        """Tokens committed since the start; where the next one stands."""
        return self.prefill_tokens + self.chunks * self.chunk_size

    @property
    def absolute_frames(self) -> int:
        """Frames committed since the start, whatever was dropped."""
        return self.chunks

    @property
    def num_computed_tokens(self) -> int:
        """Committed tokens that the table still addresses."""
        return self.absolute_tokens - self.compacted_tokens

    @property
    def num_tokens(self) -> int:
        """Computed tokens and the frame in flight."""
        return self.num_computed_tokens + self.chunk_size

    def advance(self) -> None:
        """One frame was committed."""
        self.chunks += 1

    def compact(self, start_block: int, tokens: int) -> list[int]:
        """Drops `tokens` (whole pages) from page `start_block` on; returns the freed ids in table order."""
        ids = self.table.compact(start_block, tokens // self.chunk_size)
        self.compacted_tokens += tokens
        return ids

    def reset(self) -> list[int]:
        """Back to position 0; returns all page ids."""
        self.chunks = 0
        self.compacted_tokens = 0
        self.resets += 1
        return self.table.clear()
