"""How scripts are loaded and run, whatever the URL asks of the client, and what a broker in trouble answers."""

import asyncio

import pytest
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from contracts.broker import BrokerFullError, command_client
from contracts.errors import BrokerError, CorruptDataError
from contracts.lifecycle import Status
from contracts.session_scripts import Outcome
from contracts.state import SessionState
from support.broker import RealBroker
from support.relay import Relay
from support.script_world import World

SHAPES = [
    "",
    "?protocol=2",
    "?protocol=3",
    "?decode_responses=true",
    "?protocol=3&decode_responses=true",
    "?protocol=3&socket_timeout=0.5&max_connections=1&retry_on_timeout=true",
]


@pytest.mark.parametrize("shape", SHAPES)
async def test_what_the_url_asks_of_the_replies_makes_no_difference(shape: str, broker: RealBroker) -> None:
    client = command_client(broker.url + shape)
    world = World(client)
    try:
        await world.create()
        assert await world.accept(3) == "ACCEPTED"
        await world.bare(1)
        outcome, newer = await world.begin([3], "next-1", cursor="0-0")
        assert (outcome, [fields for _, fields in newer]) == (
            Outcome.NEWER,
            [{b"event_id": b"3", b"prompt": b"p"}, {b"event_id": b"1", b"prompt": b"p"}],
        )
        assert (await world.begin([1, 3], "next-1"))[0] is Outcome.BEGUN
        await world.accept(4)
        committed = await world.commit(cursor="0-0")
        assert [fields for _, fields in committed.newer] == [{b"event_id": b"4", b"prompt": b"p"}]
        assert await world.scripts.adopt(world.session_id, world.epoch) == await world.stored()
    finally:
        await client.aclose()


@pytest.mark.parametrize("broker_options", [{"protocol": 3}, {"protocol": 2}])
async def test_a_client_of_either_protocol_runs_the_scripts(
    broker_options: dict[str, int], real: redis.asyncio.Redis
) -> None:
    world = World(real)
    await world.create()
    await world.chunks([1], [2])

    assert (await world.scripts.adopt(world.session_id, world.epoch)) == await world.stored()


async def test_scripts_flushed_in_the_middle_of_a_life_are_loaded_again(world: World) -> None:
    await world.create()
    await world.client.script_flush()
    await world.chunks([1])
    await world.client.script_flush()
    await world.begin_close()
    await world.client.script_flush()

    assert await world.finish_close() is Outcome.CLOSED


async def test_fifty_callers_that_find_no_script_all_get_an_answer(real: redis.asyncio.Redis) -> None:
    worlds = [World(real, session_id=f"world-{number}") for number in range(50)]

    assert set(await asyncio.gather(*(world.create() for world in worlds))) == {Outcome.CREATED}


async def test_a_broker_that_is_not_there_is_a_typed_error() -> None:
    client = redis.asyncio.Redis(port=1, retry=Retry(NoBackoff(), 0))
    try:
        with pytest.raises(BrokerError, match="adopt"):
            await World(client).scripts.adopt("world-1", 1)
    finally:
        await client.aclose()


async def test_a_reply_that_is_lost_leaves_a_call_that_can_be_sent_again(relay: Relay) -> None:
    client = command_client(relay.url)
    world = World(client)
    try:
        await world.create()
        await world.accept(3)
        await world.begin([3], "next-1")
        state, record = await world.state(), await world.in_flight()
        fields, head = world.chunk(state, record)

        async def commit() -> Outcome:
            done = await world.scripts.commit(
                state, fields, head, incarnation="i", accepted_ms=None, cursor="0-0", ticks_kept=None
            )
            return done.outcome

        await commit_once_loaded(world)
        relay.drop_reply(b"EVALSHA")
        with pytest.raises(BrokerError):
            await commit()

        assert await commit() is Outcome.DUP
        assert (await world.stored()).chunk_index == 1
        assert await client.xlen(world.k.chunks) == 1
        assert [answer["command_id"] for answer in await world.answers()] == ["create-1", "next-1"]
    finally:
        await client.aclose()


async def commit_once_loaded(world: World) -> None:
    """Has the commit script in the broker's cache, by a call that is refused."""
    state = await world.state()
    fields, head = world.chunk(state, await world.in_flight())
    other = fields | {"request_id": "ar-x"}
    await world.scripts.commit(
        state, other, head, incarnation="i", accepted_ms=None, cursor="0-0", ticks_kept=None
    )


async def test_a_script_that_fails_inside_names_itself(real: redis.asyncio.Redis) -> None:
    world = World(real)
    await world.create()
    await real.hset(world.k.state, "inflight", "no JSON")

    with pytest.raises(CorruptDataError, match="end_inflight") as caught:
        await world.scripts.end_inflight(await _mirror(world), "ar-x")
    assert caught.value.field == "end_inflight"


async def _mirror(world: World) -> SessionState:
    await world.client.hdel(world.k.state, "inflight")
    state = await world.state()
    await world.client.hset(world.k.state, "inflight", "no JSON")
    return state


async def test_a_full_broker_refuses_new_sessions_and_events_but_a_session_on_it_closes(
    broker: RealBroker, real: redis.asyncio.Redis
) -> None:
    world, other = World(real), World(real, session_id="world-2")
    await world.create()
    await world.accept(3)
    await world.begin([3], "next-1", prompt="p", reducer_state="1")
    await real.set("ballast", "x" * 3_000_000)
    await real.config_set("maxmemory", "1mb")

    for refused in (other.create(), world.accept(4)):
        with pytest.raises(BrokerFullError) as caught:
            await refused
        assert (caught.value.code, caught.value.retryable) == ("broker_full", True)
    assert await real.exists(other.k.state, other.k.events, other.k.answers) == 0

    assert (await world.commit()).outcome is Outcome.COMMITTED
    with pytest.raises(BrokerFullError):
        await world.begin([], "next-2")
    assert await world.begin_close() is Outcome.BEGUN
    assert await world.resend() is Outcome.SENT
    assert await world.finish_close() is Outcome.CLOSED
    assert [answer["command_id"] for answer in await world.answers()] == ["create-1", "next-1", "close-1"]


async def test_a_full_broker_takes_over_and_closes_a_tombstone(
    broker: RealBroker, real: redis.asyncio.Redis
) -> None:
    world = World(real)
    await world.bring_to(Status.CLOSING)
    await real.set("ballast", "x" * 3_000_000)
    await real.config_set("maxmemory", "1mb")

    assert await world.partitions.claim(0, "host-2", 5_000) is not None
    world.epoch += 1
    assert await world.scripts.adopt(world.session_id, world.epoch) is not None
    assert await world.fail_close() is Outcome.CLEANUP_FAILED
    assert await world.begin_close("close-2") is Outcome.BEGUN
    assert await world.finish_close() is Outcome.CLOSED


async def test_a_creation_over_a_closed_session_drops_nothing_where_the_broker_is_full(
    broker: RealBroker, real: redis.asyncio.Redis
) -> None:
    world = World(real)
    await world.create()
    await world.chunks([1])
    await world.begin_close()
    await world.finish_close()
    await real.set("ballast", "x" * 3_000_000)
    await real.config_set("maxmemory", "1mb")
    await world.mark()

    with pytest.raises(BrokerFullError):
        await world.create("create-2")
    assert await world.changes() == {}
