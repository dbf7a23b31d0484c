"""The janitor's loop: tombstones that are due each tick, limits of clients every few seconds, everything each period.

It is the truth of the broker that is compared, so a janitor that was killed at any point, or a second one beside it,
changes nothing: what is left to do is found again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final

import structlog

from actors.broker_pool import Broker
from actors.config import JanitorSettings
from actors.index_pages import index_pages
from actors.janitor.clients import Clients
from actors.janitor.closes import TICK_MS, Closes, Enqueue
from actors.janitor.connection import Connection
from actors.janitor.facts import read_facts
from actors.janitor.indexes import Indexes, live_pages
from actors.janitor.sweeps import sweep_long_streams
from actors.store import SessionStore
from contracts.broker import map_exceptions
from contracts.errors import BrokerError, WorldlineError
from contracts.index_scripts import IndexScripts
from contracts.lifecycle import Status

_LIMITS_MS: Final = 5_000
_FORGOTTEN_MS: Final = 60_000
"""A janitor that was not seen for so long is taken out of the index of janitors."""


class Reconciler:
    """Compares what ought to be with what is, and sends the commands that are missing.

    Args:
        settings: the period, the limit of attempts, the broker.
        enqueue: how a close retry gets onto the job queue.
    """

    def __init__(self, settings: JanitorSettings, enqueue: Enqueue) -> None:
        self._settings = settings
        self._broker = Broker(settings=settings)
        self._store = SessionStore(self._broker.commands, settings.keys)
        self._connection = Connection(self._broker.commands)
        self._closes = Closes(self._broker, settings, enqueue)
        self._clients = Clients(self._broker, settings.reconcile_ms)
        self._indexes = Indexes(self._broker)
        self._log = structlog.get_logger("janitor").bind(janitor=settings.janitor_id)
        self._limits = _Schedule(min(_LIMITS_MS, settings.reconcile_ms))
        self._everything = _Schedule(settings.reconcile_ms)

    async def run(self, stop: asyncio.Event, *, on_ready: Callable[[], None]) -> None:
        """Runs until `stop` is set; `on_ready` is called once, after the first round."""
        waiting: Callable[[], None] | None = on_ready
        async with self._heartbeat(stop):
            while not stop.is_set():
                try:
                    await self._round()
                    if waiting is not None:
                        waiting()
                        waiting = None
                except BrokerError as error:
                    self._connection.broken()
                    self._log.warning("broker does not answer", error=str(error))
                await _wait(stop, min(TICK_MS, self._settings.reconcile_ms))
        await self._broker.aclose()

    async def _round(self) -> None:
        await self._connection.look()
        now_ms = await self._store.now_ms()
        await self._guarded(self._closes.look(now_ms))
        if self._limits.is_due():
            await self._guarded(self._look_at_live(now_ms))
        if self._everything.is_due():
            self._indexes.begin()
            for status in Status:
                await self._guarded(self._look_at_index(status, now_ms))
            await self._guarded(self._indexes.check_tombstones(now_ms))
            await self._guarded(self._indexes.check_others())

    async def _guarded(self, step: Coroutine[Any, Any, None]) -> None:
        """One step that finds corrupt data must not keep the others from running."""
        try:
            await step
        except BrokerError:
            raise
        except WorldlineError as error:
            self._log.error("step failed", error=str(error), field=error.field)

    async def _look_at_live(self, now_ms: int) -> None:
        for index in range(await self._broker.partitions() or 0):
            async for names in live_pages(self._broker, index):
                facts = await read_facts(self._broker, names)
                await self._clients.look(facts.values(), now_ms, self._connection.age_ms)

    async def _look_at_index(self, status: Status, now_ms: int) -> None:
        async for page in index_pages(self._broker.commands, self._settings.keys.index(status)):
            facts = await self._indexes.check_status(status, page, now_ms)
            await sweep_long_streams(self._broker, facts)
            await self._clients.look(facts, now_ms, self._connection.age_ms)

    @asynccontextmanager
    async def _heartbeat(self, stop: asyncio.Event) -> AsyncIterator[None]:
        """Says that this janitor is there, also while a round takes long; takes it back at the orderly end."""
        task = asyncio.create_task(self._beat_until(stop))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
            try:
                with map_exceptions(self._settings.keys.janitors):
                    await self._broker.commands.zrem(self._settings.keys.janitors, self._settings.janitor_id)
            except BrokerError as error:
                self._log.warning("leaving failed", error=str(error))

    async def _beat_until(self, stop: asyncio.Event) -> None:
        key = self._settings.keys.janitors
        indexes = IndexScripts(self._broker.commands, self._settings.keys)
        while not stop.is_set():
            try:
                now_ms = await self._store.now_ms()
                await indexes.add(key, self._settings.janitor_id, now_ms)
                with map_exceptions(key):
                    await self._broker.commands.zremrangebyscore(key, "-inf", now_ms - _FORGOTTEN_MS)
            except WorldlineError as error:
                self._log.warning("heartbeat failed", error=str(error))
            await _wait(stop, self._settings.heartbeat_ms)


class _Schedule:
    """Something to be done each period, and at once at first."""

    def __init__(self, period_ms: int) -> None:
        self._period_s = period_ms / 1000
        self._next = 0.0

    def is_due(self) -> bool:
        """Whether it is time; the next time is a period from now."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self._period_s
        return True


async def _wait(stop: asyncio.Event, timeout_ms: int) -> None:
    try:
        await asyncio.wait_for(stop.wait(), timeout_ms / 1000)
    except TimeoutError:
        return
