"""What a worker does in its engine's thread: reads requests, has them run, answers, and looks after what it holds."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

import structlog

from contracts import failpoints
from contracts.broker import BrokerFullError
from contracts.errors import (
    BrokerError,
    CorruptDataError,
    InvalidArgumentError,
    TickFailedError,
    WorldlineError,
)
from contracts.messages import WorkerRequest
from contracts.request_stream import Delivery, lacks_group
from contracts.worker_link import WorkerLink
from gpu_worker.background import background
from gpu_worker.backoff import Backoff, Outage
from gpu_worker.engine_thread import FIGURES_PERIOD_S, EngineThread
from gpu_worker.housekeeping import ResidentCheck
from gpu_worker.ledger import Ledger
from gpu_worker.name import NameLease, NameTakenError
from gpu_worker.partitions import PartitionCount
from gpu_worker.requests import Outgoing, RequestHandler, read_request, salvage

INTEGRITY_PERIOD_S: Final = 5.0
INTERRUPT_PERIOD_S: Final = 0.05

FULL_PATIENCE_S: Final = 2.0
"""How long a chunk waits for a broker that is out of memory. What waits behind it may be what makes room again."""

T = TypeVar("T")

log = structlog.get_logger(__name__)


class Server:
    """The loop over requests, on an event loop of its own: one that stands still while the engine works.

    Args:
        link: the broker, for that loop alone.
        ledger: what ran before.
        engine: the model.
        name: the lease of the worker's name. It is kept on the loop on which the server is made, its keeper's.
        outage: how writes get through one.
        block_ms: longest wait for a request.
        reconcile_s: period of the resident check.
    """

    def __init__(
        self,
        link: WorkerLink,
        ledger: Ledger,
        engine: EngineThread,
        name: NameLease,
        outage: Outage,
        *,
        block_ms: int,
        reconcile_s: float,
    ) -> None:
        self._link = link
        self._engine = engine
        self._name = name
        self._outage = outage
        self._block_ms = block_ms
        self._reconcile_s = reconcile_s
        self._keeper = asyncio.get_running_loop()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._serving: asyncio.Task[Any] | None = None
        self._waiting: asyncio.Task[Any] | None = None
        self._gate = asyncio.Lock()
        self._backoff = Backoff()
        self._handler = RequestHandler(link, ledger, engine, busy=self._mark_busy)
        self._partitions = PartitionCount(link)
        self._residents = ResidentCheck(
            link,
            ledger,
            engine,
            gate=self._gate,
            broker_ms=lambda: name.broker_ms,
            partitions=self._partitions.get,
        )
        self._stopping = asyncio.Event()
        self._told = False
        self._unfinished: dict[bytes, WorkerRequest] = {}
        self._own_first = True
        self._integrity_due_s = 0.0

    # ------------------------------------------------------------------------------------------------ from the keeper

    def stop(self) -> None:
        """Ends it: the request in hand is finished and answered, the rest stays in the stream."""
        self._told = True
        self._call_soon(self._stop)

    def abandon(self) -> None:
        """Ends it as soon as the engine is idle; nothing is answered any more."""
        self._call_soon(self._cancel)

    def _call_soon(self, function: Callable[[], None]) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended
                self._loop.call_soon_threadsafe(function)

    # ------------------------------------------------------------------------------------------------ in the thread

    async def run(self) -> None:
        """Reads and answers until told to end. Raises what the engine's integrity check raises."""
        self._serving, self._loop = asyncio.current_task(), asyncio.get_running_loop()
        if self._told:
            self._stop()
        try:
            async with background(self._residents.run(self._reconcile_s), self._keep_figures()):
                await self._serve()
        finally:
            await self._link.close()

    def _stop(self) -> None:
        self._stopping.set()
        self._interrupt()

    def _cancel(self) -> None:
        if self._serving is not None:
            self._serving.cancel()

    def _interrupt(self) -> None:
        """Ends a blocked read. Repeated, because the client library may lose one that comes while it sends."""
        if self._waiting is not None:
            self._waiting.cancel()
            asyncio.get_running_loop().call_later(INTERRUPT_PERIOD_S, self._interrupt)

    async def _keep_figures(self) -> None:
        """A session that was released shows in the figures even if nothing comes after it."""
        while True:
            await asyncio.sleep(FIGURES_PERIOD_S)
            self._engine.refresh_figures()

    async def _mark_busy(self) -> int:
        return await self._kept(self._name.mark_busy())

    async def _kept(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs something on the keeper's loop."""
        try:
            running = asyncio.run_coroutine_threadsafe(coroutine, self._keeper)
        except RuntimeError:  # that loop is closed: the worker has ended
            coroutine.close()
            raise
        return await asyncio.wrap_future(running)

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
            await self._kept(self._name.beat())
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
            delivery = await self._link.requests.read_new(self._block_ms)
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
            return salvage(delivery.fields, error, self._link.incarnation)
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
            await self._outage.persist(write, full_s=FULL_PATIENCE_S if answer.blobs else math.inf)
        except BrokerFullError:
            if self._stopping.is_set() or not answer.blobs:
                raise
            await self._send(self._handler.without_chunk(answer))
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
            self._engine.check_integrity()

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
        except WorldlineError as error:
            log.warning("a request in hand is left to the next start", error=error.message)
