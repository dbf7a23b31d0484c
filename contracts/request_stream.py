"""A worker's end of its request stream: one consumer of one group, which acknowledges as it reads.

An entry is in the stream until its reply has been sent, so what is in it is unfinished. The consumer's name is the
worker's id: what an earlier start of the worker took and did not finish is found again among the consumer's own
pending entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from contracts.broker import Client, map_exceptions
from contracts.errors import CorruptDataError, WorldlineError
from contracts.keys import WORKER_GROUP, WorkerKeys

Entry = tuple[bytes, dict[bytes, bytes]]
"""Entry id and fields; no fields where the entry was deleted after it had been delivered."""

_OWN_AT_ONCE: Final = 16


class RequestStream:
    """Reads and finishes requests.

    Args:
        client: for blocking reads; nothing else runs on it.
        keys: the worker's keys.
        consumer: the worker's id.
    """

    def __init__(self, client: Client, keys: WorkerKeys, consumer: str) -> None:
        self._client = client
        self._keys = keys
        self._consumer = consumer
        self._finished: list[bytes] = []

    async def ensure_group(self) -> None:
        """Makes stream and group where they are missing. The group starts at 0: nothing in the stream is done."""
        key = self._keys.requests
        try:
            with map_exceptions(key):
                await self._client.xgroup_create(key, WORKER_GROUP, id="0", mkstream=True)
        except CorruptDataError as error:
            if "BUSYGROUP" not in error.message:
                raise

    def finish(self, entry_id: bytes) -> None:
        """Marks an entry, whose reply was sent, to be acknowledged and deleted by the next read or `flush`."""
        self._finished.append(entry_id)

    async def read_new(self, block_ms: int) -> list[Entry]:
        """At most one entry that nobody has seen, waiting up to `block_ms` for it. Acknowledges what is finished."""
        return await self._read(">", 1, block_ms)

    async def read_own(self) -> list[Entry]:
        """Entries that were delivered to this consumer and not finished, oldest first. Acknowledges what is."""
        return await self._read("0", _OWN_AT_ONCE, None)

    async def flush(self) -> None:
        """Acknowledges and deletes what is finished, and says that the worker is idle."""
        if self._finished:
            await self._execute(self._pipeline(), len(self._finished))

    async def _read(self, start: str, count: int, block_ms: int | None) -> list[Entry]:
        # Acknowledging on the way to the next read costs no round trip of its own.
        pipeline, acknowledged = self._pipeline(), len(self._finished)
        pipeline.xreadgroup(WORKER_GROUP, self._consumer, {self._keys.requests: start}, count=count, block=block_ms)
        streams = (await self._execute(pipeline, acknowledged))[-1]
        return [(entry_id, fields or {}) for _, entries in streams or () for entry_id, fields in entries]

    def _pipeline(self) -> Any:
        pipeline = self._client.pipeline(transaction=False)
        if self._finished:
            pipeline.xack(self._keys.requests, WORKER_GROUP, *self._finished)
            pipeline.xdel(self._keys.requests, *self._finished)
            pipeline.hdel(self._keys.info, "busy_since")
        return pipeline

    async def _execute(self, pipeline: Any, acknowledged: int) -> Sequence[Any]:
        with map_exceptions(self._keys.requests):
            results: Sequence[Any] = await pipeline.execute(raise_on_error=False)
            acks = 3 if acknowledged else 0
            for result in results[:acks]:
                if isinstance(result, Exception):
                    raise result
            del self._finished[:acknowledged]
            for result in results[acks:]:
                if isinstance(result, Exception):
                    raise result
        return results


def lacks_group(error: WorldlineError) -> bool:
    """Whether a read failed because stream or group are gone, so that `ensure_group` repairs it."""
    return "NOGROUP" in error.message or "UNBLOCKED" in error.message
