"""The GPU worker: takes requests off its stream one at a time, and answers them.

    claim the name -> answer what an earlier start left, announce -> load the model -> read, run, answer, ...

A request is acknowledged only once its reply has been added to the inbox that it named. Whatever the broker does in
between, the entry is then read again, and answered from the ledger where it ran.

Two threads: the heartbeat and the notices of evictions run here, beside signals; reading, running and answering in the
engine's (`Server`), where a call of the engine stops everything else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import structlog

from contracts.identity import new_incarnation
from contracts.worker_link import WorkerLink
from gpu_worker.background import background
from gpu_worker.backoff import Outage
from gpu_worker.config import WorkerSettings
from gpu_worker.engine import TickEngine
from gpu_worker.engine_thread import EngineThread
from gpu_worker.housekeeping import Evicted, EvictionNotices
from gpu_worker.ledger import Ledger
from gpu_worker.name import NameLease, NameTakenError
from gpu_worker.partitions import PartitionCount
from gpu_worker.serving import Server
from gpu_worker.takeover import announce, answer_left_requests

NOTICE_PATIENCE_S: Final = 2.0
ABANDON_S: Final = 1.0

log = structlog.get_logger(__name__)


class Worker:
    """One start of one worker.

    Args:
        settings: where the broker is, and what this worker is called.
        make_engine: builds the engine, in the engine's thread.
        on_ready: called when the worker begins to read requests.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        make_engine: Callable[[], TickEngine],
        *,
        on_ready: Callable[[Worker], None] = lambda _: None,
    ) -> None:
        self.settings = settings
        self.worker_id = settings.worker_id
        self.incarnation = new_incarnation()
        self.engine = EngineThread(make_engine, self._evicted)
        self._on_ready = on_ready
        self._link = self._make_link()
        self._ledger = Ledger(settings.queue_limit_ms / 1000)
        self._outage = Outage()
        self._name = NameLease(self._link, self.engine, settings, on_taken=self.stop)
        self._partitions = PartitionCount(self._link)
        self._notices = EvictionNotices(self._link, self._outage, self._partitions.get)
        self._loop = asyncio.get_running_loop()
        self._server = Server(
            self._make_link(),
            self._ledger,
            self.engine,
            self._name,
            self._outage,
            block_ms=settings.block_ms,
            reconcile_s=settings.reconcile_ms / 1000,
        )
        self._stopping = asyncio.Event()

    def _make_link(self) -> WorkerLink:
        """One for each event loop, because a connection belongs to one."""
        settings = self.settings
        return WorkerLink(
            settings.url,
            keys=settings.keys,
            worker_id=settings.worker_id,
            incarnation=self.incarnation,
            block_ms=settings.block_ms,
            payload_url=settings.payload_url,
            payload_ttl_ms=settings.payload_ttl_ms,
        )

    def stop(self) -> None:
        """Ends the worker: the request in hand is finished and answered, the rest stays in the stream."""
        self._stopping.set()
        self._outage.end_soon()
        self._server.stop()

    async def run(self) -> None:
        """Runs until `stop`.

        Raises:
            NameTakenError: another live process holds the name.
            BrokerError: the broker can't be reached at start.
            Whatever building the engine, or its integrity check, raises.
        """
        try:
            await self._link.check()
            if not await self._name.claim(self._stopping):
                return
            async with background(self._name.run(), self._notices.run()):
                await self._take_over()
                if await self._load():
                    await self._serve()
            if self._name.taken:
                raise NameTakenError(
                    f"another process has taken the name {self.worker_id}", field="worker_id"
                )
        finally:
            await self.engine.shut_down()
            await self._name.leave()
            await self._link.close()

    async def _take_over(self) -> None:
        await self._link.requests.ensure_group()
        answered = await answer_left_requests(self._link, self._ledger, self._partitions.get)
        told = await announce(self._link, self._partitions.get)
        log.info("started", worker=self.worker_id, incarnation=self.incarnation, answered=answered, told=told)

    async def _load(self) -> bool:
        """Loads the model; False when the worker was told to end meanwhile."""
        if self._stopping.is_set():
            return False
        loading = asyncio.ensure_future(self.engine.start())
        stopping = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not loading.done():
            loading.cancel()
            return False
        loading.result()
        await self._name.show_ready()
        self._on_ready(self)
        return True

    async def _serve(self) -> None:
        serving = asyncio.ensure_future(self.engine.run(self._server.run))
        try:
            await asyncio.shield(serving)
        except asyncio.CancelledError:
            self._server.abandon()
            await asyncio.wait({serving}, timeout=0 if self.engine.running else ABANDON_S)
            raise
        if not self._name.taken:
            await self._notices.flush(NOTICE_PATIENCE_S)

    def _evicted(self, session_id: str) -> None:
        """Called in the engine's thread, in the middle of a call: the session is told at once."""
        life = self._ledger.released(session_id)
        if life is not None:
            self._loop.call_soon_threadsafe(self._notices.add, Evicted(session_id, life))
