"""The least that a tick could cost: entries handed on over streams, by processes that do nothing else.

    four hops     client -> host -> worker -> host -> client
    ping-pong     client -> peer -> client

Each hop is one XADD here and one blocking XREAD that returns there. Run as a program this is one such process:
`python chains.py URL KIND SOURCE [FIELD=STREAM=NEW]...` reads SOURCE, and what comes in FIELD goes to STREAM as NEW.
KIND says what carries the commands, see `CLIENTS`.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import redis.asyncio

from contracts import event_loop
from contracts.broker import blocking_client, command_client
from stacks import FOLDER, environment, process

BLOCK_MS = 2_000


def _wires(url: str) -> tuple[Any, Any]:
    return command_client(url), blocking_client(url, block_ms=BLOCK_MS)


def _library(url: str) -> tuple[Any, Any]:
    return redis.asyncio.Redis.from_url(url), redis.asyncio.Redis.from_url(url)


CLIENTS: dict[str, Callable[[str], tuple[Any, Any]]] = {"redis.asyncio": _library, "wires": _wires}
"""A client for commands and one for blocking reads: as the library makes them, or as worldline does."""


class Reader:
    """Reads a stream from its beginning, one batch a call."""

    def __init__(self, client: Any, key: str) -> None:
        self._client = client
        self._key = key
        self._cursor: bytes = b"0-0"

    async def read(self) -> list[dict[bytes, bytes]]:
        """The next entries' fields; waits for the first."""
        while True:
            reply = await self._client.xread({self._key: self._cursor}, count=100, block=BLOCK_MS)
            if reply:  # a mapping in the library's own shapes, a list in RESP2's
                entries = next(iter(reply.values()))[0] if isinstance(reply, dict) else reply[0][1]
                self._cursor = entries[-1][0]
                return [fields for _, fields in entries]


async def forward(url: str, kind: str, source: str, targets: dict[bytes, tuple[str, str]]) -> None:
    """Hands on for ever."""
    commands, blocking = CLIENTS[kind](url)
    await commands.ping()
    reader = Reader(blocking, source)
    print("ready", flush=True)
    while True:
        for fields in await reader.read():
            for name, value in fields.items():
                stream, field = targets[name]
                await commands.xadd(stream, {field: value})


class Chain:
    """The client's end: `XADD` to the first stream, `XREAD` from the last."""

    def __init__(self, url: str, kind: str, first: str, last: str) -> None:
        self._commands, blocking = CLIENTS[kind](url)
        self._first = first
        self._reader = Reader(blocking, last)
        self._numbers = itertools.count()

    async def go_round(self) -> None:
        """One entry, there and back."""
        text = str(next(self._numbers)).encode()
        await self._commands.xadd(self._first, {"command": text})
        (fields,) = await self._reader.read()
        assert fields == {b"answer": text}


@contextlib.asynccontextmanager
async def four_hops(url: str, kind: str) -> AsyncIterator[Chain]:
    """Client, host, worker, host, client."""
    inbox, requests, answers = (f"chain:{kind}:{name}" for name in ("inbox", "requests", "answers"))
    with (
        _forwarder(url, kind, inbox, f"command={requests}=request", f"reply={answers}=answer"),
        _forwarder(url, kind, requests, f"request={inbox}=reply"),
    ):
        yield Chain(url, kind, inbox, answers)


@contextlib.asynccontextmanager
async def ping_pong(url: str, kind: str) -> AsyncIterator[Chain]:
    """Client, peer, client."""
    there, back = f"pong:{kind}:there", f"pong:{kind}:back"
    with _forwarder(url, kind, there, f"command={back}=answer"):
        yield Chain(url, kind, there, back)


def _forwarder(url: str, kind: str, source: str, *routes: str) -> contextlib.AbstractContextManager[Any]:
    program = str(FOLDER / "chains.py")
    return process(f"chain {source}", sys.executable, program, url, kind, source, *routes, env=environment())


def main() -> None:
    url, kind, source, *routes = sys.argv[1:]
    split = (route.split("=") for route in routes)
    event_loop.run(forward(url, kind, source, {name.encode(): (stream, new) for name, stream, new in split}))


if __name__ == "__main__":
    main()
