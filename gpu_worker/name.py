"""The worker's name: one live process holds it, renews it every heartbeat, and has lost it after five silent ones."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Final

import orjson
import structlog

from contracts.errors import BrokerError, CorruptDataError, WorldlineError
from contracts.worker_link import WorkerLink
from gpu_worker.config import WorkerSettings
from gpu_worker.engine_thread import EngineThread
from gpu_worker.process_identity import HolderWatch, ProcessIdentity

CLAIM_POLL_S: Final = 0.1

log = structlog.get_logger(__name__)


class NameTakenError(WorldlineError, RuntimeError):
    """Raised when another live process holds the worker's name."""

    code = "name_taken"


class NameLease:
    """Takes the name, keeps it, and says in the worker's info how the engine is.

    Args:
        link: the broker.
        engine: whose figures the info shows.
        settings: the heartbeat.
        on_taken: called when the name is lost to another start.
    """

    def __init__(
        self,
        link: WorkerLink,
        engine: EngineThread,
        settings: WorkerSettings,
        *,
        on_taken: Callable[[], None],
    ) -> None:
        self._link = link
        self._engine = engine
        self._period_s = settings.heartbeat_ms / 1000
        self._ttl_ms = settings.name_ttl_ms
        self._on_taken = on_taken
        self._identity = ProcessIdentity.own()
        self._renewed_s = float("-inf")
        self._renewed_at_ms = 0
        self._silent = False
        self._ready = False
        self.taken = False

    @property
    def holds(self) -> bool:
        """Whether the name is certainly ours."""
        return not self.taken and time.monotonic() - self._renewed_s < self._ttl_ms / 1000

    @property
    def broker_ms(self) -> int:
        """About what the broker's clock shows now, in ms; only after `claim`."""
        return self._renewed_at_ms + int(1000 * (time.monotonic() - self._renewed_s))

    async def claim(self, stopping: asyncio.Event) -> bool:
        """Takes the name; False when told to end meanwhile.

        A holder that shows a sign of life keeps it: NameTakenError. A dead one's claim runs out within seconds.
        """
        watch, dead = HolderWatch(), ""
        while not stopping.is_set():
            since_s = time.monotonic()
            now_ms = await self._link.claim(self._info(), ttl_ms=self._ttl_ms, dead=dead)
            if now_ms is not None:
                self._renewed_s, self._renewed_at_ms = since_s, now_ms
                return True
            holder = await self._link.holder()
            if watch.lives(holder):
                raise NameTakenError(
                    f"the name {self._link.worker_id} is taken by process {holder.get('pid')} on {holder.get('host')}",
                    field="worker_id",
                )
            if self._identity.knows_dead(holder):
                dead = holder["incarnation"]
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), CLAIM_POLL_S)
        return False

    async def show_ready(self) -> None:
        """From now on the info has model and capacity, so that sessions are placed here."""
        self._ready = True
        with contextlib.suppress(BrokerError):  # the next heartbeat says it then
            await self.beat()

    async def beat(self) -> None:
        """Renews once; NameTakenError when another start holds the name."""
        since_s = time.monotonic()
        now_ms = await self._link.claim(self._info(), ttl_ms=self._ttl_ms)
        if now_ms is None:
            self.taken = True
            self._on_taken()
            raise NameTakenError(
                f"another process has taken the name {self._link.worker_id}", field="worker_id"
            )
        self._renewed_s, self._renewed_at_ms = since_s, now_ms
        if self._ready:
            await self._link.list_alive(now_ms)

    async def run(self) -> None:
        """Beats for ever; ends when the name is taken. An outage is logged once."""
        while True:
            await asyncio.sleep(self._period_s)
            try:
                await self.beat()
                self._silent = False
            except NameTakenError:
                return
            except (BrokerError, CorruptDataError) as error:
                if not self._silent:
                    log.warning("the heartbeat failed", error=error.message)
                self._silent = True

    async def mark_busy(self) -> int:
        """Says that a request begins; broker time in ms. NameTakenError when another start holds the name."""
        started_ms = await self._link.mark_busy()
        if started_ms is None:
            # The name ran out, in an outage or a pause: taking it again fails if another start was quicker.
            await self.beat()
            started_ms = await self._link.mark_busy()
        if started_ms is None:
            raise BrokerError("the worker's name does not last", field="info")
        return started_ms

    async def leave(self) -> None:
        """Gives the name back at the orderly end."""
        if self._renewed_at_ms == 0:
            return
        try:
            await self._link.leave()
        except WorldlineError as error:
            log.warning("the name was not given back; it runs out by itself", error=error.message)

    def _info(self) -> dict[str, str | int]:
        fields = self._identity.to_fields()
        if self._ready:
            figures = self._engine.figures
            fields |= {"model": self._engine.model, "capacity": self._engine.capacity}
            fields |= {"resident": figures.resident, "memory": orjson.dumps(dict(figures.memory)).decode()}
        return fields
