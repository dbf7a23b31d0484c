"""Plays the host towards one worker, with redis-py and the message classes alone: makes states, sends requests.

host = FakeHost(client)
world = await host.create("world-1", fail_at=3)
await host.send(world.tick())
reply = await host.reply()
world.committed(reply)
"""

import asyncio
import time
from dataclasses import dataclass, field, replace
from typing import Any

import redis.asyncio

from contracts.fields import dumps
from contracts.identity import new_request_id
from contracts.keys import Keys
from contracts.messages import InFlight, Kind, Notice, WorkerReply, WorkerRequest
from contracts.tick import ARDiffusionTickRequest

MODEL = "noop"
PARTITIONS = 8


@dataclass
class World:
    """One session as its host sees it, and the requests that it would send next."""

    session_id: str
    reply_to: str
    life: str
    params: dict[str, Any] = field(default_factory=dict)
    seed: int = 7
    fence: int = 1000
    chunk_index: int = 0
    last_request_id: str | None = None

    def tick(self, **changes: Any) -> WorkerRequest:
        """The next chunk; `changes` replace fields of the request."""
        request_id = changes.pop("request_id", None) or new_request_id(self.session_id, self.chunk_index)
        tick_fields = {
            name: changes.pop(name) for name in ("prompt", "controls", "close_session") if name in changes
        }
        tick = ARDiffusionTickRequest(self.session_id, request_id, self.chunk_index, **tick_fields)
        changes = {"parent_request_id": self.last_request_id or self.life} | changes
        return replace(self._request(Kind.TICK, request_id), tick=tick, **changes)

    def reset(self, **changes: Any) -> WorkerRequest:
        return replace(
            self._request(Kind.RESET, new_request_id(self.session_id, "reset")), fence=self.fence, **changes
        )

    def release(self, **changes: Any) -> WorkerRequest:
        request = self._request(Kind.RELEASE, new_request_id(self.session_id, "release"))
        return replace(request, **changes)

    def again(self, request: WorkerRequest) -> WorkerRequest:
        """The same request under a higher fence, as a new owner sends it."""
        self.fence += 1
        return replace(request, fence=self.fence)

    def committed(self, reply: WorkerReply) -> WorkerReply:
        """The chunk of this reply is committed."""
        assert reply.error is None, reply.error
        self.last_request_id = reply.request_id
        self.chunk_index += 1
        return reply

    def begin(self, life: str) -> None:
        """A new life begins."""
        self.life, self.chunk_index, self.last_request_id = life, 0, None

    def _request(self, kind: Kind, request_id: str) -> WorkerRequest:
        self.fence += 1
        return WorkerRequest(
            kind=kind,
            session_id=self.session_id,
            request_id=request_id,
            life=self.life,
            parent_request_id=self.life,
            fence=self.fence,
            reply_to=self.reply_to,
            model=MODEL,
            params=self.params,
            seed=self.seed,
        )


class FakeHost:
    """Sends to one worker and reads every inbox.

    Args:
        client: an asyncio client that answers bytes.
        worker_id: the worker.
    """

    def __init__(self, client: redis.asyncio.Redis, worker_id: str = "gpu-0") -> None:
        self.client = client
        self.worker_id = worker_id
        self.keys = Keys()
        self.worker = self.keys.worker(worker_id)
        self.inboxes = [self.keys.partition(index).inbox for index in range(PARTITIONS)]
        self._read = dict.fromkeys(self.inboxes, "0")
        self._seen: list[tuple[str, dict[bytes, bytes]]] = []

    async def create(self, session_id: str, *, reserve: bool = True, **params: Any) -> World:
        """A session in chunk 0, placed on the worker."""
        await self.client.hset(self.keys.config, "partitions", PARTITIONS)
        world = World(
            session_id,
            self.keys.inbox_of(session_id, PARTITIONS),
            new_request_id(session_id, "create"),
            params,
        )
        await self.set_state(world, status="ACTIVE", life=world.life, worker=self.worker_id)
        if reserve:
            await self.reserve(world)
        return world

    async def reserve(self, world: World, *, age_ms: int = 0) -> None:
        seconds, micros = await self.client.time()
        at_ms = seconds * 1000 + micros // 1000 - age_ms
        entry = dumps({"life": world.life, "reserved_at_ms": at_ms})
        await self.client.hset(self.worker.sessions, world.session_id, entry)

    async def set_state(self, world: World, **fields: str) -> None:
        await self.client.hset(self.keys.session(world.session_id).state, mapping=fields)

    async def drop_state(self, world: World) -> None:
        await self.client.delete(self.keys.session(world.session_id).state)

    async def clear_inflight(self, world: World) -> None:
        await self.client.hdel(self.keys.session(world.session_id).state, "inflight")

    async def send(
        self, request: WorkerRequest, *, expires_in_ms: int | None = 60_000, inflight: bool = True
    ) -> bytes:
        """Adds the request as the host's scripts do: what is in flight is written first. Returns the entry id."""
        if inflight:
            record = InFlight(request.request_id, request.kind, request.fence, request.life)
            state = self.keys.session(request.session_id).state
            await self.client.hset(state, "inflight", record.to_json())
        entry = request.to_entry()
        if request.kind is Kind.TICK and expires_in_ms is not None:
            seconds, micros = await self.client.time()
            entry["expires_at_ms"] = str(seconds * 1000 + micros // 1000 + expires_in_ms)
        return await self.client.xadd(self.worker.requests, entry)

    async def reply(self, within_s: float = 5.0) -> WorkerReply:
        """The next reply in any inbox."""
        return WorkerReply.from_json(await self._next(b"reply", within_s))

    async def notice(self, within_s: float = 5.0) -> Notice:
        """The next notice in any inbox."""
        return Notice.from_json(await self._next(b"notice", within_s))

    async def run(self, request: WorkerRequest, **options: Any) -> WorkerReply:
        """Sends a request and reads the reply, which must be to it."""
        await self.send(request, **options)
        reply = await self.reply()
        assert (reply.request_id, reply.fence) == (request.request_id, request.fence)
        return reply

    async def chunk(self, world: World) -> WorkerReply:
        """Runs and commits the next chunk."""
        reply = world.committed(await self.run(world.tick()))
        await self.clear_inflight(world)
        return reply

    async def nothing_more(self, within_s: float = 0.3) -> None:
        """Fails if anything comes in."""
        await asyncio.sleep(within_s)
        await self._pull()
        assert self._seen == []

    async def order(self, inbox: str) -> list[str]:
        """What came into an inbox, as `reply` or `notice`, in order of arrival."""
        return [next(iter(fields)).decode() for _, fields in await self.client.xrange(inbox)]

    async def info(self) -> dict[str, str]:
        raw = await self.client.hgetall(self.worker.info)
        return {name.decode(): value.decode() for name, value in raw.items()}

    async def until(self, condition: Any, within_s: float = 5.0) -> Any:
        """Polls an async condition."""
        deadline = time.monotonic() + within_s
        while not (value := await condition()):
            assert time.monotonic() < deadline, "the condition did not come true"
            await asyncio.sleep(0.02)
        return value

    async def stream_is_empty(self) -> bool:
        """Whether the worker has finished every request."""
        return await self.client.xlen(self.worker.requests) == 0

    async def _next(self, kind: bytes, within_s: float) -> bytes:
        deadline = time.monotonic() + within_s
        while True:
            for index, (_, fields) in enumerate(self._seen):
                if kind in fields:
                    del self._seen[index]
                    return fields[kind]
            assert time.monotonic() < deadline, f"no {kind.decode()} came; seen: {self._seen}"
            await self._pull()
            await asyncio.sleep(0.005)

    async def _pull(self) -> None:
        for inbox, entries in await self.client.xread(self._read) or []:
            name = inbox.decode()
            for entry_id, fields in entries:
                self._read[name] = entry_id
                self._seen.append((name, fields))
