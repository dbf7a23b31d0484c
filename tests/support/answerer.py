"""Stands in for a session host: reads the inboxes and answers as a test tells it to."""

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

from contracts.broker import blocking_client, command_client
from contracts.commands import Answer, Command, Op
from contracts.errors import WorldlineError
from contracts.identity import new_request_id
from contracts.keys import Keys

Handler = Callable[[Command], Mapping[str, Any] | WorldlineError | None]

PARTITIONS = 8


def chunk_fields(session_id: str, index: int, life: str = "life-1", **changes: Any) -> dict[str, Any]:
    """One committed chunk, as `next_chunk` answers it."""
    return {
        "life": life,
        "chunk_index": index,
        "request_id": new_request_id(session_id, index),
        "applied_event_ids": [],
        "payload": "redis:some-key",
        "content_type": "application/octet-stream",
        "sha256": "0" * 64,
        "bytes": 4,
        "frames": None,
        "queued_ms": 1,
        "executed_ms": 2,
        "accepted_to_applied_ms": None,
        "committed_at_ms": 1_000,
    } | changes


class Answerer:
    """`handlers[op]` makes the result, an error, or None for no answer. Each command id is carried out once."""

    def __init__(self, url: str) -> None:
        self.client = command_client(url)
        self._reader = blocking_client(url, block_ms=1_000)
        self.keys = Keys()
        self.seen: list[Command] = []
        self.carried_out: Counter[str] = Counter()
        self.delay_s = 0.0
        self.handlers: dict[Op, Handler] = {
            Op.CREATE: lambda command: {"life": "life-1", "chunk_index": 0, "event_floor": -1},
            Op.RESET: lambda command: {"life": "life-2", "chunk_index": 0, "event_floor": 7},
            Op.NEXT_CHUNK: self._next_chunk,
            Op.RUN: lambda command: {},
            Op.PAUSE: lambda command: {},
            Op.CLOSE: lambda command: {"status": "CLOSED"},
            Op.DISCONNECT: lambda command: {"status": "CLOSED"},
        }
        self._chunks: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    async def own(self, lease_ms: int = 600_000) -> None:
        """Makes it look as if a host owned every partition."""
        await self.client.hset(self.keys.config, mapping={"partitions": PARTITIONS, "schema_version": 1})
        seconds, _ = await self.client.time()
        lease = {"owner": "answerer", "epoch": 1, "expires_at_ms": seconds * 1000 + lease_ms}
        for index in range(PARTITIONS):
            await self.client.hset(self.keys.partition(index).lease, mapping=lease)

    async def answer(self, command: Command) -> None:
        """Answers one command, as the scripts do: an id that was answered before gets that answer again."""
        await asyncio.sleep(self.delay_s)
        keys = self.keys.session(command.session_id)
        text = await self.client.hget(keys.answered, command.command_id)
        if text is None:
            self.carried_out[command.command_id] += 1
            outcome = self.handlers[command.op](command)
            if outcome is None:
                return
            error = outcome if isinstance(outcome, WorldlineError) else None
            result = None if isinstance(outcome, WorldlineError) else outcome
            text = Answer(command.command_id, result, error).to_json()
            await self.client.hset(keys.answered, command.command_id, text)
        await self.client.xadd(keys.answers, {"answer": text})

    async def commit(self, session_id: str, chunk: Mapping[str, Any]) -> None:
        """Adds an entry to `chunks`, in the flat form of the commit script."""
        flat = {name: value for name, value in chunk.items() if value is not None}
        flat["applied_event_ids"] = str(list(chunk["applied_event_ids"])).replace(" ", "")
        await self.client.xadd(self.keys.session(session_id).chunks, flat)

    def _next_chunk(self, command: Command) -> dict[str, Any]:
        index = self._chunks[command.session_id]
        self._chunks[command.session_id] += 1
        return chunk_fields(command.session_id, index)

    async def _serve(self) -> None:
        cursors = {self.keys.partition(index).inbox: "0" for index in range(PARTITIONS)}
        while True:
            for key, entries in await self._reader.xread(cursors, block=1_000):
                for entry_id, fields in entries:
                    cursors[key.decode()] = entry_id
                    command = Command.from_json(fields[b"command"])
                    self.seen.append(command)
                    self._start(self.answer(command))

    def _start(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def __aenter__(self) -> Self:
        await self.own()
        self._start(self._serve())
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in list(self._tasks):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self.client.aclose()
        await self._reader.aclose()


@contextlib.contextmanager
def answerer_in_thread(url: str) -> Iterator[Answerer]:
    """An answerer with a loop of its own, for tests that block."""
    started: list[Answerer] = []
    ready, done = threading.Event(), threading.Event()

    async def serve() -> None:
        async with Answerer(url) as running:
            started.append(running)
            ready.set()
            await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(10), "the answerer did not start"
    try:
        yield started[0]
    finally:
        done.set()
        thread.join(10)
