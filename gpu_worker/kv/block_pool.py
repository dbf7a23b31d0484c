"""The free queue of managed pages."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from contracts.capacity import NULL_BLOCK_ID
from contracts.errors import InvalidArgumentError, KVStateError, PoolExhaustedError


class BlockPool:
    """Hands out page ids 1 .. num_blocks-1, the lowest first; page 0 is the null page and is never handed out.

    Lowest first keeps the touched part of the pool small, and a session's pages close enough together that attention
    can often read them as one run, without a copy.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise InvalidArgumentError(f"num_blocks must be at least 2, got {num_blocks}", field="num_blocks")
        self.num_blocks = num_blocks
        self._free = list(range(NULL_BLOCK_ID + 1, num_blocks))  # sorted, so a heap
        self._in_use: set[int] = set()

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now."""
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """Pages in all, without the null page."""
        return self.num_blocks - 1

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages, all or none; PoolExhaustedError when fewer are free."""
        if count > len(self._free):
            raise PoolExhaustedError(f"KV pool exhausted: {count} pages asked for, {len(self._free)} free")
        ids = [heapq.heappop(self._free) for _ in range(count)]
        self._in_use.update(ids)
        return ids

    def free(self, ids: Iterable[int]) -> None:
        """Gives pages back; KVStateError for one that is not in use."""
        for block_id in ids:
            if block_id not in self._in_use:
                raise KVStateError(f"page {block_id} was freed but is not in use")
            self._in_use.remove(block_id)
            heapq.heappush(self._free, block_id)

    def check_conservation(self, owned: Iterable[int]) -> None:
        """KVStateError unless every page is either free or in exactly one table.

        Args:
            owned: the page ids of all tables.
        """
        ids = list(owned)
        if len(set(ids)) != len(ids):
            raise KVStateError("a KV page is in two tables")
        if set(ids) != self._in_use:
            raise KVStateError(f"{len(self._in_use)} KV pages are in use, the tables hold {len(ids)}")
        if len(self._free) + len(ids) != self.num_usable:
            raise KVStateError(f"{len(self._free)} free and {len(ids)} used pages are not {self.num_usable}")
