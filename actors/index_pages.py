"""An index read page by page from its lowest score upwards, in bounded memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

from contracts.broker import Client, map_exceptions

PAGE: Final = 200

IndexEntry = tuple[str, float]
"""A member of an index and its score."""


async def index_pages(
    client: Client, key: str, *, up_to: float | str = "+inf", size: int = PAGE
) -> AsyncIterator[list[IndexEntry]]:
    """Yields every entry that stays for the length of the reading, once.

    Pages begin at the score at which the last one ended, not at a rank: what others add or remove meanwhile moves
    ranks, but no scores.
    """
    lowest: float | str = "-inf"
    at_lowest: set[str] = set()
    skip = 0
    while True:
        with map_exceptions(key):
            raw: Any = await client.zrangebyscore(key, lowest, up_to, start=skip, num=size, withscores=True)
        page = [(name.decode(errors="replace"), float(score)) for name, score in raw]
        fresh = [entry for entry in page if entry[0] not in at_lowest]
        if fresh:
            yield fresh
        if len(page) < size:
            return
        last = page[-1][1]
        if last == lowest:
            skip += size
        else:
            lowest, skip, at_lowest = last, 0, set()
        at_lowest |= {name for name, score in page if score == last}
