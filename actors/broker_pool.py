"""One process's connections to the broker, shared by all of its clients.

One connection for commands, which so arrive in the order in which they were given, and a pool for reads that block, so
that two hundred clients that wait never hold up a command.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Any, Final, Self

from actors.config import ClientSettings
from actors.streams import Cursors
from contracts.broker import Client, blocking_client, command_client, map_exceptions
from contracts.config import load_settings
from contracts.errors import BrokerError, CorruptDataError, SessionError
from contracts.identity import partition_of
from contracts.scripts import Scripts

MAX_WAITING: Final = 1024
"""Calls that may wait for an answer at the same time; each holds a connection meanwhile."""

_SESSIONS_REMEMBERED: Final = 4096

CONNECT_WAIT_S: Final = 1.5
_POLL_S: Final = 0.05


class NoHostError(SessionError):
    """Raised when no session host owns the session's partition, so that nobody would run a command."""

    code = "no_host"
    retryable = True


class Broker:
    """The broker as clients see it.

    Args:
        url: wins over the settings' `REDIS_URL`.
        settings: read from the environment if None.
        host_wait_s: how long `inbox` waits for a session host; by default time enough for a takeover.
    """

    def __init__(
        self,
        url: str | None = None,
        settings: ClientSettings | None = None,
        *,
        host_wait_s: float | None = None,
    ) -> None:
        given = load_settings(ClientSettings, redis_url=url) if settings is None else settings
        self.settings = given
        self.url = given.url if url is None else url
        self.keys = given.keys
        self.host_wait_s = given.host_wait_s if host_wait_s is None else host_wait_s
        self.commands: Client = command_client(self.url)
        self.blocking: Client = blocking_client(
            self.url, block_ms=given.block_ms, max_connections=MAX_WAITING
        )
        self.scripts = Scripts(self.commands, self.keys)
        self.answers_seen = Cursors(_SESSIONS_REMEMBERED)
        """By session: where its answers ended when a call last read them."""

        self._partitions: int | None = None
        self._owned_until: dict[int, float] = {}

    async def connect(self) -> None:
        """Fails soon with BrokerError if the broker can't be reached; optional, every call connects by itself."""
        with map_exceptions("PING"):
            try:
                async with asyncio.timeout(CONNECT_WAIT_S):
                    await self.commands.ping()
            except TimeoutError:
                raise BrokerError(
                    f"the broker does not answer within {CONNECT_WAIT_S} s", field="REDIS_URL"
                ) from None

    async def aclose(self) -> None:
        """Closes both pools."""
        await self.commands.aclose()
        await self.blocking.aclose()
        await self.commands.connection_pool.disconnect()
        await self.blocking.connection_pool.disconnect()

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def was_reached(self) -> bool:
        """Whether the broker has answered before."""
        return self._partitions is not None

    async def partitions(self) -> int | None:
        """How many partitions there are, or None before the first host has started."""
        if self._partitions is None:
            with map_exceptions(self.keys.config):
                text: Any = await self.commands.hget(self.keys.config, "partitions")
            if text is None:
                return None
            if not text.isdigit() or int(text) == 0:
                raise CorruptDataError(
                    f"{self.keys.config}: partitions is {text!r:.40}", field=self.keys.config
                )
            self._partitions = int(text)
        return self._partitions

    async def inbox(self, session_id: str) -> str:
        """The inbox key of a session's partition, once a host owns it.

        Raises NoHostError when none does within `host_wait_s`; nothing has been sent then.
        """
        deadline = time.monotonic() + self.host_wait_s
        while not await self.is_owned(session_id):
            if time.monotonic() >= deadline:
                raise NoHostError("no session host is running; start one with `worldline host`", field="host")
            await asyncio.sleep(_POLL_S)
        assert self._partitions is not None
        return self.keys.inbox_of(session_id, self._partitions)

    async def is_owned(self, session_id: str) -> bool:
        """Whether a host holds the lease of the session's partition; asked at most once a lease."""
        count = await self.partitions()
        if count is None:
            return False
        index = partition_of(session_id, count)
        if self._owned_until.get(index, 0.0) > time.monotonic():
            return True
        left_ms = await self.lease_left_ms(index)
        if left_ms <= 0:
            return False
        self._owned_until[index] = time.monotonic() + left_ms / 1000
        return True

    async def lease_left_ms(self, index: int) -> int:
        """What is left of a partition's lease by the broker's own clock; negative once it has run out."""
        key = self.keys.partition(index).lease
        with map_exceptions(key):
            expires: Any = await self.commands.hget(key, "expires_at_ms")
            seconds, microseconds = await self.commands.time()
        if expires is None:
            return -1
        return int(expires) - (seconds * 1000 + microseconds // 1000)
