"""Counts what a process says to the broker: a relay before it reads the requests that pass.

A round trip is a burst of requests that had to wait for a reply before the next one: a pipeline is one round trip.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import hiredis

import contracts
from contracts.scripts import script_source

CHUNK_BYTES = 65_536


def _scripts() -> dict[bytes, str]:
    """Digest -> name of each Lua file."""
    names = [path.stem for path in (Path(contracts.__file__).parent / "lua").glob("*.lua")]
    return {hashlib.sha1(script_source(name).encode()).hexdigest().encode(): name for name in names}


class CountingRelay:
    """Listens on `url` and passes everything on to the broker."""

    def __init__(self, broker_url: str) -> None:
        target = urlsplit(broker_url)
        self._target = (target.hostname or "127.0.0.1", target.port or 6379)
        self._scripts = _scripts()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.url = ""
        self.commands: Counter[str] = Counter()
        self.round_trips = 0

    def reset(self) -> None:
        """Counts from zero."""
        self.commands = Counter()
        self.round_trips = 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(*self._target)
        replied = asyncio.Event()
        replied.set()
        flows = [
            asyncio.ensure_future(self._requests(reader, up_writer, replied)),
            asyncio.ensure_future(self._replies(up_reader, writer, replied)),
        ]
        await asyncio.wait(flows, return_when=asyncio.FIRST_COMPLETED)
        for flow in flows:
            flow.cancel()
        for side in (writer, up_writer):
            side.close()

    async def _requests(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, replied: asyncio.Event
    ) -> None:
        parser = hiredis.Reader()
        while data := await reader.read(CHUNK_BYTES):
            parser.feed(data)
            while (request := parser.gets()) is not False:
                self.commands[self._name(request)] += 1
            if replied.is_set():
                self.round_trips += 1
                replied.clear()
            writer.write(data)

    @staticmethod
    async def _replies(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, replied: asyncio.Event
    ) -> None:
        while data := await reader.read(CHUNK_BYTES):
            replied.set()
            writer.write(data)

    def _name(self, request: Any) -> str:
        name = request[0].decode().upper()
        return f"{name} {self._scripts.get(request[1], '?')}" if name == "EVALSHA" else name

    async def _listen(self) -> None:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"

    def __enter__(self) -> CountingRelay:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


@contextlib.contextmanager
def relays(broker_url: str, *roles: str) -> Iterator[dict[str, CountingRelay]]:
    """One relay a role."""
    with contextlib.ExitStack() as stack:
        yield {role: stack.enter_context(CountingRelay(broker_url)) for role in roles}


async def broker_calls(client: Any) -> Counter[str]:
    """How often the broker has run each command so far, also from within scripts."""
    stats: dict[str, Any] = await client.info("commandstats")
    return Counter({name.removeprefix("cmdstat_").upper(): stat["calls"] for name, stat in stats.items()})


def per_tick(busy: Counter[str], idle: Counter[str], *, share: float, ticks: int) -> dict[str, float]:
    """Counts of one tick: those of `ticks`, less the `share` of an idle while's, which processes do by the clock."""
    counts = {name: (count - share * idle[name]) / ticks for name, count in busy.items()}
    return {name: round(count, 1) for name, count in sorted(counts.items()) if round(count, 1) > 0}
