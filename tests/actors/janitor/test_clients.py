"""Sessions whose client is gone or that nobody uses are closed; a client that is back keeps its session."""

import asyncio
from collections.abc import Callable

import pytest
import redis.asyncio

from actors.broker_pool import Broker
from actors.client import SessionClient
from actors.config import ClientSettings, JanitorSettings
from actors.janitor.clients import Clients
from actors.janitor.connection import Connection
from actors.janitor.facts import Facts
from contracts.commands import Command, Condition
from contracts.errors import BrokerError
from contracts.lifecycle import Status
from support.broker import RealBroker
from support.hosting import Caller, running_host
from support.invariants import check_invariants
from support.janitors import Start, eventually, ready
from support.scripted_worker import ScriptedWorker, failing

LIMIT_MS = 1_500


async def reasons(world: Caller) -> list[str]:
    entries = await world.client.xrange(f"{world.base}:history")
    return [fields[b"reason"].decode() for _, fields in entries if fields[b"trigger"] == b"close_requested"]


async def test_a_client_that_is_gone_has_its_session_closed(
    world: Caller, worker: ScriptedWorker, janitor: Start, broker: RealBroker
) -> None:
    await ready(janitor())
    settings = ClientSettings(REDIS_URL=broker.url)  # type: ignore[call-arg]
    async with SessionClient(world.session_id, settings=settings) as client:
        await client.create(model=worker.model, presence_ms=LIMIT_MS)
        await asyncio.sleep(2.5 * LIMIT_MS / 1000)
        assert (await world.state())["status"] == "ACTIVE", "its client is there"

    await world.until("CLOSED", 20)

    assert await reasons(world) == ["absent"]
    await check_invariants(world.client)


async def test_a_session_that_nobody_uses_is_closed(
    world: Caller, worker: ScriptedWorker, janitor: Start
) -> None:
    await ready(janitor())
    await world.ok("create", model=worker.model, idle_ms=LIMIT_MS)
    for event_id in range(6):
        await world.event(event_id, prompt="still here")
        await asyncio.sleep(LIMIT_MS / 3000)
    assert (await world.state())["status"] == "ACTIVE", "events came"

    await world.until("CLOSED", 20)

    assert await reasons(world) == ["idle"]
    await check_invariants(world.client)


async def test_a_failed_session_is_closed_as_well(
    world: Caller, worker: ScriptedWorker, janitor: Start
) -> None:
    worker.on_request = failing()
    await world.ok("create", model=worker.model, idle_ms=LIMIT_MS)
    await world.refused("next_chunk")
    await ready(janitor())

    await world.until("CLOSED", 20)


async def test_a_session_without_limits_lives_on(
    world: Caller, worker: ScriptedWorker, janitor: Start
) -> None:
    other = Caller(world.client, "world-2")
    await world.ok("create", model=worker.model)
    await other.ok("create", model=worker.model, idle_ms=LIMIT_MS)
    await ready(janitor())

    await other.until("CLOSED", 20)

    assert (await world.state())["status"] == "ACTIVE"


async def test_a_tick_that_takes_long_is_no_idleness(
    world: Caller, worker: ScriptedWorker, janitor: Start
) -> None:
    await ready(janitor())
    await world.ok("create", model=worker.model, idle_ms=200)
    worker.gate.clear()
    waiting = await world.send("next_chunk")
    await worker.arrived(1)
    await asyncio.sleep(1.5)
    assert "inflight" in await world.state()
    worker.gate.set()

    assert (await world.answer_to(waiting))["ok"]
    await world.until("CLOSED", 20)


async def test_two_janitors_close_it_once(world: Caller, worker: ScriptedWorker, janitor: Start) -> None:
    await asyncio.gather(ready(janitor("--janitor-id", "a")), ready(janitor("--janitor-id", "b")))
    await world.ok("create", model=worker.model, presence_ms=LIMIT_MS)

    await world.until("CLOSED", 20)

    assert worker.kinds().count("release") == 1


# --- between the suspicion and the close
async def test_a_client_that_is_back_before_the_host_looks_keeps_its_session(
    world: Caller, worker: ScriptedWorker
) -> None:
    await world.ok("create", model=worker.model, presence_ms=LIMIT_MS)
    life = (await world.state())["life"]
    await world.client.set(f"{world.base}:presence", "1")

    error = await world.refused("disconnect", life=life, reason="absent", only_if="absent")

    assert error["code"] == "invalid_state"
    assert (await world.state())["status"] == "ACTIVE"
    assert await world.client.zscore("wl:tombstones", world.session_id) is None
    await check_invariants(world.client)


async def test_another_life_is_left_alone(world: Caller, worker: ScriptedWorker) -> None:
    await world.ok("create", model=worker.model, presence_ms=LIMIT_MS)
    before = (await world.state())["life"]
    await world.ok("reset")

    error = await world.refused("disconnect", life=before, only_if="absent")

    assert "another life" in error["message"]
    assert (await world.state())["status"] == "ACTIVE"


# --- a broker that was away
async def test_nothing_is_acted_on_before_a_whole_period_after_the_broker_came_back(
    new_broker: Callable[..., RealBroker], janitor: Start, processes
) -> None:
    own = new_broker()
    async with (
        ScriptedWorker(own.url, name="gpu-0") as worker,
        running_host(own.url, lease_ms=1_000),
        redis.asyncio.Redis.from_url(own.url) as client,
    ):
        world = Caller(client)
        await world.ok("create", model=worker.model, presence_ms=60_000)
        await client.hset(f"{world.base}:state", "created_at_ms", 1_000)
        process = await ready(janitor(REDIS_URL=own.url))
        await asyncio.sleep(2)
        assert (await world.state())["status"] == "ACTIVE", "the janitor itself has only just come"

        await client.hset(f"{world.base}:state", "presence_ms", 500)
        await eventually(lambda: closed(world), "the close")
        assert await asyncio.to_thread(process.stop) == 0


async def test_a_broker_that_was_started_anew_between_two_looks_is_noticed(
    new_broker: Callable[..., RealBroker],
) -> None:
    own = new_broker()
    settings = JanitorSettings(REDIS_URL=own.url)  # type: ignore[call-arg]
    async with Broker(settings=settings) as broker:
        connection = Connection(broker.commands)
        await connection.look()
        await asyncio.sleep(0.2)
        await connection.look()
        before = connection.age_ms
        own.restart(kill=True)
        await eventually(lambda: looks(connection), "the broker")

        assert before >= 200
        assert connection.age_ms < before


async def test_a_broker_that_was_silent_and_is_the_same_was_away_too(broker: RealBroker) -> None:
    settings = JanitorSettings(REDIS_URL=broker.url)  # type: ignore[call-arg]
    async with Broker(settings=settings) as connected:
        connection = Connection(connected.commands)
        await connection.look()
        await asyncio.sleep(0.2)
        before = connection.age_ms

        connection.broken()
        await connection.look()

        assert connection.age_ms < before


async def test_limits_count_from_the_last_break(real: redis.asyncio.Redis, broker: RealBroker) -> None:
    await real.hset("wl:config", "partitions", 8)
    for index in range(8):
        await real.hset(f"wl:{{p{index}}}:lease", mapping={"owner": "h", "epoch": 1, "expires_at_ms": 10**14})
    item = Facts("world-1", Status.ACTIVE, life="l1", presence_ms=1_000)
    settings = JanitorSettings(REDIS_URL=broker.url)  # type: ignore[call-arg]
    async with Broker(settings=settings) as connected:
        clients = Clients(connected, period_ms=60_000)

        await clients.look([item], now_ms=10**13, connected_for_ms=999)
        assert await real.xlen(Caller(real).inbox) == 0
        await clients.look([item], now_ms=10**13, connected_for_ms=1_000)
        await clients.look([item], now_ms=10**13, connected_for_ms=5_000)

    [(_, fields)] = await real.xrange(Caller(real).inbox)
    command = Command.from_json(fields[b"command"])
    assert (command.args["life"], command.args["only_if"]) == ("l1", Condition.ABSENT)


async def closed(world: Caller) -> bool:
    return (await world.state())["status"] == "CLOSED"


async def looks(connection: Connection) -> bool:
    try:
        await connection.look()
    except BrokerError:
        connection.broken()
        return False
    return True


@pytest.mark.parametrize("limit", ["presence_ms", "idle_ms"])
async def test_a_limit_of_zero_is_none(
    limit: str, world: Caller, worker: ScriptedWorker, janitor: Start
) -> None:
    other = Caller(world.client, "world-2")
    await world.ok("create", model=worker.model, **{limit: 0})
    await other.ok("create", model=worker.model, idle_ms=300)
    await ready(janitor())

    await other.until("CLOSED", 20)

    assert (await world.state())["status"] == "ACTIVE"
