"""One connection that carries requests and replies and nothing else.

The client library makes a connection: TLS, unix sockets, AUTH and SELECT are its business. Then a `Wire` takes the
socket over, because the layers of a general client (a task a send, a timer a read, locks around the pool, hooks for
telemetry) cost more than the exchange itself, and a tick is little else than such exchanges.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

import hiredis
import redis.exceptions as rx
from redis.asyncio.connection import AbstractConnection

_INCOMPLETE: Final = object()
_BUFFER_BYTES: Final = 65_536
_GRACE_S: Final = 0.05
"""A loop that stood still past a deadline first has to read what came meanwhile."""


@dataclass(eq=False, slots=True)
class _Exchange:
    """A request that was sent, and the replies that have come."""

    answered: asyncio.Future[None]
    count: int
    hasty: bool
    deadline_s: float
    replies: list[Any] = field(default_factory=list)

    def take(self, reply: Any) -> None:
        """Wakes the caller with the last reply, or, if it is hasty, with the first error."""
        self.replies.append(reply)
        over = len(self.replies) == self.count or (self.hasty and isinstance(reply, Exception))
        if over and not self.answered.done():
            self.answered.set_result(None)


class Wire(asyncio.BufferedProtocol):
    """Replies come in the order of the requests, so each goes to the oldest exchange that still lacks one.

    Args:
        connection: connected; it is of no further use to anybody else.
        timeout_s: so long a reply may take.
    """

    def __init__(self, connection: AbstractConnection, timeout_s: float) -> None:
        writer = connection._writer  # noqa: SLF001 - the library has no way to hand a socket over
        assert writer is not None, "the connection is connected"
        replies_to_errors = connection._parser.parse_error  # noqa: SLF001
        # It would close the socket when it is collected, and say that it was left open.
        connection._reader = connection._writer = None  # noqa: SLF001
        self._parser: Any = hiredis.Reader(replyError=replies_to_errors, notEnoughData=_INCOMPLETE)
        self._buffer = bytearray(_BUFFER_BYTES)
        self._timeout_s = timeout_s
        self._alarm: asyncio.TimerHandle | None = None
        self._exchanges: deque[_Exchange] = deque()
        self._late: _Exchange | None = None
        self._outdated = False
        self._writer = writer  # closes the socket when it is collected, in later Pythons
        self._transport = writer.transport
        self._transport.set_protocol(self)

    @classmethod
    async def open(cls, connection: AbstractConnection, timeout_s: float) -> Wire:
        """Connects and takes over; raises what the library raises."""
        try:
            await connection.connect()
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        return cls(connection, timeout_s)

    @property
    def usable(self) -> bool:
        """Whether another exchange makes sense."""
        return not self._outdated and not self._transport.is_closing()

    @property
    def idle(self) -> bool:
        """Whether every reply has come."""
        return not self._exchanges

    async def exchange(self, request: bytes, count: int, *, hasty: bool = False) -> list[Any]:
        """Sends `count` commands and returns their replies; errors of the broker are among them.

        What comes after the caller has left, cancelled or in haste, is read and dropped. A reply that takes too long
        ends the connection, for everybody who waits on it.

        Args:
            request: the packed commands.
            count: how many they are.
            hasty: end with the first error, where the rest may take long.
        """
        loop = asyncio.get_running_loop()
        exchange = _Exchange(loop.create_future(), count, hasty, loop.time() + self._timeout_s)
        self._exchanges.append(exchange)
        if self._alarm is None:
            self._alarm = loop.call_at(exchange.deadline_s, self._look_at_the_clock)
        self._transport.write(request)
        await exchange.answered
        return exchange.replies

    def close(self) -> None:
        """Ends the connection at once; whoever waits on it gets a ConnectionError."""
        self._transport.abort()
        if self._alarm is not None:
            self._alarm.cancel()

    # -- what the loop calls -----------------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> bytearray:  # noqa: ARG002 - the loop passes it
        """Where what comes next is written."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Hands replies on; one that nobody has asked for ends the connection."""
        self._parser.feed(self._buffer, 0, nbytes)
        while (reply := self._parser.gets()) is not _INCOMPLETE:
            if not self._exchanges:
                self.close()
                return
            # After a failover this server takes no more writes, and its name leads to another one now.
            self._outdated |= isinstance(reply, rx.ReadOnlyError)
            exchange = self._exchanges[0]
            exchange.take(reply)
            if len(exchange.replies) == exchange.count:
                self._exchanges.popleft()

    def connection_lost(self, error: Exception | None) -> None:
        """Tells whoever waits."""
        self._fail(rx.ConnectionError(f"connection lost: {error or 'closed by the other side'}"))

    def _look_at_the_clock(self) -> None:
        """One timer serves many exchanges: it goes off at what was the first deadline when it was set."""
        self._alarm = None
        if not self._exchanges:
            return
        loop, first = asyncio.get_running_loop(), self._exchanges[0]
        if loop.time() < first.deadline_s:
            self._alarm = loop.call_at(first.deadline_s, self._look_at_the_clock)
        elif first is not self._late:
            self._late = first
            self._alarm = loop.call_later(_GRACE_S, self._look_at_the_clock)
        else:
            self._fail(rx.TimeoutError(f"no reply within {self._timeout_s:g} s"))
            self.close()

    def _fail(self, error: Exception) -> None:
        while self._exchanges:
            answered = self._exchanges.popleft().answered
            if not answered.done():
                answered.set_exception(error)
