"""What a worker makes of a broker that goes away, loses replies, loses keys, or is full."""

import asyncio
import time
from collections.abc import Callable

import pytest
import redis
import redis.asyncio

from contracts.errors import BrokerError
from contracts.messages import InFlight, Kind
from support.broker import RealBroker
from support.fake_host import FakeHost
from support.noop_engine import NoopEngine
from support.relay import Relay
from support.worker_runner import WorkerRunner


@pytest.fixture
async def relayed_worker(relay: Relay):
    """Workers that reach the broker through the relay."""
    runner = WorkerRunner(relay.url)
    yield runner
    await runner.end()


# ------------------------------------------------------------------------------------------------ lost replies
async def test_a_read_whose_reply_was_lost_is_found_among_the_own_entries(
    host: FakeHost, relayed_worker: WorkerRunner, relay: Relay
) -> None:
    running = await relayed_worker()
    world = await host.create("world-1")
    await asyncio.sleep(0.1)
    lost = relay.drop_reply(b"XREADGROUP")
    await asyncio.sleep(0.4)
    await host.send(world.tick())

    assert (await host.reply()).output is not None
    assert lost.happened
    assert running.engine.calls.count(("tick", "world-1")) == 1


async def test_a_reply_whose_receipt_was_lost_is_added_again_but_nothing_runs_twice(
    host: FakeHost, relayed_worker: WorkerRunner, relay: Relay
) -> None:
    running = await relayed_worker()
    world = await host.create("world-1")
    lost = relay.drop_reply(b"XADD")
    request = world.tick()
    await host.send(request)

    first, second = await host.reply(), await host.reply()
    assert lost.happened
    assert first == second
    assert running.engine.calls.count(("tick", "world-1")) == 1
    await host.until(host.stream_is_empty)


async def test_a_busy_mark_whose_reply_was_lost_runs_nothing_twice(
    host: FakeHost, relayed_worker: WorkerRunner, relay: Relay
) -> None:
    running = await relayed_worker()
    world = await host.create("world-1")
    await host.client.script_flush()  # so that the mark is asked for on its own
    lost = relay.drop_reply(b"worker begins a request")
    await host.send(world.tick())

    assert (await host.reply()).output is not None
    assert lost.happened
    assert running.engine.calls.count(("tick", "world-1")) == 1


async def test_an_acknowledgement_whose_reply_was_lost_leaves_nothing_behind(
    host: FakeHost, relayed_worker: WorkerRunner, relay: Relay
) -> None:
    running = await relayed_worker()
    world = await host.create("world-1")
    lost = relay.drop_reply(b"XACK")
    await host.chunk(world)
    await host.chunk(world)

    assert lost.happened
    await host.until(host.stream_is_empty)
    assert running.engine.calls.count(("tick", "world-1")) == 2
    await host.nothing_more(0.1)


# ------------------------------------------------------------------------------------------------ outages
async def test_a_chunk_made_during_an_outage_is_answered_after_it(
    new_broker: Callable[..., RealBroker],
) -> None:
    broker = new_broker()
    runner = WorkerRunner(broker.url)
    async with redis.asyncio.Redis.from_url(broker.url) as before:
        host = FakeHost(before)
        running = await runner()
        world = await host.create("world-1", sleep_ms=500)
        await host.send(world.tick())
        await asyncio.sleep(0.2)
        broker.stop()
    await asyncio.sleep(0.5)
    broker.start()

    async with redis.asyncio.Redis.from_url(broker.url) as after:
        host.client = after
        reply = await host.reply()
        assert running.engine.calls.count(("tick", "world-1")) == 1
        world.committed(reply)
        await host.chunk(world)
        await runner.end()


async def test_a_worker_that_is_told_to_end_during_an_outage_ends(
    new_broker: Callable[..., RealBroker],
) -> None:
    broker = new_broker()
    runner = WorkerRunner(broker.url)
    running = await runner()
    broker.stop()
    await asyncio.sleep(0.3)

    await running.stop()


async def test_a_worker_that_finds_no_broker_says_so(new_broker: Callable[..., RealBroker]) -> None:
    broker = new_broker()
    broker.stop()
    with pytest.raises(BrokerError):
        await WorkerRunner(broker.url)()


async def test_a_release_is_answered_on_a_broker_that_is_out_of_memory(
    host: FakeHost, start_worker: WorkerRunner, broker: RealBroker
) -> None:
    running = await start_worker()
    world = await host.create("world-1")
    await host.chunk(world)
    running.engine.close_session = slowly(running.engine.close_session)
    await host.send(world.release())
    await asyncio.sleep(0.1)
    await host.client.config_set("maxmemory", "1")

    assert (await host.reply()).error is None
    assert not await host.client.hexists(host.worker.sessions, "world-1")
    await host.client.config_set("maxmemory", "0")


async def test_a_chunk_waits_for_a_broker_that_is_out_of_memory(
    host: FakeHost, start_worker: WorkerRunner
) -> None:
    await start_worker()
    world = await host.create("world-1", sleep_ms=200)
    await host.send(world.tick())
    await asyncio.sleep(0.05)
    await host.client.config_set("maxmemory", "1")
    await host.nothing_more(0.5)
    await host.client.config_set("maxmemory", "0")

    assert (await host.reply()).output is not None


async def test_a_chunk_that_a_full_broker_does_not_take_holds_up_no_release(
    host: FakeHost, start_worker: WorkerRunner
) -> None:
    # Given a worker with two sessions, on a broker that runs out of memory while it makes a chunk of one of them
    await start_worker()
    made, other = await host.create("world-1", sleep_ms=200), await host.create("world-2")
    await host.chunk(other)
    tick = made.tick()
    release = other.release()
    await host.send(tick)
    await asyncio.sleep(0.05)

    # When the other one is closed
    await host.send(release)
    await host.client.config_set("maxmemory", "1")

    # Then the chunk is given up, also for whoever asks again, and the release is answered
    assert (await host.reply()).error.code == "payload_lost"
    assert (await host.reply()).request_id == release.request_id
    assert not await host.client.hexists(host.worker.sessions, "world-2")
    await host.client.config_set("maxmemory", "0")
    assert (await host.run(made.again(tick))).error.code == "payload_lost"


def slowly(function: Callable[[str], None]) -> Callable[[str], None]:
    def slow(session_id: str) -> None:
        time.sleep(0.3)
        function(session_id)

    return slow


# ------------------------------------------------------------------------------------------------ lost keys
@pytest.mark.parametrize("loss", ["the stream", "the group", "everything"])
async def test_a_lost_stream_or_group_is_made_again_without_a_hot_loop(
    loss: str, host: FakeHost, start_worker: WorkerRunner
) -> None:
    running = await start_worker(block_ms=60_000)
    world = await host.create("world-1")
    await host.chunk(world)
    await asyncio.sleep(0.1)
    if loss == "the stream":
        await host.client.delete(host.worker.requests)
    elif loss == "the group":
        await host.client.xgroup_destroy(host.worker.requests, "worker")
    else:
        await host.client.flushall()
    before = await reads(host)
    await asyncio.sleep(0.5)

    assert await reads(host) - before <= 4
    await host.set_state(world, status="ACTIVE")
    await host.chunk(world)
    assert not running.task.done()


async def reads(host: FakeHost) -> int:
    return (await host.client.info("commandstats"))["cmdstat_xreadgroup"]["calls"]


async def test_entries_that_went_astray_are_found_when_idle(
    host: FakeHost, start_worker: WorkerRunner
) -> None:
    await start_worker(block_ms=300)
    world = await host.create("world-1")
    # As if a connection that is gone had taken it in this worker's name.
    await asyncio.sleep(0.1)
    async with host.client.pipeline(transaction=True) as pipeline:
        request = world.tick()
        state = host.keys.session("world-1").state
        record = InFlight(request.request_id, Kind.TICK, 1, "x").to_json()
        pipeline.hset(state, "inflight", record)
        pipeline.xadd(host.worker.requests, request.to_entry())
        pipeline.xreadgroup("worker", host.worker_id, {host.worker.requests: ">"})
        await pipeline.execute()

    assert (await host.reply()).output is not None


async def test_a_request_that_was_deleted_after_it_was_read_is_answered_payload_lost(
    host: FakeHost, start_worker: WorkerRunner, broker: RealBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start_worker()
    world = await host.create("world-1")
    inflight = running.worker._server._link.inflight
    deleting = redis.Redis.from_url(broker.url)

    async def delete_and_fail(session_id: str):
        monkeypatch.setattr(running.worker._server._link, "inflight", inflight)
        deleting.xtrim(host.worker.requests, maxlen=0)
        raise BrokerError("scripted outage")

    monkeypatch.setattr(running.worker._server._link, "inflight", delete_and_fail)
    reply = await host.run(world.tick())

    assert reply.error.code == "payload_lost"
    assert ("tick", "world-1") not in running.engine.calls


async def test_a_reply_that_has_no_inbox_stops_nothing(host: FakeHost, start_worker: WorkerRunner) -> None:
    await start_worker()
    world, other = await host.create("world-1"), await host.create("world-2")
    await host.client.set("no-stream", "x")
    request = world.tick(reply_to="no-stream")
    await host.send(request)
    await host.chunk(other)
    await host.until(host.stream_is_empty)

    repaired = world.again(request)
    await host.client.delete("no-stream")
    await host.run(world.again(world.tick(request_id=repaired.request_id)))


# ------------------------------------------------------------------------------------------------ idle
async def test_memory_is_counted_when_idle_but_not_at_every_turn(
    host: FakeHost, start_worker: WorkerRunner
) -> None:
    running = await start_worker(block_ms=50)
    await asyncio.sleep(0.5)

    assert running.engine.calls.count(("check_integrity", "")) == 1


async def test_a_worker_whose_memory_is_not_accounted_for_ends(
    host: FakeHost, start_worker: WorkerRunner
) -> None:
    engine = NoopEngine()
    engine.broken = RuntimeError("pages are missing")
    running = await start_worker(engine=engine, block_ms=50)
    with pytest.raises(RuntimeError, match="pages are missing"):
        await asyncio.wait_for(running.task, 5)

    assert await host.info() == {}
