"""What a start of a worker makes of what an earlier one left, and who may bear the name."""

import asyncio
import os
from dataclasses import replace

import pytest

from contracts.errors import CorruptDataError
from contracts.messages import InFlight, Kind, Notice, NoticeKind
from gpu_worker.name import NameTakenError
from support.fake_host import PARTITIONS, FakeHost
from support.worker_runner import WorkerRunner


async def left_in_hand(host: FakeHost, request) -> None:
    """Sends a request that an earlier start of the worker has taken and not finished."""
    await host.client.xgroup_create(host.worker.requests, "worker", id="0", mkstream=True)
    await host.send(request)
    await host.client.xreadgroup("worker", host.worker_id, {host.worker.requests: ">"})


# ------------------------------------------------------------------------------------------------ what was in hand
async def test_a_tick_in_hand_is_answered_worker_restarted_and_never_run(
    host: FakeHost, start_worker: WorkerRunner
) -> None:
    world = await host.create("world-1")
    request = world.tick()
    await left_in_hand(host, request)
    running = await start_worker()

    reply = await host.reply()
    assert (reply.request_id, reply.error.code) == (request.request_id, "worker_restarted")
    again = await host.run(world.again(request))
    assert again.error.code == "worker_restarted"
    assert ("tick", "world-1") not in running.engine.calls


@pytest.mark.parametrize("kind", ["reset", "release"])
async def test_a_reset_or_release_in_hand_has_come_true(
    kind: str, host: FakeHost, start_worker: WorkerRunner
) -> None:
    world = await host.create("world-1")
    await left_in_hand(host, getattr(world, kind)())
    await start_worker()

    assert (await host.reply()).error is None
    assert await host.client.hexists(host.worker.sessions, "world-1") is (kind == "reset")
    await host.until(host.stream_is_empty)


async def test_a_request_that_nobody_had_read_is_run(host: FakeHost, start_worker: WorkerRunner) -> None:
    world = await host.create("world-1")
    request = world.tick()
    await host.send(request)
    await start_worker()

    assert (await host.reply()).output is not None


async def test_a_malformed_request_in_hand_stops_nothing(host: FakeHost, start_worker: WorkerRunner) -> None:
    await host.client.xgroup_create(host.worker.requests, "worker", id="0", mkstream=True)
    await host.client.xadd(host.worker.requests, {"what": "ever"})
    gone = await host.client.xadd(host.worker.requests, {"what": "ever"})
    await host.client.xreadgroup("worker", host.worker_id, {host.worker.requests: ">"})
    await host.client.xdel(host.worker.requests, gone)
    await start_worker()

    await host.chunk(await host.create("world-1"))
    assert (await host.client.xpending(host.worker.requests, "worker"))["pending"] <= 1


# ------------------------------------------------------------------------------------------------ the announcement
async def test_sessions_learn_that_their_memory_is_lost_unless_something_is_in_flight(
    host: FakeHost, start_worker: WorkerRunner
) -> None:
    waiting = await host.create("waiting")
    names = (f"idle-{number}" for number in range(1_000))
    same_inbox = host.keys.inbox_of("waiting", PARTITIONS)
    idle = await host.create(
        next(name for name in names if host.keys.inbox_of(name, PARTITIONS) == same_inbox)
    )
    request = waiting.tick()
    await left_in_hand(host, request)
    running = await start_worker()

    reply, notice = await host.reply(), await host.notice()
    assert reply.request_id == request.request_id
    assert (notice.kind, notice.session_id, notice.life) == (
        NoticeKind.WORKER_LOST,
        idle.session_id,
        idle.life,
    )
    assert (notice.worker, notice.incarnation) == ("gpu-0", running.worker.incarnation)
    assert await host.order(same_inbox) == ["reply", "notice"]
    await host.nothing_more(0.1)


async def test_nobody_is_told_when_nobody_was_there(host: FakeHost, start_worker: WorkerRunner) -> None:
    await host.create("world-1", reserve=False)
    await start_worker()

    await host.nothing_more(0.1)


async def test_an_unreadable_reservation_stops_nothing(host: FakeHost, start_worker: WorkerRunner) -> None:
    await host.create("world-1")
    await host.client.hset(host.worker.sessions, "broken", "{")
    await start_worker()

    assert (await host.notice()).session_id == "world-1"


# ------------------------------------------------------------------------------------------------ the name
async def test_the_info_says_who_how_full_and_since_when(host: FakeHost, start_worker: WorkerRunner) -> None:
    running = await start_worker(capacity=5)
    info = await host.info()

    assert info["incarnation"] == running.worker.incarnation
    assert (info["model"], info["capacity"], info["resident"]) == ("noop", "5", "0")
    assert (info["pid"], info["memory"]) == (str(os.getpid()), '{"capacity":5,"resident":0}')
    assert "busy_since" not in info
    assert 0 < await host.client.pttl(host.worker.info) <= 500
    score = await host.client.zscore(host.keys.workers, "gpu-0")
    assert abs(score - int(info["last_seen_ms"])) < 2_000


async def test_the_figures_follow_the_engine(host: FakeHost, start_worker: WorkerRunner) -> None:
    await start_worker()
    await host.chunk(await host.create("world-1"))

    async def resident() -> bool:
        return (await host.info())["resident"] == "1"

    await host.until(resident)


async def test_a_worker_that_still_loads_is_not_open_for_reservations(
    host: FakeHost, start_worker: WorkerRunner
) -> None:
    running = await start_worker(wait=False)
    running.engine.start = lambda: __import__("time").sleep(0.4)
    await host.until(host.info)

    assert "capacity" not in await host.info()
    assert await host.client.zscore(host.keys.workers, "gpu-0") is None
    await running.wait_until_ready()
    assert (await host.info())["capacity"] == "64"


async def test_a_second_worker_of_the_same_name_refuses_while_the_first_lives(
    host: FakeHost, start_worker: WorkerRunner
) -> None:
    first = await start_worker()
    # As if on another machine, where a pid says nothing.
    first.worker._name._identity = replace(first.worker._name._identity, machine="another")
    await first.worker._name.beat()
    with pytest.raises(NameTakenError, match="gpu-0"):
        await start_worker()

    assert (await host.info())["incarnation"] == first.worker.incarnation
    await host.chunk(await host.create("world-1"))


async def test_a_name_whose_holder_is_silent_is_free_once_it_has_run_out(
    host: FakeHost, start_worker: WorkerRunner
) -> None:
    await host.client.hset(host.worker.info, mapping={"incarnation": "old", "last_seen_ms": "1"})
    await host.client.pexpire(host.worker.info, 400)
    running = await start_worker()

    assert (await host.info())["incarnation"] == running.worker.incarnation


async def test_the_name_of_a_process_that_is_known_to_be_dead_is_free_at_once(
    host: FakeHost, start_worker: WorkerRunner
) -> None:
    first = await start_worker()
    await first.crash()
    await host.client.hset(host.worker.info, mapping={"pid": str(2**22 + 5), "busy_since": "1"})
    await host.client.persist(host.worker.info)
    second = await start_worker()

    info = await host.info()
    assert (info["incarnation"], "busy_since" in info) == (second.worker.incarnation, False)


async def test_a_worker_that_loses_its_name_stops_and_leaves_the_requests_alone(
    host: FakeHost, start_worker: WorkerRunner
) -> None:
    running = await start_worker(heartbeat_ms=60_000, worker_lost_after_ms=61_000)
    world = await host.create("world-1")
    await host.client.hset(host.worker.info, "incarnation", "its successor")
    await host.send(world.tick())

    with pytest.raises(NameTakenError):
        await asyncio.wait_for(running.task, 5)
    assert ("tick", "world-1") not in running.engine.calls
    assert not await host.stream_is_empty()
    assert (await host.info())["incarnation"] == "its successor"


async def test_a_heartbeat_that_finds_the_name_taken_ends_the_worker(
    host: FakeHost, start_worker: WorkerRunner
) -> None:
    running = await start_worker(heartbeat_ms=50)
    await host.client.hset(host.worker.info, "incarnation", "its successor")

    with pytest.raises(NameTakenError):
        await asyncio.wait_for(running.task, 5)


async def test_a_name_that_ran_out_is_taken_again_before_anything_runs(
    host: FakeHost, start_worker: WorkerRunner
) -> None:
    running = await start_worker(heartbeat_ms=60_000, worker_lost_after_ms=61_000)
    await host.client.delete(host.worker.info)
    await host.chunk(await host.create("world-1"))

    assert (await host.info())["incarnation"] == running.worker.incarnation


async def test_the_orderly_end_gives_the_name_back_and_stays_in_the_index(
    host: FakeHost, start_worker: WorkerRunner
) -> None:
    running = await start_worker()
    await running.stop()

    assert await host.info() == {}
    assert await host.client.zscore(host.keys.workers, "gpu-0") is not None


async def test_a_worker_whose_engine_can_not_start_gives_the_name_back(
    host: FakeHost, start_worker: WorkerRunner
) -> None:
    running = await start_worker(wait=False)
    running.engine.start = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        await running.wait_until_ready()

    assert await host.info() == {}


# ------------------------------------------------------------------------------------------------ the end
async def test_the_request_in_hand_is_finished_at_the_end_and_the_rest_is_left(
    host: FakeHost, start_worker: WorkerRunner
) -> None:
    running = await start_worker()
    world, other = await host.create("world-1", sleep_ms=800), await host.create("world-2")
    first, second = world.tick(), other.tick()
    await host.send(first)
    await asyncio.sleep(0.1)
    await host.send(second)
    await running.stop()

    assert (await host.reply()).request_id == first.request_id
    await host.nothing_more(0.1)
    assert await host.client.xlen(host.worker.requests) == 1
    assert (await host.client.xpending(host.worker.requests, "worker"))["pending"] == 0


async def test_an_idle_worker_ends_at_once(host: FakeHost, start_worker: WorkerRunner) -> None:
    running = await start_worker(block_ms=60_000)
    await asyncio.sleep(0.1)

    await running.stop()  # has less patience than the read

    assert await host.info() == {}


async def test_a_worker_that_still_loads_ends_at_once(host: FakeHost, start_worker: WorkerRunner) -> None:
    running = await start_worker(wait=False)
    running.engine.start = lambda: __import__("time").sleep(1.5)
    await host.until(host.info)
    began = asyncio.get_running_loop().time()
    await running.stop()

    assert asyncio.get_running_loop().time() - began < 1
    assert await host.info() == {}


# ------------------------------------------------------------------------------------------------ wrong keys
async def test_a_request_stream_of_the_wrong_type_is_said_with_its_key(
    host: FakeHost, start_worker: WorkerRunner
) -> None:
    await host.client.set(host.worker.requests, "x")
    with pytest.raises(CorruptDataError, match=r"w:gpu-0\}:requests"):
        await start_worker()


async def test_a_worker_that_can_not_renew_its_name_reads_nothing(
    host: FakeHost, start_worker: WorkerRunner
) -> None:
    # Given a worker whose name can't be renewed for longer than it lasts
    await start_worker(heartbeat_ms=50, block_ms=100)
    world = await host.create("world-1")
    await host.client.delete(host.worker.info)
    await host.client.set(host.worker.info, "not ours")
    await asyncio.sleep(1.0)

    # When a request comes, Then it is left to whoever may have the name now
    await host.send(world.tick())
    await asyncio.sleep(0.5)
    assert (await host.client.xpending(host.worker.requests, "worker"))["pending"] == 0

    # And it is run once the name is there again
    await host.client.delete(host.worker.info)
    assert (await host.reply()).output is not None


# ------------------------------------------------------------------------------------------------ passed over at the start
async def test_a_session_whose_last_chunk_was_committed_after_the_announcement_is_told_later(
    host: FakeHost, start_worker: WorkerRunner
) -> None:
    # Given sessions that were passed over because they had a request in flight, answered by an earlier start
    worlds = {name: await host.create(name) for name in ("lost", "begun", "here", "busy")}
    request = {name: world.tick() for name, world in worlds.items()}
    for name, world in worlds.items():
        record = InFlight(request[name].request_id, Kind.TICK, 1, world.life)
        await host.set_state(world, inflight=record.to_json())
    running = await start_worker(reconcile_ms=200)
    await host.nothing_more(0.5)

    # When that answer is committed: beyond chunk 0, at chunk 0, on this start, and with another one in flight
    for name, index, incarnation in (
        ("lost", "1", "earlier"),
        ("begun", "0", "earlier"),
        ("here", "1", running.worker.incarnation),
    ):
        world = worlds[name]
        await host.set_state(world, chunk_index=index, worker_incarnation=incarnation)
        await host.clear_inflight(world)
    await host.set_state(worlds["busy"], chunk_index="1", worker_incarnation="earlier")

    # Then the one whose memory is lost is told
    notice = await host.notice()
    assert (notice.kind, notice.session_id, notice.life) == (
        NoticeKind.WORKER_LOST,
        "lost",
        worlds["lost"].life,
    )
    assert notice.incarnation == running.worker.incarnation
    await asyncio.sleep(0.5)
    entries = [fields for inbox in host.inboxes for _, fields in await host.client.xrange(inbox)]
    assert {Notice.from_json(fields[b"notice"]).session_id for fields in entries} == {"lost"}
