"""Indexes against hashes: the state hash is right, and an index that says otherwise is put right.

An entry may be too many for a moment, while a host is just writing the state. So what is taken out is old, and only as
long as nobody has entered it anew; what is missing is added once it was missing twice in a row.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, Final

import structlog

from actors.broker_pool import Broker
from actors.index_pages import PAGE, index_pages
from actors.janitor.facts import Facts, read_facts
from actors.store import ENDING
from contracts.broker import map_exceptions
from contracts.index_scripts import IndexScripts
from contracts.lifecycle import Status

GRACE_MS: Final = 60_000
"""Much longer than any host takes from entering an index to writing the state."""

_Lack = tuple[str, str, int]
"""An index, a session that is missing in it, and when the session changed last."""


class Indexes:
    """Compares the indexes with the hashes."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._lacking_before: set[_Lack] = set()
        self._lacking: set[_Lack] = set()
        self._scripts = IndexScripts(broker.commands, broker.keys)
        self._log = structlog.get_logger("janitor")

    def begin(self) -> None:
        """A pass over everything begins."""
        self._lacking_before, self._lacking = self._lacking, set()

    async def check_status(
        self, status: Status, page: Iterable[tuple[str, float]], now_ms: int
    ) -> list[Facts]:
        """Puts one page of a status index right; returns the facts of those that are in it rightly."""
        scores = dict(page)
        facts = await read_facts(self._broker, scores)
        lacking = await self.add_missing(facts.values())
        for item in facts.values():
            if item.status is status or self._may_be_in_writing(
                status, item, scores[item.session_id], now_ms
            ):
                continue
            if item.session_id not in lacking:
                await self._drop(self._broker.keys.index(status), item, scores[item.session_id])
        return [item for item in facts.values() if item.status is status]

    @staticmethod
    def _may_be_in_writing(status: Status, item: Facts, score: float, now_ms: int) -> bool:
        if status is Status.CLOSED and item.status is None:
            return False  # its time of retention is over; it was written before it could expire
        return score > now_ms - GRACE_MS

    async def check_tombstones(self, now_ms: int) -> None:
        """Takes out of the tombstone index what needs no close any more."""
        key = self._broker.keys.tombstones
        async for page in index_pages(self._broker.commands, key):
            scores = dict(page)
            facts = await read_facts(self._broker, scores)
            await self.add_missing(facts.values())
            for item in facts.values():
                over = item.status in (None, Status.CLOSED)
                closing_soon = scores[item.session_id] > now_ms - GRACE_MS
                if over or (item.status not in ENDING and not closing_soon):
                    await self._drop(key, item, scores[item.session_id])

    async def check_others(self) -> None:
        """Sessions that partitions or workers know: each is in the index of its status."""
        async for names in self._known_elsewhere():
            await self.add_missing((await read_facts(self._broker, names)).values())

    async def add_missing(self, items: Iterable[Facts]) -> set[str]:
        """Enters sessions where they are missing; returns those that are in an index too few.

        A host moves a session from index to index while we look, so an entry is missing only if it was the last time
        and the session has not changed since.
        """
        wanted = [(key, item) for item in items for key in self._keys_of(item)]
        if not wanted:
            return set()
        pipeline = self._broker.commands.pipeline(transaction=False)
        for key, item in wanted:
            pipeline.zscore(key, item.session_id)
        with map_exceptions("sessions index"):
            scores = await pipeline.execute()
        lacking = [pair for pair, score in zip(wanted, scores, strict=True) if score is None]
        for key, item in lacking:
            lack = (key, item.session_id, item.updated_at_ms)
            self._lacking.add(lack)
            if lack in self._lacking_before:
                await self._add(key, item)
        return {item.session_id for _, item in lacking}

    async def _add(self, key: str, item: Facts) -> None:
        with map_exceptions(key):
            # In the tombstone index this score means that the close is due.
            added = await self._broker.commands.zadd(key, {item.session_id: item.updated_at_ms}, nx=True)
        now = (await read_facts(self._broker, [item.session_id])).get(item.session_id)
        if now is None or now.status is not item.status:  # it has moved on in this very moment
            await self._scripts.drop(key, item.session_id, item.updated_at_ms)
        elif added:
            self._log.warning("index entry was missing", index=key, session_id=item.session_id)

    def _keys_of(self, item: Facts) -> list[str]:
        if item.status is None:
            return []
        under_cleanup = [self._broker.keys.tombstones] if item.status in ENDING else []
        return [self._broker.keys.index(item.status), *under_cleanup]

    async def _drop(self, key: str, item: Facts, score: float) -> None:
        if await self._scripts.drop(key, item.session_id, score):
            self._log.info("index entry dropped", index=key, session_id=item.session_id, status=item.status)

    async def _known_elsewhere(self) -> AsyncIterator[list[str]]:
        """Pages of session ids out of the partitions' live sets and the workers' reservations."""
        client, keys = self._broker.commands, self._broker.keys
        for index in range(await self._broker.partitions() or 0):
            async for names in live_pages(self._broker, index):
                yield names
        async for page in index_pages(client, keys.workers):
            for worker_id, _ in page:
                key = keys.worker(worker_id).sessions
                with map_exceptions(key):
                    reserved: Any = await client.hkeys(key)
                for names in _decoded_pages(reserved):
                    yield names


async def live_pages(broker: Broker, partition: int) -> AsyncIterator[list[str]]:
    """The sessions in a partition's live set, in pages."""
    key = broker.keys.partition(partition).live
    with map_exceptions(key):
        members: Any = await broker.commands.smembers(key)
    for names in _decoded_pages(members):
        yield names


def _decoded_pages(names: Iterable[bytes]) -> Iterator[list[str]]:
    ordered = sorted(name.decode(errors="replace") for name in names)
    return (ordered[start : start + PAGE] for start in range(0, len(ordered), PAGE))
