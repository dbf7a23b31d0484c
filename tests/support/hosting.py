"""A session host inside the test's own loop, and commands sent to it as any client would: plain `XADD` and `XREAD`."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import redis.asyncio

from actors.config import HostSettings
from actors.host import Host
from actors.partition import Partition
from contracts.events import ARDiffusionEventReceipt, ARDiffusionSessionEvent, parse_controls
from contracts.identity import partition_of
from contracts.keys import Keys
from contracts.scripts import Scripts
from contracts.state import SessionState


@asynccontextmanager
async def running_host(url: str, **settings: Any) -> AsyncIterator[Host]:
    """A host that owns all partitions; handed over at the end."""
    host = Host(HostSettings(REDIS_URL=url, **{"block_ms": 300, **settings}))  # type: ignore[call-arg]
    await host.prepare()
    stop, ready = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(host.run(stop, on_ready=ready.set))
    await asyncio.wait_for(ready.wait(), 10)
    try:
        yield host
    finally:
        stop.set()
        await asyncio.wait_for(task, 20)


@asynccontextmanager
async def dying_host(
    url: str, *, dies_in: str = "", dies_of: str = "", **settings: Any
) -> AsyncIterator[asyncio.Event]:
    """A host that is killed at the end: no step more, nothing handed over.

    It hangs for good when it first calls the session script `dies_in` (for the session `dies_of`, or for any), and sets
    the event then.
    """
    host = _Doomed(HostSettings(REDIS_URL=url, **{"block_ms": 300, **settings}))  # type: ignore[call-arg]
    await host.prepare()
    ready, dying = asyncio.Event(), asyncio.Event()

    script = getattr(host.services.scripts, dies_in) if dies_in else None

    async def hang(state: SessionState, *args: Any, **options: Any) -> Any:
        if dies_of not in {"", state.session_id}:
            return await script(state, *args, **options)  # type: ignore[misc]
        dying.set()
        return await asyncio.Event().wait()

    if dies_in:
        setattr(host.services.scripts, dies_in, hang)
    task = asyncio.create_task(host.run(asyncio.Event(), on_ready=ready.set))
    await asyncio.wait_for(ready.wait(), 10)
    try:
        yield dying
    finally:
        task.cancel()
        await asyncio.wait([task])
        for partition in host.ever_owned:
            await _kill(partition)
        await host.client.aclose()
        await host.blocking.aclose()


class _Doomed(Host):
    """Knows all partitions that it ever had: one may be in the midst of being given up when the host is killed."""

    def __init__(self, settings: HostSettings) -> None:
        super().__init__(settings)
        self.ever_owned: list[Partition] = []

    async def _claim(self, index: int) -> None:
        await super()._claim(index)
        if index in self.owned:
            self.ever_owned.append(self.owned[index])


async def _kill(partition: Partition) -> None:
    """Cancels whatever it and its actors are in the midst of."""
    partition._stopped = True
    for actor in partition.actors.values():
        actor._end()
    tasks = [partition._reader, partition._flusher, *(actor._task for actor in partition.actors.values())]
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


class Caller:
    """Sends commands to one session and reads their answers."""

    def __init__(self, client: redis.asyncio.Redis, session_id: str = "world-1") -> None:
        self.client = client
        self.session_id = session_id
        self.base = f"wl:{{{session_id}}}"
        self.inbox = f"wl:{{p{partition_of(session_id, 8)}}}:inbox"
        self._scripts = Scripts(client, Keys())

    async def send(self, op: str, command_id: str | None = None, **args: Any) -> str:
        """Adds a command to the inbox; returns its id."""
        command_id = command_id or secrets.token_hex(8)
        body = {"op": op, "session_id": self.session_id, "command_id": command_id, "args": args}
        await self.client.xadd(self.inbox, {"command": json.dumps(body)})
        return command_id

    async def answer_to(self, command_id: str, timeout_s: float = 10) -> dict[str, Any]:
        """Waits for the answer of a command."""
        async with asyncio.timeout(timeout_s):
            while True:
                for answer in await self.answers():
                    if answer["command_id"] == command_id:
                        return answer
                await asyncio.sleep(0.005)

    async def answers(self) -> list[dict[str, Any]]:
        """All answers so far."""
        entries = await self.client.xrange(f"{self.base}:answers")
        return [json.loads(fields[b"answer"]) for _, fields in entries]

    async def call(self, op: str, **args: Any) -> dict[str, Any]:
        """Sends a command and returns its whole answer."""
        return await self.answer_to(await self.send(op, **args))

    async def ok(self, op: str, **args: Any) -> dict[str, Any]:
        """Sends a command that must succeed; returns its result."""
        answer = await self.call(op, **args)
        assert answer["ok"], answer
        return answer["result"]

    async def refused(self, op: str, **args: Any) -> dict[str, Any]:
        """Sends a command that must fail; returns its error."""
        answer = await self.call(op, **args)
        assert not answer["ok"], answer
        return answer["error"]

    async def event(self, event_id: Any, **fields: Any) -> None:
        """A bare event, as a producer in any language adds it."""
        body = {"event_id": event_id} | {
            k: v if isinstance(v, str | bytes) else json.dumps(v) for k, v in fields.items()
        }
        await self.client.xadd(f"{self.base}:events", body, nomkstream=True)

    async def accept(
        self, event_id: int, prompt: str | None = None, *controls: Any
    ) -> ARDiffusionEventReceipt:
        """An event with all checks; the typed errors are raised."""
        event = ARDiffusionSessionEvent(event_id, prompt, parse_controls(controls))
        return await self._scripts.accept_event(self.session_id, event)

    async def pending(self) -> int:
        """How many events lie in the stream."""
        return await self.client.xlen(f"{self.base}:events")

    async def state(self) -> dict[str, str]:
        """The state hash."""
        raw = await self.client.hgetall(f"{self.base}:state")
        return {name.decode(): value.decode() for name, value in raw.items()}

    async def rejected(self) -> list[dict[str, str]]:
        """The `rejected` stream."""
        entries = await self.client.xrange(f"{self.base}:rejected")
        return [{k.decode(): v.decode(errors="replace") for k, v in fields.items()} for _, fields in entries]

    async def chunks(self) -> list[dict[str, str]]:
        """The `chunks` stream."""
        entries = await self.client.xrange(f"{self.base}:chunks")
        return [{k.decode(): v.decode() for k, v in fields.items()} for _, fields in entries]

    async def until(self, status: str, timeout_s: float = 10) -> dict[str, str]:
        """Waits for a status with nothing in flight."""
        async with asyncio.timeout(timeout_s):
            while True:
                state = await self.state()
                if state.get("status") == status and "inflight" not in state:
                    return state
                await asyncio.sleep(0.005)
