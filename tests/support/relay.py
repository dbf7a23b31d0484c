"""A TCP relay in front of the broker that loses replies: the server acts, the client never hears of it.

with Relay(broker.port) as relay:
    lost = relay.drop_reply(b"EVALSHA", nth=2)
    ...
    assert lost.happened

It runs in a thread with a loop of its own, so synchronous tests, asynchronous tests and other processes can all use it.
"""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Self

HOST = "127.0.0.1"
CHUNK_BYTES = 65_536


@dataclass
class Drop:
    """The reply to the `nth` request that holds `pattern` is to be lost, once."""

    pattern: bytes
    nth: int
    seen: int = 0
    happened: bool = False

    def wants(self, tail: bytes, data: bytes) -> bool:
        """Count a request; true for the one whose reply is to be lost. `tail` is what came just before `data`."""
        overlap = min(len(self.pattern) - 1, len(tail))
        if self.pattern not in tail[len(tail) - overlap :] + data:
            return False
        self.seen += 1
        return self.seen == self.nth


class Relay:
    """Listens on `port`; passes everything on to `HOST:target_port`."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.port = 0
        self.delay_s = 0.0
        self._drops: list[Drop] = []
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    @property
    def connections(self) -> int:
        """How many clients are connected now."""
        return len(self._writers) // 2

    def drop_reply(self, pattern: bytes, nth: int = 1) -> Drop:
        """Lose the reply to the `nth` request from now on that holds `pattern`, and cut that connection."""
        drop = Drop(pattern, nth)
        self._drops.append(drop)
        return drop

    def sever(self) -> None:
        """Cut every connection that is open now."""
        self._run(self._sever())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(HOST, self.target_port)
        pair = {writer, up_writer}
        self._writers |= pair
        losing: list[Drop] = []  # set by a request, honoured by the reply that follows on this connection
        flows = [
            asyncio.create_task(self._requests(reader, up_writer, losing)),
            asyncio.create_task(self._replies(up_reader, writer, losing)),
        ]
        await asyncio.wait(flows, return_when=asyncio.FIRST_COMPLETED)
        for flow in flows:
            flow.cancel()
        await asyncio.gather(*flows, return_exceptions=True)
        self._writers -= pair
        for side in pair:
            side.close()

    async def _requests(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, losing: list[Drop]
    ) -> None:
        tail = b""
        while data := await reader.read(CHUNK_BYTES):
            losing += [drop for drop in self._drops if drop.wants(tail, data)]
            tail = data
            await asyncio.sleep(self.delay_s)
            writer.write(data)
            await writer.drain()

    async def _replies(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, losing: list[Drop]
    ) -> None:
        while data := await reader.read(CHUNK_BYTES):
            if losing:
                for drop in losing:
                    drop.happened = True
                return
            writer.write(data)
            await writer.drain()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, HOST, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _sever(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _close(self) -> None:
        self._server.close()
        await self._sever()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.gather(*others, return_exceptions=True), 5)

    def _run(self, coroutine: Coroutine[None, None, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    def __enter__(self) -> Self:
        self._thread.start()
        self._run(self._listen())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
