"""What is left over or missing is put right within a period."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import redis.asyncio

from actors.config import JanitorSettings
from actors.janitor.closes import CloseJob
from actors.janitor.reconciler import Reconciler
from support.broker import RealBroker
from support.hosting import Caller
from support.invariants import check_invariants
from support.janitors import eventually, tombstone
from support.scripted_worker import ScriptedWorker, failing

STATUSES = ("ACTIVE", "FAILED", "CLOSING", "CLOSED", "CLEANUP_FAILED")


async def no_queue(job: CloseJob, wait_ms: int) -> bool:
    return False


@asynccontextmanager
async def reconciling(url: str, **settings: int) -> AsyncIterator[None]:
    """A reconciler without a job queue in this loop."""
    usual = {"REDIS_URL": url, "reconcile_ms": 100, "lease_ms": 1_000, **settings}
    stop, ready = asyncio.Event(), asyncio.Event()
    running = Reconciler(JanitorSettings(**usual), no_queue)  # type: ignore[arg-type]
    task = asyncio.create_task(running.run(stop, on_ready=ready.set))
    await asyncio.wait_for(ready.wait(), 10)
    try:
        yield
    finally:
        stop.set()
        await asyncio.wait_for(task, 20)


@pytest.fixture
async def janitor(broker: RealBroker) -> AsyncIterator[None]:
    async with reconciling(broker.url):
        yield


async def is_in(real: redis.asyncio.Redis, index: str, session_id: str = "world-1") -> bool:
    return await real.zscore(index, session_id) is not None


async def listed(real: redis.asyncio.Redis, session_id: str = "world-1") -> list[str]:
    return [s for s in STATUSES if await is_in(real, f"wl:sessions:{s}", session_id)]


# --- indexes against hashes
@pytest.mark.parametrize("wrong", ["FAILED", "CLOSING", "CLOSED", "CLEANUP_FAILED"])
async def test_an_entry_of_another_status_is_removed(
    wrong: str, world: Caller, worker: ScriptedWorker, janitor: None
) -> None:
    await world.ok("create", model=worker.model)
    await world.client.zadd(f"wl:sessions:{wrong}", {"world-1": 1_000})

    async def right() -> bool:
        return await listed(world.client) == ["ACTIVE"]

    await eventually(right, "only the right index")


@pytest.mark.parametrize("index", [*(f"wl:sessions:{s}" for s in STATUSES), "wl:tombstones"])
async def test_an_entry_without_a_session_is_removed(
    index: str, world: Caller, real: redis.asyncio.Redis, janitor: None
) -> None:
    await real.zadd(index, {"nobody": 1_000})

    async def gone() -> bool:
        return not await is_in(real, index, "nobody")

    await eventually(gone, "the entry to go")


async def test_an_entry_that_a_host_may_just_be_writing_is_left_alone(
    world: Caller, real: redis.asyncio.Redis, janitor: None
) -> None:
    seconds, _ = await real.time()
    await real.zadd("wl:sessions:ACTIVE", {"being-made": seconds * 1000})
    await real.zadd("wl:sessions:ACTIVE", {"old": 1_000})

    async def swept() -> bool:
        return not await is_in(real, "wl:sessions:ACTIVE", "old")

    await eventually(swept, "a whole pass")

    assert await is_in(real, "wl:sessions:ACTIVE", "being-made")


async def test_a_closed_session_that_expired_leaves_its_index(
    world: Caller, worker: ScriptedWorker, janitor: None
) -> None:
    await world.ok("create", model=worker.model)
    await world.ok("close")
    assert await listed(world.client) == ["CLOSED"]
    await world.client.delete(f"{world.base}:state")

    async def gone() -> bool:
        return await listed(world.client) == []

    await eventually(gone, "the entry to go")


@pytest.mark.parametrize("found_in", ["another index", "live", "reservation", "tombstones"])
async def test_a_session_that_its_index_lost_is_entered_again(
    found_in: str, world: Caller, worker: ScriptedWorker, janitor: None
) -> None:
    status = "CLEANUP_FAILED" if found_in == "tombstones" else "ACTIVE"
    limits = {"idle_ms": 3_600_000} if found_in == "live" else {}
    await world.ok("create", model=worker.model, **limits)
    if found_in == "another index":
        await world.client.zadd("wl:sessions:FAILED", {"world-1": 1_000})
    if found_in == "tombstones":  # one that is given up, so that it stays
        fields = {"status": status, "close_attempts": 1_000}
        await world.client.hset(f"{world.base}:state", mapping=fields)
        await world.client.zadd("wl:tombstones", {"world-1": 1_000})
    if found_in != "reservation":
        await world.client.delete(f"wl:{{w:{worker.name}}}:sessions")
    await world.client.zrem("wl:sessions:ACTIVE", "world-1")

    async def right() -> bool:
        return await listed(world.client) == [status]

    await eventually(right, "the right index")


async def test_a_tombstone_that_lost_its_due_entry_gets_one_and_is_closed(
    world: Caller, worker: ScriptedWorker, broker: RealBroker
) -> None:
    await tombstone(world, worker, failures=1)
    await world.client.delete("wl:tombstones")

    async with reconciling(broker.url):
        await world.until("CLOSED", 20)
    await check_invariants(world.client)


async def test_a_session_that_was_left_closing_is_closed_at_last(
    world: Caller, worker: ScriptedWorker, broker: RealBroker, real: redis.asyncio.Redis
) -> None:
    # Given a session that somebody has left CLOSING: nothing is in flight, and no command waits for it
    await world.ok("create", model=worker.model)
    await world.ok("next_chunk")
    await real.hset("wl:{world-1}:state", mapping={"status": "CLOSING", "updated_at_ms": 1_000})
    await real.zrem("wl:sessions:ACTIVE", "world-1")
    for index in ("wl:sessions:CLOSING", "wl:tombstones"):
        await real.zadd(index, {"world-1": 1_000})

    async with reconciling(broker.url):
        await world.until("CLOSED", 20)
    assert worker.kinds() == ["tick", "release"]


async def test_a_state_that_can_not_be_read_stops_nothing_else(
    world: Caller, worker: ScriptedWorker, broker: RealBroker, real: redis.asyncio.Redis
) -> None:
    await tombstone(world, worker, failures=1)
    await real.set("wl:{broken}:state", "not ours")
    await real.hset("wl:{strange}:state", "status", "SLEEPING")
    for index in ("wl:tombstones", "wl:sessions:ACTIVE", "wl:sessions:CLEANUP_FAILED"):
        await real.zadd(index, {"broken": 1, "strange": 2, "no id at all": 3})
    await real.set("wl:sessions:FAILED", "not ours")

    async with reconciling(broker.url):
        await world.until("CLOSED", 20)

    assert await is_in(real, "wl:tombstones", "broken")


async def without_owner(caller: Caller) -> dict[str, str]:
    """The state, but for who owns it: a host that was not let run for long claims its partition anew."""
    state = await caller.state()
    return {name: value for name, value in state.items() if name not in {"epoch", "fence"}}


async def test_a_healthy_deployment_is_left_as_it_is(
    world: Caller, worker: ScriptedWorker, broker: RealBroker
) -> None:
    callers = [Caller(world.client, f"w{number}") for number in range(6)]
    for number, caller in enumerate(callers):
        await caller.ok("create", model=worker.model, idle_ms=3_600_000)
        await caller.ok("next_chunk")
        if number % 2:
            await caller.ok("close")
    before = [await without_owner(caller) for caller in callers]

    async with reconciling(broker.url):
        await asyncio.sleep(1)

    assert [await without_owner(caller) for caller in callers] == before
    await check_invariants(world.client)


# --- closes whose host is nowhere
async def test_a_session_that_stays_closing_is_closed_again(
    world: Caller, worker: ScriptedWorker, broker: RealBroker
) -> None:
    worker.gate.clear()
    await world.ok("create", model=worker.model)
    await world.send("close")
    await worker.arrived(1)
    await world.client.hset(f"{world.base}:state", "updated_at_ms", 1_000)

    async with reconciling(broker.url):
        await eventually(lambda: sent(world, "close-"), "a close of the janitor")
        worker.gate.set()
        await world.until("CLOSED", 20)


async def sent(world: Caller, prefix: str) -> bool:
    entries = await world.client.xrange(world.inbox)
    return any(f'"command_id":"{prefix}'.encode() in fields.get(b"command", b"") for _, fields in entries)


# --- long streams
@pytest.mark.parametrize("failed", [False, True])
async def test_a_long_stream_of_events_is_swept_where_nobody_ticks(
    failed: bool, world: Caller, worker: ScriptedWorker, janitor: None
) -> None:
    await world.ok("create", model=worker.model, max_pending_events=4)
    if failed:
        worker.on_request = failing()
        await world.refused("next_chunk")
        await world.until("FAILED")
    for event_id in range(1, 30):
        await world.event(event_id, prompt="p")

    async def short() -> bool:
        return await world.pending() <= 4

    await eventually(short, "a stream of four at most")
    reasons = {entry["reason"] for entry in await world.rejected()}
    assert reasons == {"not_active" if failed else "queue_full"}


async def test_a_stream_within_its_limit_is_left_alone(
    world: Caller, worker: ScriptedWorker, broker: RealBroker
) -> None:
    await world.ok("create", model=worker.model, max_pending_events=4)
    for event_id in range(4):
        await world.event(event_id, prompt="p")
    before = await world.answers()

    async with reconciling(broker.url):
        await asyncio.sleep(0.5)

    assert await world.answers() == before
    assert await world.pending() == 4
