"""Many clients on many sessions at once, with a model that fails, a worker that evicts, and hosts that die."""

import asyncio
import contextlib
import json
import random
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio

from contracts.broker import blocking_client
from contracts.errors import EventStaleError, SessionError
from support.broker import RealBroker
from support.hosting import Caller, dying_host, running_host
from support.invariants import check_invariants
from support.scripted_worker import ScriptedWorker, failing

SESSIONS = 50
CLIENTS = 200
CALLS = 6
DEATHS = 2
OPS = {"next_chunk": 50, "accept": 25, "reset": 8, "close": 5, "create": 8, "run": 3, "pause": 3, "evict": 2}
REFUSALS = {
    "next_chunk": {"not_found", "invalid_state", "model_error", "expired", "evicted"},
    "reset": {"not_found", "invalid_state", "evicted"},
    "close": {"not_found", "model_error"},
    "create": {"already_exists"},
    "run": {"not_found", "invalid_state"},
    "pause": {"not_found", "invalid_state"},
}
"""Errors that an operation may be answered with here; any other is a defect."""


class Crowd:
    """What all clients did, and what came of it."""

    def __init__(self, client: redis.asyncio.Redis, seed: int, *, poison: bool = False) -> None:
        self.client = client
        self.excused = {"command_poisoned"} if poison else set()
        self.random = random.Random(seed)
        self.callers = [Caller(client, f"world-{i}") for i in range(SESSIONS)]
        self.creating = [asyncio.Lock() for _ in self.callers]
        self.event_ids = [0] * SESSIONS
        self.accepting = [0] * SESSIONS
        self.answers: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self.told: Counter[str] = Counter()
        self.accepted: list[set[int]] = [set() for _ in self.callers]
        self.applied: list[list[int]] = [[] for _ in self.callers]
        self.dropped: list[list[int]] = [[] for _ in self.callers]

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._listen())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _listen(self) -> None:
        cursors: dict[str, Any] = {f"{caller.base}:answers": "0" for caller in self.callers}
        while True:
            for key, entries in await self.client.xread(cursors, block=200):
                for entry_id, fields in entries:
                    cursors[key.decode()] = entry_id
                    answer = json.loads(fields[b"answer"])
                    self.told[answer["command_id"]] += 1
                    if not self.answers[answer["command_id"]].done():
                        self.answers[answer["command_id"]].set_result(answer)

    async def call(self, number: int, op: str, **args: Any) -> dict[str, Any]:
        command_id = secrets.token_hex(8)
        self.answers[command_id] = asyncio.get_running_loop().create_future()
        await self.callers[number].send(op, command_id, **args)
        answer = await asyncio.wait_for(self.answers[command_id], 60)
        if not answer["ok"]:
            assert answer["error"]["code"] in REFUSALS[op] | self.excused, (op, answer)
        return answer

    async def act(self, worker: ScriptedWorker) -> None:
        number = self.random.randrange(SESSIONS)
        op = self.random.choices(list(OPS), list(OPS.values()))[0]
        if op == "accept":
            await self.accept(number)
        elif op == "create":
            await self.create(number)
        elif op == "evict":
            caller = self.callers[number]
            state = await caller.state()
            if "life" in state:
                await worker.tell("evicted", caller.session_id, caller.inbox, life=state["life"])
        else:
            await self.call(number, op, **({"pace_ms": 1} if op == "run" else {}))

    async def accept(self, number: int) -> None:
        self.event_ids[number] += self.random.choice((1, 1, 1, 3))
        event_id = self.event_ids[number] - self.random.choice((0, 0, 1))
        self.accepting[number] += 1
        with contextlib.suppress(SessionError, EventStaleError):
            receipt = await self.callers[number].accept(event_id, "p")
            if receipt.status == "ACCEPTED":
                self.accepted[number].add(event_id)
        self.accepting[number] -= 1

    async def create(self, number: int) -> None:
        """A creation deletes what the life before it left, so that is taken down first; nothing changes in CLOSED.

        Ids of the life before are not used again, so that events can be told apart: not by one that is on its way either.
        """
        async with self.creating[number]:
            state = await self.callers[number].state()
            if state.get("status", "CLOSED") != "CLOSED":
                return
            await self.take_down(number)
            self.event_ids[number] += 2
            while self.accepting[number]:
                await asyncio.sleep(0.001)
            await self.call(number, "create", model="scripted")

    async def take_down(self, number: int) -> None:
        caller = self.callers[number]
        for chunk in await caller.chunks():
            self.applied[number] += json.loads(chunk["applied_event_ids"])
        for entry in await caller.rejected():
            self.dropped[number].append(int(entry["event_id"]))

    async def end(self) -> None:
        """Closes whatever lives, however often it takes."""
        for number in range(SESSIONS):
            while (await self.callers[number].state()).get("status", "CLOSED") != "CLOSED":
                await self.call(number, "close")
            if await self.callers[number].state():
                await self.take_down(number)

    def check(self) -> None:
        """Every command has one answer, every accepted event is applied once or reported dropped."""
        assert self.told.keys() == self.answers.keys()
        for number, accepted in enumerate(self.accepted):
            applied, dropped = self.applied[number], self.dropped[number]
            assert len(applied) == len(set(applied)), applied
            assert set(applied) <= accepted
            assert accepted == set(applied) | (accepted & set(dropped)), (accepted, applied, dropped)
            assert not set(applied) & set(dropped)


def unruly(seed: int) -> Any:
    """A worker that fails now and then, each time for another reason."""
    dice = random.Random(seed)
    faults = [failing(), failing("expired"), failing(kind="release")]

    def script(request: dict[str, str]) -> Any:
        roll = dice.random()
        fault = faults[int(roll * 100) % 3] if roll < 0.08 else None
        return fault(request) if fault else None

    return script


@pytest.fixture
async def patient(broker: RealBroker) -> AsyncIterator[redis.asyncio.Redis]:
    """A client that all may share: who finds no free connection waits for one."""
    client = blocking_client(broker.url, block_ms=5_000)
    client.connection_pool.connection_kwargs["socket_connect_timeout"] = 10
    yield client
    await client.aclose()


async def test_two_hundred_clients_on_fifty_sessions(
    broker: RealBroker, patient: redis.asyncio.Redis
) -> None:
    crowd = Crowd(patient, seed=1)

    async def client() -> None:
        for _ in range(CALLS):
            await crowd.act(worker)

    async with ScriptedWorker(broker.url) as worker, running_host(broker.url), crowd.listening():
        worker.on_request = unruly(2)
        await asyncio.gather(*(crowd.create(number) for number in range(SESSIONS)))
        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        await crowd.end()
        await check_invariants(patient)
    crowd.check()
    assert max(crowd.told.values()) == 1


@pytest.mark.parametrize("seed", [3, 4])
async def test_a_crowd_whose_hosts_are_killed_one_after_the_other(
    broker: RealBroker, patient: redis.asyncio.Redis, seed: int
) -> None:
    # Hosts that die so quickly may find a command for the third time though it did not kill them.
    crowd = Crowd(patient, seed, poison=True)
    deaths = 0

    async def client() -> None:
        calls = 0
        while calls < CALLS or deaths < DEATHS:
            await crowd.act(worker)
            calls += 1

    async def hosts(done: asyncio.Event) -> None:
        nonlocal deaths
        while not done.is_set():
            async with dying_host(broker.url, host_id=f"host-{deaths}", lease_ms=300):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(done.wait(), 0.6 + crowd.random.random() / 2)
            deaths += 1

    async with ScriptedWorker(broker.url) as worker, crowd.listening():
        worker.on_request = unruly(seed)
        done = asyncio.Event()
        dying = asyncio.create_task(hosts(done))
        await asyncio.gather(*(crowd.create(number) for number in range(SESSIONS)))
        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        done.set()
        await dying
        async with running_host(broker.url, host_id="last", lease_ms=2_000):
            await crowd.end()
            await check_invariants(patient, crashed=True)
    crowd.check()
    assert deaths >= DEATHS
    assert set(worker.runs.values()) <= {0, 1}
