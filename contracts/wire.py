"""Connections that carry requests and replies and nothing else.

The client library makes a connection: TLS, unix sockets, AUTH and SELECT are its business. Then a `Wire` takes the
socket over, because the layers of a general client (a task a send, a timer a read, locks around the pool, hooks for
telemetry) cost more than the exchange itself, and a tick is little else than such exchanges.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import hiredis
import redis.exceptions as rx
from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.client import Pipeline
from redis.asyncio.connection import AbstractConnection

Command = Sequence[Any]
"""Name and arguments: str, bytes, int or float."""

_INCOMPLETE: Final = object()
_BUFFER_BYTES: Final = 65_536

_CONNECTS_AT_ONCE: Final = 16
"""Two hundred callers that need a connection at the same moment would make each other late."""

_LIBRARY_OPTIONS: Final = frozenset({"keys", "NEVER_DECODE", "EMPTY_RESPONSE"})
"""Options that the library passes on for its own layers; what reads a reply does not know them."""


class Wire(asyncio.BufferedProtocol):
    """One connection, which one caller at a time uses.

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
        self._deadline = 0.0
        self._alarm: asyncio.TimerHandle | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._replies: list[Any] = []
        self._count = 0
        self._hasty = self._outdated = False
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

    async def exchange(self, request: bytes, count: int, *, hasty: bool = False) -> list[Any]:
        """Sends `count` commands and returns their replies; errors of the broker are among them.

        A caller that is cancelled, or gets no reply in time, leaves a closed connection behind: what would still come
        must never be taken for the reply to another request.

        Args:
            request: the packed commands.
            count: how many they are.
            hasty: end with the first error, where the rest may take long.
        """
        loop = asyncio.get_running_loop()
        self._replies, self._count, self._hasty = [], count, hasty
        self._deadline = loop.time() + self._timeout_s
        if self._alarm is None:
            self._alarm = loop.call_at(self._deadline, self._look_at_the_clock)
        self._waiting = waiting = loop.create_future()
        self._transport.write(request)
        try:
            await waiting
        finally:
            self._waiting = None
            if len(self._replies) < count:
                self.close()
        return self._replies

    def close(self) -> None:
        """Ends the connection at once; whoever waits on it gets a ConnectionError."""
        self._transport.abort()
        if self._alarm is not None:
            self._alarm.cancel()

    # -- what the loop calls ------------------------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> bytearray:  # noqa: ARG002 - the loop passes it
        """Where what comes next is written."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Hands a reply to whoever waits; what nobody has asked for ends the connection."""
        self._parser.feed(self._buffer, 0, nbytes)
        while (reply := self._parser.gets()) is not _INCOMPLETE:
            if self._waiting is None or self._waiting.done():
                self.close()
                return
            self._replies.append(reply)
            failed = isinstance(reply, Exception)
            # After a failover this server takes no more writes, and its name leads to another one now.
            self._outdated |= failed and isinstance(reply, rx.ReadOnlyError)
            if len(self._replies) == self._count or (failed and self._hasty):
                self._waiting.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        """Tells whoever waits."""
        self._fail(rx.ConnectionError(f"connection lost: {error or 'closed by the other side'}"))

    def _look_at_the_clock(self) -> None:
        """One timer serves many exchanges: it goes off at what was the deadline when it was set."""
        self._alarm = None
        if self._waiting is None or self._waiting.done():
            return
        loop = asyncio.get_running_loop()
        if loop.time() < self._deadline:
            self._alarm = loop.call_at(self._deadline, self._look_at_the_clock)
            return
        self._fail(rx.TimeoutError(f"no reply within {self._timeout_s:g} s"))
        self.close()

    def _fail(self, error: Exception) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error)


class WireClient(Redis):
    """The library's client, with its commands going over wires; it never sends anything twice.

    `watch`, and with it optimistic transactions, does not work here: scripts do that better.

    Args:
        pool: makes connections; it never holds any.
        timeout_s: how long a reply, or a free connection, may take.
        max_connections: as many callers exchange something at the same time, others wait.
    """

    def __init__(self, pool: ConnectionPool, *, timeout_s: float, max_connections: int) -> None:
        super().__init__(connection_pool=pool)
        self._timeout_s = timeout_s
        self._places = asyncio.Semaphore(max_connections)
        self._connecting = asyncio.Semaphore(_CONNECTS_AT_ONCE)
        self._wires: set[Wire] = set()
        self._idle: list[Wire] = []
        self._readers: dict[str | bytes, Callable[..., Any]] = dict(self.response_callbacks)

    async def exchange(self, commands: Sequence[Command], *, hasty: bool = False) -> list[Any]:
        """The replies to commands that are sent in one go, as they come; see `Wire.exchange`."""
        request = b"".join(map(_pack, commands))
        wire = await self._borrow()
        try:
            return await wire.exchange(request, len(commands), hasty=hasty)
        finally:
            self._give_back(wire)

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """What all the library's commands end in."""
        (reply,) = await self.exchange((args,))
        if isinstance(reply, Exception):
            raise reply
        return self.shape(reply, args[0], options)

    def shape(self, reply: Any, name: str | bytes, options: Mapping[str, Any]) -> Any:
        """A reply as the library's method of that command returns it."""
        read = self._readers.get(name)
        if read is None:
            return reply
        if options:
            options = {key: value for key, value in options.items() if key not in _LIBRARY_OPTIONS}
        return read(reply, **options)

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Pipeline:
        """Commands that are sent in one go."""
        return _Batch(self, transaction, shard_hint)

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """Closes all connections; the next command opens one again."""
        for wire in self._wires:
            wire.close()
        self._wires.clear()
        self._idle.clear()
        await asyncio.sleep(0)  # the loop closes the sockets in its next round
        await super().aclose(close_connection_pool)

    async def _borrow(self) -> Wire:
        if self._places.locked():
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._places.acquire()
            except TimeoutError:
                raise rx.ConnectionError("no connection became free in time") from None
        else:
            await self._places.acquire()
        try:
            while self._idle:
                wire = self._idle.pop()
                if wire.usable:
                    return wire
                self._wires.discard(wire)
            async with self._connecting:
                wire = await Wire.open(self.connection_pool.make_connection(), self._timeout_s)
        except BaseException:
            self._places.release()
            raise
        self._wires.add(wire)
        return wire

    def _give_back(self, wire: Wire) -> None:
        self._places.release()
        if wire.usable:
            self._idle.append(wire)
        else:
            wire.close()
            self._wires.discard(wire)


class _Batch(Pipeline):
    """The library's pipeline over a wire."""

    def __init__(self, client: WireClient, transaction: bool, shard_hint: str | None) -> None:
        super().__init__(client.connection_pool, client.response_callbacks, transaction, shard_hint)
        self._client = client

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        """The replies in the order of the commands; with `raise_on_error` the first error is raised as it comes."""
        batch, self.command_stack = self.command_stack, []
        if not batch:
            return []
        commands: list[Command] = [args for args, _ in batch]
        if self.is_transaction:
            replies = _executed(await self._client.exchange([("MULTI",), *commands, ("EXEC",)]))
        else:
            replies = await self._client.exchange(commands, hasty=raise_on_error)
        error = next((reply for reply in replies if isinstance(reply, Exception)), None)
        if error is not None and raise_on_error:
            raise error
        return [
            reply if isinstance(reply, Exception) else self._client.shape(reply, args[0], options)
            for reply, (args, options) in zip(replies, batch, strict=True)
        ]

    async def immediate_execute_command(self, *args: Any, **_: Any) -> Any:
        """WATCH needs a connection that is held between commands."""
        raise NotImplementedError(f"{args[0]} does not work over a wire")


def _executed(replies: list[Any]) -> list[Any]:
    """What EXEC answered; raises why nothing was executed."""
    *queued, executed = replies
    if isinstance(executed, Exception):
        raise next((reply for reply in queued if isinstance(reply, Exception)), executed)
    result: list[Any] = executed
    return result


def _pack(command: Command) -> bytes:
    name = command[0]
    words = name.split() if " " in name else (name,)
    packed: bytes = hiredis.pack_command((*words, *command[1:]))
    return packed
