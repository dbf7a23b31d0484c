"""The keep-alive of a client whose session is to be closed when the client is gone."""

from __future__ import annotations

import asyncio
import contextlib

from actors.broker_pool import Broker
from contracts.broker import BrokerFullError, map_exceptions
from contracts.errors import BrokerError


class Presence:
    """Renews `presence` three times within its time to live, until it is stopped.

    Stopping leaves the key to run out by itself, so that a client that comes back soon finds its session.
    """

    def __init__(self, broker: Broker, session_id: str, presence_ms: int) -> None:
        self._broker = broker
        self._key = broker.keys.session(session_id).presence
        self._presence_ms = presence_ms
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Says so once, at least, before it returns; a second start says so again and changes nothing else."""
        await self._beat()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"presence {self._key}")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._presence_ms / 3000)
            # A beat that is lost is made good by the next one; a broker that stays away is the callers' to report.
            with contextlib.suppress(BrokerError):
                await self._beat()

    async def _beat(self) -> None:
        try:
            with map_exceptions(self._key):
                await self._broker.commands.set(self._key, "1", px=self._presence_ms)
        except BrokerFullError:
            # What is there already is kept without memory.
            with map_exceptions(self._key):
                if not await self._broker.commands.pexpire(self._key, self._presence_ms):
                    raise
