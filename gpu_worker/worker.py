"""The GPU worker: takes requests off its stream one at a time, and answers them.

    claim the name -> answer what an earlier start left, announce -> load the model -> read, run, answer, ...

A request is acknowledged only once its reply has been added to the inbox that it named. Whatever the broker does in
between, the entry is then read again, and answered from the ledger where it ran.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Final

import structlog

from contracts import failpoints
from contracts.errors import (
    BrokerError,
    CorruptDataError,
    InvalidArgumentError,
    TickFailedError,
    WorldlineError,
)
from contracts.identity import new_incarnation
from contracts.messages import WorkerRequest
from contracts.request_stream import Delivery, lacks_group
from contracts.worker_link import WorkerLink
from gpu_worker.backoff import Backoff, Outage
from gpu_worker.config import WorkerSettings
from gpu_worker.engine import TickEngine
from gpu_worker.engine_thread import EngineThread
from gpu_worker.housekeeping import Evicted, EvictionNotices, ResidentCheck
from gpu_worker.ledger import Ledger
from gpu_worker.name import NameLease, NameTakenError
from gpu_worker.partitions import PartitionCount
from gpu_worker.requests import Outgoing, RequestHandler, read_request, salvage
from gpu_worker.takeover import announce, answer_left_requests

INTEGRITY_PERIOD_S: Final = 5.0
NOTICE_PATIENCE_S: Final = 2.0
INTERRUPT_PERIOD_S: Final = 0.05

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
        self._link = WorkerLink(
            settings.url,
            keys=settings.keys,
            worker_id=settings.worker_id,
            incarnation=self.incarnation,
            block_ms=settings.block_ms,
            payload_url=settings.payload_url,
            payload_ttl_ms=settings.payload_ttl_ms,
        )
        self._ledger = Ledger(settings.queue_limit_ms / 1000)
        self._gate = asyncio.Lock()
        self._outage = Outage()
        self._backoff = Backoff()
        self._name = NameLease(self._link, self.engine, settings, on_taken=self.stop)
        self._handler = RequestHandler(self._link, self._ledger, self.engine, busy=self._name.mark_busy)
        self._partitions = PartitionCount(self._link)
        self._notices = EvictionNotices(self._link, self._outage, self._partitions.get)
        self._residents = ResidentCheck(
            self._link,
            self._ledger,
            self.engine,
            gate=self._gate,
            broker_ms=lambda: self._name.broker_ms,
        )
        self._stopping = asyncio.Event()
        self._waiting: asyncio.Task[None] | None = None
        self._unfinished: dict[bytes, WorkerRequest] = {}
        self._own_first = True
        self._integrity_due_s = 0.0

    # ------------------------------------------------------------------------------------------------ life

    def stop(self) -> None:
        """Ends the worker: the request in hand is finished and answered, the rest stays in the stream."""
        self._stopping.set()
        self._outage.end_soon()
        self._interrupt()

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
            async with _background(self._name.run(), self._notices.run()):
                await self._take_over()
                if await self._load():
                    async with _background(self._residents.run(self.settings.reconcile_ms / 1000)):
                        await self._serve()
            if self._name.taken:
                raise NameTakenError(
                    f"another process has taken the name {self.worker_id}", field="worker_id"
                )
        finally:
            self.engine.shut_down()
            await self._name.leave()
            await self._link.close()

    def _interrupt(self) -> None:
        """Ends a blocked read. Repeated, because the client library may lose one that comes while it sends."""
        if self._waiting is not None:
            self._waiting.cancel()
            asyncio.get_running_loop().call_later(INTERRUPT_PERIOD_S, self._interrupt)

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

    def _evicted(self, session_id: str) -> None:
        life = self._ledger.released(session_id)
        if life is not None:
            self._notices.add(Evicted(session_id, life))

    # ------------------------------------------------------------------------------------------------ the loop

    async def _serve(self) -> None:
        """Reads and answers until told to end; an outage of the broker only makes it wait."""
        while not self._stopping.is_set():
            try:
                deliveries = await self._read()
                for delivery in deliveries:
                    await self._process(delivery)
                if not deliveries:
                    await self._idle()
                self._backoff.reset()
            except NameTakenError:
                break
            except (BrokerError, CorruptDataError) as error:
                await self._recover(error)
        await self._finish_in_hand()

    async def _read(self) -> list[Delivery]:
        """The next entries; none when none came, or when the worker is to end."""
        if not self._name.holds:
            await self._name.beat()
        if self._own_first:
            left = await self._link.requests.read_own()
            if left:
                return left
            self._own_first = False
        if self._stopping.is_set():
            return []
        reading = self._waiting = asyncio.current_task()
        assert reading is not None
        try:
            delivery = await self._link.requests.read_new(self.settings.block_ms)
        except asyncio.CancelledError:
            if not self._stopping.is_set():
                raise
            return []
        finally:
            self._waiting = None
            while self._stopping.is_set() and reading.uncancel() > 0:
                pass
        return [] if delivery is None else [delivery]

    async def _process(self, delivery: Delivery) -> None:
        failpoints.hit("worker.request.read")
        answer = await self._answer(delivery)
        if answer is not None:
            failpoints.hit("worker.reply.before")
            await self._send(answer)
            failpoints.hit("worker.reply.after")
        self._link.requests.finish(delivery.entry_id)
        self._unfinished.pop(delivery.entry_id, None)

    async def _answer(self, delivery: Delivery) -> Outgoing | None:
        if not delivery.fields:
            return self._answer_lost(delivery.entry_id)
        try:
            request = read_request(delivery.fields)
        except InvalidArgumentError as error:
            log.warning("a request is malformed", entry_id=delivery.entry_id.decode(), error=error.message)
            return salvage(delivery.fields, error, self.incarnation)
        self._unfinished[delivery.entry_id] = request
        async with self._gate:
            return await self._handler.handle(delivery, request)

    def _answer_lost(self, entry_id: bytes) -> Outgoing | None:
        """An entry that was deleted after it had been delivered: answered if it was read before that."""
        request = self._unfinished.get(entry_id)
        if request is None:
            log.warning("a request was deleted unanswered", entry_id=entry_id.decode())
            return None
        lost = TickFailedError("the request was deleted before it ran", field="request", code="payload_lost")
        return Outgoing(request.reply_to, self._handler.answer(request, error=lost))

    async def _send(self, answer: Outgoing) -> None:
        reply = answer.reply

        async def write() -> None:
            inbox = answer.reply_to or self._link.inbox_of(reply.session_id, await self._partitions.get())
            await self._link.send_reply(inbox, reply, answer.blobs)

        try:
            await self._outage.persist(write)
        except BrokerError:
            raise
        except WorldlineError as error:
            # No reader can ever get it; the ledger still has it, for whoever sends the request again.
            log.warning("a reply can't be delivered", request_id=reply.request_id, error=error.message)

    async def _idle(self) -> None:
        """Nothing came for a while: entries that went astray are looked for, and the engine's memory is counted."""
        self._own_first = True
        if time.monotonic() < self._integrity_due_s or self._stopping.is_set():
            return
        self._integrity_due_s = time.monotonic() + INTEGRITY_PERIOD_S
        async with self._gate:
            await self.engine.check_integrity()

    async def _recover(self, error: WorldlineError) -> None:
        log.warning("the broker is in trouble", error=error.message)
        self._own_first = True
        await self._sleep(self._backoff.next_s())
        if lacks_group(error):
            with contextlib.suppress(WorldlineError):
                await self._link.requests.ensure_group()

    async def _sleep(self, delay_s: float) -> None:
        """Waits, but not past the order to end."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), delay_s)

    async def _finish_in_hand(self) -> None:
        """What was delivered in the very moment of the end is in hand too."""
        if self._name.taken:
            return
        try:
            while deliveries := await self._link.requests.read_own():
                for delivery in deliveries:
                    await self._process(delivery)
            await self._notices.flush(NOTICE_PATIENCE_S)
        except WorldlineError as error:
            log.warning("a request in hand is left to the next start", error=error.message)


@contextlib.asynccontextmanager
async def _background(*coroutines: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Tasks that run beside the body and end with it; what one of them raises is raised by the body's end."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
