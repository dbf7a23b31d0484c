"""What a worker does beside requests: tells sessions that were evicted, and lets go of what nobody needs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from contracts.errors import CorruptDataError, WorldlineError
from contracts.messages import Notice, NoticeKind
from contracts.reservation import Reservation
from contracts.worker_link import WorkerLink
from gpu_worker.backoff import Outage
from gpu_worker.engine_thread import EngineThread
from gpu_worker.ledger import Holding, Ledger
from gpu_worker.residents import (
    STATE_FIELDS,
    SessionView,
    memory_is_lost,
    reason_to_release,
    reservation_is_stale,
)

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Evicted:
    """A session that the engine dropped for room, and the life that is lost with it."""

    session_id: str
    life: str


class EvictionNotices:
    """Sends a notice for each eviction, at once and through an outage, and gives the session's room back."""

    def __init__(self, link: WorkerLink, outage: Outage, partitions: Callable[[], Awaitable[int]]) -> None:
        self._link = link
        self._outage = outage
        self._partitions = partitions
        self._queue: asyncio.Queue[Evicted] = asyncio.Queue()

    def add(self, evicted: Evicted) -> None:
        """Has the session told."""
        self._queue.put_nowait(evicted)

    async def run(self) -> None:
        """Sends notices until cancelled."""
        while True:
            await self._send(await self._queue.get())
            self._queue.task_done()

    async def flush(self, patience_s: float) -> None:
        """Waits until everything is sent, but not longer than `patience_s`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._queue.join(), patience_s)

    async def _send(self, evicted: Evicted) -> None:
        notice = Notice(
            NoticeKind.EVICTED,
            evicted.session_id,
            self._link.worker_id,
            evicted.life,
            self._link.incarnation,
            "another session needed the room",
        )

        async def tell() -> None:
            await self._link.send_notice(notice, await self._partitions())
            await self._link.unreserve(evicted.session_id, evicted.life)

        try:
            await self._outage.persist(tell)
        except WorldlineError as error:
            log.warning("an eviction notice was not sent", session_id=evicted.session_id, error=error.message)


class ResidentCheck:
    """Compares what the worker holds, and what is reserved on it, with the sessions' states.

    Args:
        gate: held while a request runs; the engine is used under it only.
        broker_ms: about the broker's time.
        partitions: how many there are.
    """

    def __init__(
        self,
        link: WorkerLink,
        ledger: Ledger,
        engine: EngineThread,
        *,
        gate: asyncio.Lock,
        broker_ms: Callable[[], int],
        partitions: Callable[[], Awaitable[int]],
    ) -> None:
        self._link = link
        self._ledger = ledger
        self._engine = engine
        self._gate = gate
        self._broker_ms = broker_ms
        self._partitions = partitions

    async def run(self, period_s: float) -> None:
        """Checks every `period_s` until cancelled."""
        while True:
            await asyncio.sleep(period_s)
            try:
                await self.check()
            except WorldlineError as error:
                log.warning("the resident check failed", error=error.message)

    async def check(self) -> None:
        """One round over all holdings and reservations."""
        self._ledger.forget_old()
        for session_id, holding in self._ledger.holdings().items():
            view = await self._view(session_id)
            if isinstance(view, CorruptDataError):
                continue
            reason = reason_to_release(view, holding.life, self._link.worker_id)
            if reason is not None:
                await self._release(session_id, holding, reason)
        await self._check_reservations()

    async def _release(self, session_id: str, holding: Holding, reason: str) -> None:
        async with self._gate:
            # A request may have come between the look at the state and now: then it decides.
            if self._ledger.holdings().get(session_id) != holding:
                return
            try:
                self._engine.close(session_id)
            except WorldlineError as error:
                log.warning("a resident can't be released", session_id=session_id, error=error.message)
                return
            self._ledger.released(session_id)
        log.info("released", session_id=session_id, life=holding.life, why=reason)
        await self._link.unreserve(session_id, holding.life)

    async def _check_reservations(self) -> None:
        now_ms = self._broker_ms()
        for session_id, reservation in (await self._link.reservations()).items():
            view = await self._view(session_id)
            if isinstance(view, CorruptDataError) or not isinstance(reservation, Reservation):
                continue
            if memory_is_lost(view, reservation, self._link.worker_id, self._link.incarnation):
                await self._tell(session_id, reservation.life)
            elif reservation_is_stale(view, reservation, self._link.worker_id, now_ms):
                await self._link.unreserve(session_id, reservation.life)
                log.info("reservation dropped", session_id=session_id, life=reservation.life)

    async def _tell(self, session_id: str, life: str) -> None:
        worker_id, incarnation = self._link.worker_id, self._link.incarnation
        why = "the worker was restarted"
        notice = Notice(NoticeKind.WORKER_LOST, session_id, worker_id, life, incarnation, why)
        await self._link.send_notice(notice, await self._partitions())
        log.info("told that its memory is lost", session_id=session_id, life=life)

    async def _view(self, session_id: str) -> SessionView | CorruptDataError | None:
        try:
            return SessionView.read(session_id, await self._link.session_fields(session_id, STATE_FIELDS))
        except CorruptDataError as error:
            log.warning("a state can't be read", session_id=session_id, error=error.message)
            return error
