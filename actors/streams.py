"""Reading a stream behind a cursor, in one typed shape."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any, Final

from contracts.broker import Client, map_exceptions

Entry = tuple[bytes, dict[bytes, bytes]]

BEGINNING: Final = b"0-0"
PAGE: Final = 100


async def newest_id(client: Client, key: str) -> bytes:
    """The id of the last entry, or BEGINNING for a stream that is empty or does not exist."""
    with map_exceptions(key):
        newest: Any = await client.xrevrange(key, count=1)
    return newest[0][0] if newest else BEGINNING


async def read_after(client: Client, key: str, cursor: bytes, *, block_ms: int) -> list[Entry]:
    """Up to PAGE entries behind `cursor`; waits for the first up to `block_ms`, so `client` is one for blocking reads."""
    with map_exceptions(key):
        reply: Any = await client.xread({key: cursor}, count=PAGE, block=block_ms)
    return reply[0][1] if reply else []


class Cursors:
    """How far streams have been read, for as many of them as were read last.

    A cursor that is forgotten, or lies behind, costs a longer way to the next entry and no entry.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._ids: OrderedDict[str, bytes] = OrderedDict()

    def get(self, name: str) -> bytes | None:
        """The id of the last entry read, if it is remembered."""
        return self._ids.get(name)

    def put(self, name: str, entry_id: bytes) -> None:
        """Remembers it, in place of the one that has not been used for longest."""
        self._ids[name] = entry_id
        self._ids.move_to_end(name)
        if len(self._ids) > self._limit:
            self._ids.popitem(last=False)


class CancelGuard:
    """Notices a cancellation that a read or write swallowed.

    The client library sends through `asyncio.wait_for`, which on Python 3.11 loses a cancellation that arrives in the
    moment of its success. A loop of reads would then go on for ever.
    """

    def __init__(self) -> None:
        self._watch(asyncio.current_task())

    def _watch(self, task: asyncio.Task[Any] | None) -> None:
        self._task = task
        # Clean-up in a task that was cancelled earlier may call us too: only what comes from now on counts.
        self._before = 0 if task is None else task.cancelling()

    def check(self) -> None:
        """Raises CancelledError if this task was cancelled since; a generator may have passed to another task."""
        task = asyncio.current_task()
        if task is not self._task:
            self._watch(task)
        elif task is not None and task.cancelling() > self._before:
            raise asyncio.CancelledError
