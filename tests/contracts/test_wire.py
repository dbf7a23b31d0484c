"""Exchanges over a wire: each caller gets the reply to its own request, or an error, whatever happens to the others."""

import asyncio
import gc
import random
import time
from collections.abc import AsyncIterator, Callable

import pytest
import redis.exceptions as rx

from contracts.broker import Client, blocking_client, command_client, map_exceptions
from contracts.errors import BrokerError, CorruptDataError
from support.broker import RealBroker
from support.relay import Relay


@pytest.fixture
async def client(broker: RealBroker) -> AsyncIterator[Client]:
    made = command_client(broker.url)
    yield made
    await made.aclose()


@pytest.fixture
async def slow(relay: Relay) -> AsyncIterator[Client]:
    """A client behind a relay."""
    made = command_client(relay.url, timeout_s=0.5)
    yield made
    await made.aclose()


# --- replies
async def test_commands_answer_as_those_of_the_library_do(client: Client) -> None:
    assert await client.ping() is True
    assert await client.set("a", "1", px=60_000) is True
    assert await client.get("a") == b"1"
    assert await client.hset("h", mapping={"x": 1, "y": "zwei"}) == 2
    assert await client.hgetall("h") == {b"x": b"1", b"y": b"zwei"}
    entry = await client.xadd("s", {"field": "value"})
    assert await client.xread({"s": "0-0"}) == [[b"s", [(entry, {b"field": b"value"})]]]
    assert (await client.config_get("appendonly")) == {"appendonly": "yes"}
    assert await client.hmget("h", ["x", "none"]) == [b"1", None]


async def test_an_error_of_the_broker_keeps_its_kind_and_the_connection(client: Client) -> None:
    await client.set("a", "1")
    number = await client.client_id()

    with pytest.raises(rx.NoScriptError):
        await client.evalsha("0" * 40, 0)
    with pytest.raises(CorruptDataError), map_exceptions("a"):
        await client.xadd("a", {"b": "c"})

    assert await client.client_id() == number


async def test_what_can_not_be_packed_is_refused_before_anything_is_sent(client: Client) -> None:
    number = await client.client_id()

    with pytest.raises(TypeError):
        await client.set("a", None)  # type: ignore[arg-type]

    assert await client.client_id() == number
    assert await client.get("a") is None


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 3_000_000])
async def test_values_of_any_size_come_back_whole(client: Client, size: int) -> None:
    value = random.Random(size).randbytes(size)

    await client.set("a", value)

    assert await client.get("a") == value


async def test_a_url_with_another_protocol_changes_no_shape(broker: RealBroker) -> None:
    client = command_client(broker.url + "?protocol=3&decode_responses=true")

    assert await client.hset("h", "x", "1") == 1
    assert await client.hgetall("h") == {b"x": b"1"}
    await client.aclose()


async def test_a_loop_that_stood_still_reads_before_it_judges_what_is_late(relay: Relay) -> None:
    client = command_client(relay.url, timeout_s=0.2)
    await client.ping()
    asked = asyncio.ensure_future(client.get("a"))
    await asyncio.sleep(0)
    time.sleep(0.5)  # noqa: ASYNC251 - the loop is to stand still

    assert await asked is None
    await client.aclose()


# --- pipelines
@pytest.mark.parametrize("transaction", [True, False])
async def test_a_pipeline_gives_the_replies_in_order(client: Client, transaction: bool) -> None:
    pipeline = client.pipeline(transaction=transaction)
    pipeline.set("a", "1")
    pipeline.hset("h", "x", "1")
    pipeline.hgetall("h")

    assert await pipeline.execute() == [True, 1, {b"x": b"1"}]
    assert await pipeline.execute() == []


@pytest.mark.parametrize("transaction", [True, False])
async def test_an_error_in_a_pipeline_is_raised_or_given_in_its_place(
    client: Client, transaction: bool
) -> None:
    for raises in (True, False):
        pipeline = client.pipeline(transaction=transaction)
        pipeline.set("a", "1")
        pipeline.hget("a", "x")
        pipeline.get("a")
        if raises:
            with pytest.raises(rx.ResponseError, match="WRONGTYPE"):
                await pipeline.execute()
        else:
            first, error, last = await pipeline.execute(raise_on_error=False)
            assert (first, last) == (True, b"1")
            assert isinstance(error, rx.ResponseError)


async def test_a_transaction_that_can_not_be_queued_says_why_and_writes_nothing(client: Client) -> None:
    pipeline = client.pipeline(transaction=True)
    pipeline.set("a", "1")
    pipeline.execute_command("NO-SUCH-COMMAND")

    with pytest.raises(rx.ResponseError, match="unknown command"):
        await pipeline.execute()

    assert await client.get("a") is None


async def test_a_pipeline_that_blocks_ends_with_its_first_error(broker: RealBroker) -> None:
    client = blocking_client(broker.url, block_ms=60_000)
    await client.set("a", "1")
    pipeline = client.pipeline(transaction=False)
    pipeline.xadd("a", {"b": "c"})
    pipeline.xread({"s": "0-0"}, block=60_000)

    with pytest.raises(rx.ResponseError, match="WRONGTYPE"):
        async with asyncio.timeout(30):
            await pipeline.execute()

    assert await client.get("a") == b"1"
    await client.aclose()


async def test_watching_is_refused(client: Client) -> None:
    with pytest.raises(NotImplementedError):
        await client.pipeline().watch("a")


# --- cancellation, loss, time
@pytest.mark.parametrize(
    "make",
    [command_client, lambda url: blocking_client(url, block_ms=1_000, max_connections=4)],
    ids=["one-connection", "pool"],
)
async def test_a_cancelled_call_never_spoils_the_next_one(
    relay: Relay, make: Callable[[str], Client]
) -> None:
    relay.delay_s = 0.005
    client = make(relay.url)
    keys = [f"k{number}" for number in range(50)]
    await client.mset({key: key for key in keys})
    choice = random.Random(4)

    async def get(key: str) -> None:
        assert await client.get(key) == key.encode()

    for _ in range(30):
        tasks = [asyncio.create_task(get(choice.choice(keys))) for _ in range(16)]
        await asyncio.sleep(choice.uniform(0, 0.012))
        for task in tasks[::2]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [r for r in results if r is not None and not isinstance(r, asyncio.CancelledError)] == []
    await get("k1")
    await client.aclose()


async def test_a_cancelled_blocking_read_frees_its_place_at_once(broker: RealBroker) -> None:
    client = blocking_client(broker.url, block_ms=5_000, max_connections=1)
    reading = asyncio.create_task(client.xread({"s": "0-0"}, block=5_000))
    await asyncio.sleep(0.1)

    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading

    async with asyncio.timeout(1):
        assert await client.ping() is True
    await client.aclose()


async def test_a_lost_reply_is_an_error_and_is_not_sent_again(slow: Client, relay: Relay) -> None:
    await slow.set("a", "0")
    relay.drop_reply(b"INCR")

    with pytest.raises(BrokerError), map_exceptions("a"):
        await slow.incr("a")

    assert await slow.get("a") == b"1"


async def test_a_reply_that_takes_too_long_is_an_error_and_never_comes_later(
    slow: Client, relay: Relay
) -> None:
    await slow.set("a", "late")
    relay.delay_s = 1.0

    with pytest.raises(rx.TimeoutError):
        await slow.get("a")

    relay.delay_s = 0.0
    await slow.set("a", "new")
    await asyncio.sleep(0.8)
    assert await slow.get("a") == b"new"


async def test_one_clock_watches_many_exchanges(slow: Client, relay: Relay) -> None:
    """The timer was set by the first exchange; the last one has its whole time nevertheless."""
    started = time.monotonic()
    while time.monotonic() - started < 0.4:
        await slow.ping()
    relay.delay_s = 0.3

    assert await slow.ping() is True


async def test_a_broker_that_comes_back_is_found_again(new_broker) -> None:  # type: ignore[no-untyped-def]
    server = new_broker()
    client = command_client(server.url)
    await client.set("a", "1")

    server.stop()
    with pytest.raises(BrokerError), map_exceptions("a"):
        await client.get("a")
    server.start()

    assert await client.get("a") == b"1"
    await client.aclose()


async def test_a_replica_that_refuses_a_write_is_left(broker: RealBroker, client: Client) -> None:
    """After a failover the name leads to another server, so the connection is of no use."""
    number = await client.client_id()
    await client.replicaof("127.0.0.1", 1)
    try:
        with pytest.raises(BrokerError, match="read-only"), map_exceptions("a"):
            await client.set("a", "1")
    finally:
        await client.replicaof("NO", "ONE")

    assert await client.client_id() != number
    assert await client.set("a", "1") is True


async def test_a_wrong_password_is_an_error_of_the_broker(broker: RealBroker) -> None:
    client = command_client(broker.url.replace("redis://", "redis://nobody:wrong@"))

    with pytest.raises(BrokerError), map_exceptions("PING"):
        await client.ping()

    await client.aclose()


# --- one connection
async def test_commands_reach_the_broker_in_the_order_in_which_they_were_given(broker: RealBroker) -> None:
    client = command_client(broker.url)

    await asyncio.gather(*(client.rpush("list", number) for number in range(300)))

    assert await client.lrange("list", 0, -1) == [str(number).encode() for number in range(300)]
    assert len({await client.client_id() for _ in range(3)}) == 1
    await client.aclose()


async def test_a_cancelled_command_leaves_the_connection_to_the_others(slow: Client, relay: Relay) -> None:
    await slow.set("a", "1")
    relay.delay_s = 0.05
    number = asyncio.create_task(slow.client_id())
    cancelled = [asyncio.create_task(slow.get("a")) for _ in range(20)]
    last = asyncio.create_task(slow.client_id())
    await asyncio.sleep(0.01)

    for task in cancelled:
        task.cancel()

    assert await number == await last
    assert await slow.get("a") == b"1"


async def test_all_who_wait_for_a_connection_hear_that_there_is_none(new_broker) -> None:  # type: ignore[no-untyped-def]
    server = new_broker()
    server.stop()
    client = command_client(server.url)

    results = await asyncio.gather(*(client.ping() for _ in range(20)), return_exceptions=True)

    assert {type(result) for result in results} == {rx.ConnectionError}
    server.start()
    assert await client.ping() is True
    await client.aclose()


async def test_a_client_that_is_closed_while_it_connects_says_so(broker: RealBroker) -> None:
    client = command_client(broker.url)
    waiting = asyncio.create_task(client.ping())
    await asyncio.sleep(0)

    await client.aclose()

    with pytest.raises(rx.ConnectionError):
        await waiting
    assert await client.ping() is True
    await client.aclose()


# --- places
async def test_callers_beyond_the_limit_wait_for_a_place(broker: RealBroker) -> None:
    client = blocking_client(broker.url, block_ms=1_000, max_connections=3)

    numbers = set(await asyncio.gather(*(client.client_id() for _ in range(50))))

    assert len(numbers) <= 3
    await client.aclose()


async def test_a_place_that_does_not_become_free_is_an_error(broker: RealBroker) -> None:
    client = blocking_client(broker.url, block_ms=1, max_connections=1)
    blocked = asyncio.create_task(client.blpop(["none"], timeout=0.5))
    await asyncio.sleep(0.05)
    client._carrier._timeout_s = 0.1

    with pytest.raises(rx.ConnectionError, match="free"):
        await client.ping()

    assert await blocked is None
    assert await client.ping() is True
    await client.aclose()


async def test_two_hundred_callers_at_once_all_get_a_connection(broker: RealBroker) -> None:
    client = blocking_client(broker.url, block_ms=2_000, max_connections=300)
    reads = [asyncio.create_task(client.xread({"s": "0-0"}, block=10_000)) for _ in range(200)]
    writer = command_client(broker.url)
    while len(await writer.client_list()) < 200:
        await asyncio.sleep(0.02)

    await writer.xadd("s", {"a": "b"})

    assert all(await asyncio.gather(*reads))
    await client.aclose()
    await writer.aclose()


async def test_closing_tells_those_who_wait_and_the_client_can_be_used_again(client: Client) -> None:
    blocked = asyncio.create_task(client.blpop(["none"], timeout=5))
    await asyncio.sleep(0.1)

    await client.aclose()

    with pytest.raises(rx.ConnectionError):
        await blocked
    assert await client.ping() is True


async def test_nothing_is_left_open(broker: RealBroker) -> None:
    """Warnings are errors here, those of the collector too."""
    client = command_client(broker.url)
    await asyncio.gather(*(client.ping() for _ in range(5)))

    await client.aclose()
    del client
    gc.collect()
