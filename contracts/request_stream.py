"""A worker's end of its request stream: one consumer of one group, which acknowledges as it reads.

An entry is in the stream until its reply has been sent, so what is in it is unfinished. The consumer's name is the
worker's id: what an earlier start of the worker took and did not finish is found again among the consumer's own
pending entries.

A read is one round trip of a worker that has nothing else to do, so what belongs together goes with it: the
acknowledgement of what was finished before it, and the busy mark for what it delivers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from contracts import failpoints
from contracts.broker import Client, map_exceptions
from contracts.errors import CorruptDataError, WorldlineError
from contracts.keys import WORKER_GROUP, WorkerKeys
from contracts.scripts import script_source

Entry = tuple[bytes, dict[bytes, bytes]]
"""Entry id and fields; no fields where the entry was deleted after it had been delivered."""

_MARK_BUSY: Final = hashlib.sha1(
    script_source("worker_mark_busy").encode(), usedforsecurity=False
).hexdigest()


@dataclass(frozen=True, slots=True)
class Delivery:
    """One entry, and when the worker was marked busy for it (broker time in ms; None: it was not)."""

    entry_id: bytes
    fields: dict[bytes, bytes]
    busy_since_ms: int | None = None


class RequestStream:
    """Reads and finishes requests.

    Args:
        client: for blocking reads; nothing else runs on it.
        keys: the worker's keys.
        consumer: the worker's id.
        incarnation: the start of the worker that reads.
    """

    def __init__(self, client: Client, keys: WorkerKeys, consumer: str, incarnation: str) -> None:
        self._client = client
        self._keys = keys
        self._consumer = consumer
        self._incarnation = incarnation
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

    async def read_new(self, block_ms: int) -> Delivery | None:
        """An entry that nobody has seen, waiting up to `block_ms` for it. Acknowledges what is finished."""
        pipeline, finished = self._pipeline(), len(self._finished)
        self._add_read(pipeline, ">", 1, block_ms)
        info, requests = self._keys.info, self._keys.requests
        pipeline.evalsha(_MARK_BUSY, 2, info, requests, self._incarnation, WORKER_GROUP, self._consumer)
        # The mark fails harmlessly where the script is not loaded: whoever runs the entry then asks for it again.
        *results, mark = await self._run(pipeline, finished, optional=1)
        entries = _entries(results[-1])
        if not entries:
            return None
        marked = isinstance(mark, list) and mark[0] == b"BUSY"
        return Delivery(*entries[0], int(mark[1]) if marked else None)

    async def read_own(self, count: int = 1) -> list[Delivery]:
        """Entries that were delivered to this consumer and not finished, oldest first. Acknowledges what is.

        A worker that runs what it reads takes one: then the oldest entry that is pending is the one in hand.
        """
        pipeline, finished = self._pipeline(), len(self._finished)
        self._add_read(pipeline, "0", count, None)
        results = await self._run(pipeline, finished)
        return [Delivery(*entry) for entry in _entries(results[-1])]

    async def flush(self) -> None:
        """Acknowledges and deletes what is finished, and says that the worker is idle."""
        if self._finished:
            await self._run(self._pipeline(), len(self._finished))

    def _add_read(self, pipeline: Any, start: str, count: int, block_ms: int | None) -> None:
        # Not the library's own method: its telemetry costs as much as the rest of the call.
        block = () if block_ms is None else ("BLOCK", block_ms)
        group = ("GROUP", WORKER_GROUP, self._consumer)
        pipeline.execute_command(
            "XREADGROUP", *group, "COUNT", count, *block, "STREAMS", self._keys.requests, start
        )

    def _pipeline(self) -> Any:
        pipeline = self._client.pipeline(transaction=False)
        if self._finished:
            pipeline.xack(self._keys.requests, WORKER_GROUP, *self._finished)
            pipeline.xdel(self._keys.requests, *self._finished)
            pipeline.hdel(self._keys.info, "busy_since")
        return pipeline

    async def _run(self, pipeline: Any, finished: int, optional: int = 0) -> Sequence[Any]:
        """The results, of which the last `optional` may be exceptions. `finished` entries were acknowledged first."""
        if finished:
            failpoints.hit("worker.ack.before")
        with map_exceptions(self._keys.requests):
            results: Sequence[Any] = await pipeline.execute(raise_on_error=False)
            acknowledgements = 3 if finished else 0
            _raise_first(results[:acknowledgements])
            del self._finished[:finished]
            _raise_first(results[acknowledgements : len(results) - optional])
        if finished:
            failpoints.hit("worker.ack.after")
        return results


def _raise_first(results: Sequence[Any]) -> None:
    for result in results:
        if isinstance(result, Exception):
            raise result


def _entries(streams: Any) -> list[Entry]:
    return [(entry_id, fields or {}) for _, entries in streams or () for entry_id, fields in entries]


def lacks_group(error: WorldlineError) -> bool:
    """Whether a read failed because stream or group are gone, so that `ensure_group` repairs it."""
    return "NOGROUP" in error.message or "UNBLOCKED" in error.message
