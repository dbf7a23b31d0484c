"""The client library's commands, carried by wires instead of its pools. Nothing here sends anything twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import hiredis
import redis.exceptions as rx
from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.client import Pipeline

from contracts.wire import Wire

Command = Sequence[Any]
"""Name and arguments: str, bytes, int or float."""

_CONNECTS_AT_ONCE: Final = 16
"""Two hundred callers that need a connection at the same moment would make each other late."""

_LIBRARY_OPTIONS: Final = frozenset({"keys", "NEVER_DECODE", "EMPTY_RESPONSE"})
"""Options that the library passes on for its own layers; what reads a reply does not know them."""


class Carrier(Protocol):
    """Takes requests to the broker."""

    async def exchange(self, request: bytes, count: int, *, hasty: bool) -> list[Any]:
        """See `Wire.exchange`."""
        ...

    async def aclose(self) -> None:
        """Closes all connections; the next exchange opens one again."""
        ...


class OneWire:
    """One connection for all callers: their commands reach the broker in the order in which they were given.

    Args:
        pool: makes connections; it never holds any.
        timeout_s: how long a reply may take.
    """

    def __init__(self, pool: ConnectionPool, timeout_s: float) -> None:
        self._pool = pool
        self._timeout_s = timeout_s
        self._wire: Wire | None = None
        self._opening: asyncio.Task[Wire] | None = None
        self._closings = 0

    async def exchange(self, request: bytes, count: int, *, hasty: bool) -> list[Any]:
        """A caller that is cancelled disturbs no other: its replies are dropped as they come."""
        wire = self._wire
        if wire is None or not wire.usable:
            if self._opening is None:
                self._opening = asyncio.get_running_loop().create_task(self._open(self._closings))
            wire = await asyncio.shield(self._opening)
            if not wire.usable:
                raise rx.ConnectionError("the connection was lost at once")
        return await wire.exchange(request, count, hasty=hasty)

    async def _open(self, closings: int) -> Wire:
        """One attempt for all who wait."""
        try:
            wire = await Wire.open(self._pool.make_connection(), self._timeout_s)
        finally:
            self._opening = None
        if closings != self._closings:
            wire.close()
            raise rx.ConnectionError("the client was closed")
        if self._wire is not None:
            self._wire.close()
        self._wire = wire
        return wire

    async def aclose(self) -> None:
        """Ends whatever waits with a ConnectionError."""
        self._closings += 1
        if self._opening is not None:
            await asyncio.wait([self._opening])
        if self._wire is not None:
            self._wire.close()
        self._wire = None


class WirePool:
    """A connection for each caller at a time, for commands that block.

    Args:
        pool: makes connections; it never holds any.
        timeout_s: how long a reply, or a free connection, may take.
        max_connections: as many callers exchange something at the same time, others wait.
    """

    def __init__(self, pool: ConnectionPool, timeout_s: float, max_connections: int) -> None:
        self._pool = pool
        self._timeout_s = timeout_s
        self._places = asyncio.Semaphore(max_connections)
        self._connecting = asyncio.Semaphore(_CONNECTS_AT_ONCE)
        self._wires: set[Wire] = set()
        self._free: list[Wire] = []

    async def exchange(self, request: bytes, count: int, *, hasty: bool) -> list[Any]:
        """A caller that leaves early leaves a closed connection: nobody is to wait for what it asked for."""
        wire = await self._borrow()
        try:
            return await wire.exchange(request, count, hasty=hasty)
        finally:
            self._give_back(wire)

    async def aclose(self) -> None:
        """Ends whatever waits with a ConnectionError."""
        for wire in self._wires:
            wire.close()
        self._wires.clear()
        self._free.clear()

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
            while self._free:
                wire = self._free.pop()
                if wire.usable:
                    return wire
                self._wires.discard(wire)
            async with self._connecting:
                wire = await Wire.open(self._pool.make_connection(), self._timeout_s)
        except BaseException:
            self._places.release()
            raise
        self._wires.add(wire)
        return wire

    def _give_back(self, wire: Wire) -> None:
        self._places.release()
        if wire.usable and wire.idle:
            self._free.append(wire)
        else:
            wire.close()
            self._wires.discard(wire)


class WireClient(Redis):
    """The library's client, with its commands going over wires.

    `watch`, and with it optimistic transactions, does not work here: scripts do that better.

    Args:
        pool: says how connections are made.
        carrier: the wires.
    """

    def __init__(self, pool: ConnectionPool, carrier: Carrier) -> None:
        super().__init__(connection_pool=pool)
        self._carrier = carrier
        self._readers: dict[str | bytes, Callable[..., Any]] = dict(self.response_callbacks)

    async def exchange(self, commands: Sequence[Command], *, hasty: bool = False) -> list[Any]:
        """The replies to commands that are sent in one go, as they come; see `Wire.exchange`."""
        return await self._carrier.exchange(b"".join(map(_pack, commands)), len(commands), hasty=hasty)

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """What all the library's commands end in."""
        (reply,) = await self._carrier.exchange(_pack(args), 1, hasty=False)
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
        await self._carrier.aclose()
        await asyncio.sleep(0)  # the loop closes the sockets in its next round
        await super().aclose(close_connection_pool)


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
