"""What a session does when it hears that its memory on a worker is gone."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from actors.host import Host
from support.broker import RealBroker
from support.hosting import Caller, running_host
from support.scripted_worker import ScriptedWorker


@pytest.fixture
async def second(broker: RealBroker, worker: ScriptedWorker) -> AsyncIterator[ScriptedWorker]:
    """Another worker of the same model, with less room."""
    async with ScriptedWorker(broker.url, name="w1", capacity=8) as running:
        yield running


@pytest.fixture
async def hasty(broker: RealBroker, worker: ScriptedWorker) -> AsyncIterator[Host]:
    """A host that holds a worker for lost after 0.2 s of silence."""
    async with running_host(broker.url, heartbeat_ms=100, worker_lost_after_ms=200, lease_ms=600) as running:
        yield running


async def tell(world: Caller, teller: ScriptedWorker, kind: str, **changes: str) -> None:
    """A notice about the session's present life and worker, but for `changes`."""
    state = await world.state()
    about = {"life": state["life"], "incarnation": teller.incarnation} | changes
    entry_id = await teller.tell(kind, world.session_id, world.inbox, **about)
    async with asyncio.timeout(5):
        while await world.client.xrange(world.inbox, entry_id, entry_id):
            await asyncio.sleep(0.005)


async def test_an_evicted_session_is_failed_at_once(world: Caller, worker: ScriptedWorker) -> None:
    await world.ok("next_chunk")

    await tell(world, worker, "evicted")

    state = await world.state()
    assert (state["status"], state["failure_code"], state["chunk_index"]) == ("FAILED", "evicted", "1")
    assert "release" not in worker.kinds()
    assert not await world.client.hexists("wl:{w:w0}:sessions", "world-1")
    await world.ok("reset")
    assert (await world.ok("next_chunk"))["chunk_index"] == 0


@pytest.mark.parametrize("kind", ["evicted", "worker_lost"])
@pytest.mark.parametrize(
    "changes",
    [{"life": "ar-world-1-create-00"}, {"worker": "w7"}],
    ids=["another life", "another worker"],
)
async def test_a_notice_is_ignored_that_is_about(
    world: Caller, worker: ScriptedWorker, kind: str, changes: dict[str, str]
) -> None:
    await world.ok("next_chunk")
    before = await world.state()

    await tell(world, worker, kind, **changes)

    assert await world.state() == before
    assert (await world.ok("next_chunk"))["chunk_index"] == 1


async def test_an_eviction_by_another_start_of_the_worker_is_ignored(
    world: Caller, worker: ScriptedWorker
) -> None:
    await world.ok("next_chunk")
    await tell(world, worker, "evicted", incarnation="an-earlier-start")
    assert (await world.state())["status"] == "ACTIVE"


async def test_a_start_that_the_session_already_runs_on_is_no_loss(
    world: Caller, worker: ScriptedWorker
) -> None:
    await world.ok("next_chunk")
    await tell(world, worker, "worker_lost")
    assert (await world.state())["status"] == "ACTIVE"


async def test_a_worker_that_starts_anew_has_lost_a_session_beyond_chunk_0(
    world: Caller, worker: ScriptedWorker
) -> None:
    await world.ok("next_chunk")

    await tell(world, worker, "worker_lost", incarnation="the-next-start")

    state = await world.state()
    assert (state["status"], state["failure_code"]) == ("FAILED", "worker_lost")
    assert not await world.client.hexists("wl:{w:w0}:sessions", "world-1")


@pytest.mark.parametrize("kind", ["evicted", "worker_lost"])
async def test_a_tick_in_flight_ends_with_the_loss_and_its_late_reply_is_ignored(
    world: Caller, worker: ScriptedWorker, kind: str
) -> None:
    await world.ok("next_chunk")
    await world.accept(1, "p")
    worker.gate.clear()
    command = await world.send("next_chunk")
    await worker.arrived(2)

    changes = {} if kind == "evicted" else {"incarnation": "the-next-start"}
    await tell(world, worker, kind, **changes)
    error = (await world.answer_to(command))["error"]
    worker.gate.set()

    assert error["code"] == kind
    async with asyncio.timeout(5):
        while await world.client.xlen("wl:{w:w0}:requests") or await world.client.xlen(world.inbox):
            await asyncio.sleep(0.005)
    state = await world.state()
    assert (state["status"], state["chunk_index"]) == ("FAILED", "1")
    assert await world.pending() == 1


async def test_an_eviction_of_the_old_life_does_not_stop_a_reset(
    world: Caller, worker: ScriptedWorker
) -> None:
    await world.ok("next_chunk")
    worker.gate.clear()
    command = await world.send("reset")
    await worker.arrived(2)

    await tell(world, worker, "evicted")
    worker.gate.set()

    assert (await world.answer_to(command))["ok"]
    assert (await world.ok("next_chunk"))["chunk_index"] == 0


@pytest.mark.parametrize("in_flight", [False, True], ids=["idle", "with a tick in flight"])
async def test_at_chunk_0_a_session_is_placed_again(
    world: Caller, worker: ScriptedWorker, second: ScriptedWorker, in_flight: bool
) -> None:
    # Given a session at chunk 0 whose worker is killed
    await world.accept(1, "p")
    worker.gate.clear()
    command = await world.send("next_chunk") if in_flight else None
    if in_flight:
        await worker.arrived(1)
    await worker.vanish()

    # When it hears so
    await tell(world, worker, "worker_lost", incarnation="none")

    # Then it goes on elsewhere, under the same request id
    answer = await world.answer_to(command or await world.send("next_chunk"))
    assert answer["result"]["applied_event_ids"] == [1]
    assert (await world.state())["worker"] == "w1"
    if in_flight:
        assert second.requests[0]["request_id"] == worker.requests[0]["request_id"]
        assert int(second.requests[0]["fence"]) > int(worker.requests[0]["fence"])
    assert not await world.client.hlen("wl:{w:w0}:sessions")


async def test_at_chunk_0_without_another_worker_the_loss_is_a_failure(
    world: Caller, worker: ScriptedWorker
) -> None:
    await worker.vanish()
    await tell(world, worker, "worker_lost", incarnation="none")

    state = await world.state()
    assert (state["status"], state["failure_code"]) == ("FAILED", "worker_lost")
    assert "no worker serves" in state["failure_message"]


async def test_a_reset_whose_worker_is_lost_goes_on_elsewhere(
    world: Caller, worker: ScriptedWorker, second: ScriptedWorker
) -> None:
    await world.ok("next_chunk")
    worker.gate.clear()
    command = await world.send("reset")
    await worker.arrived(2)
    await worker.vanish()

    await tell(world, worker, "worker_lost", incarnation="none")

    assert (await world.answer_to(command))["ok"]
    assert second.kinds() == ["reset"]
    assert (await world.ok("next_chunk"))["chunk_index"] == 0


@pytest.mark.parametrize("op", ["reset", "close"])
async def test_what_waits_for_a_worker_that_is_lost_without_another_ends(
    world: Caller, worker: ScriptedWorker, op: str
) -> None:
    await world.ok("next_chunk")
    worker.gate.clear()
    command = await world.send(op)
    await worker.arrived(2)
    await worker.vanish()

    await tell(world, worker, "worker_lost", incarnation="none")

    answer = await world.answer_to(command)
    if op == "close":
        assert answer["result"] == {"status": "CLOSED"}
    else:
        assert answer["error"]["code"] == "worker_lost"
        assert (await world.state())["status"] == "FAILED"


async def test_a_worker_that_falls_silent_is_declared_lost_and_each_of_its_sessions_learns_it(
    hasty: Host, worker: ScriptedWorker, stranger: Caller
) -> None:
    # Given an idle session on a worker, the memory of which is worth something
    await stranger.ok("create", model="scripted")
    await stranger.ok("next_chunk")

    # When the worker is silent for longer than the host bears
    await worker.vanish()

    # Then the session says so by itself
    assert (await stranger.until("FAILED"))["failure_code"] == "worker_lost"
    await worker.announce()
    worker.start()
    await stranger.ok("reset")
    assert (await stranger.ok("next_chunk"))["chunk_index"] == 0


async def test_a_worker_that_still_loads_its_model_takes_no_session_and_disturbs_nobody(
    world: Caller, second: ScriptedWorker
) -> None:
    # Given a worker that holds its name and has said nothing else
    await world.client.delete("wl:{w:w1}:info")
    await world.client.hset("wl:{w:w1}:info", mapping={"incarnation": "new", "last_seen_ms": 1})

    other = Caller(world.client, "world-2")
    await other.ok("create", model="scripted")

    assert (await other.state())["worker"] == "w0"


async def test_sessions_go_where_the_most_room_is_and_are_refused_where_there_is_none(
    world: Caller, worker: ScriptedWorker, second: ScriptedWorker
) -> None:
    await worker.announce(capacity=2)
    await second.announce(capacity=2)
    callers = [Caller(world.client, f"more-{i}") for i in range(4)]

    answers = [await caller.call("create", model="scripted") for caller in callers]

    assert [answer["ok"] for answer in answers] == [True, True, True, False]
    error = answers[3]["error"]
    assert (error["code"], error["retryable"]) == ("no_capacity", True)
    assert await world.client.hlen("wl:{w:w0}:sessions") == await world.client.hlen("wl:{w:w1}:sessions") == 2
    assert (await callers[3].refused("create", model="unknown"))["code"] == "no_capacity"
    await callers[0].ok("close")
    await callers[3].ok("create", model="scripted")


@pytest.mark.parametrize("loading", [True, False], ids=["still loads", "serves"])
async def test_at_chunk_0_a_session_stays_on_a_worker_that_has_restarted(
    world: Caller, worker: ScriptedWorker, loading: bool
) -> None:
    # Given a new start of the session's only worker, which may still load its model
    worker.incarnation = "the-next-start"
    await worker.client.delete("wl:{w:w0}:info")
    if not loading:
        await worker.announce()

    # When it announces itself
    await tell(world, worker, "worker_lost")

    # Then nothing was lost, and the session keeps its place
    state = await world.state()
    assert (state["status"], state["worker"]) == ("ACTIVE", "w0")
    assert await world.client.hexists("wl:{w:w0}:sessions", "world-1")
    await worker.announce()
    assert (await world.ok("next_chunk"))["chunk_index"] == 0


async def test_at_chunk_0_a_session_leaves_a_worker_that_has_restarted_with_another_model(
    world: Caller, worker: ScriptedWorker, second: ScriptedWorker
) -> None:
    await worker.announce(incarnation="the-next-start", model="another")

    await tell(world, worker, "worker_lost", incarnation="the-next-start")

    assert (await world.state())["worker"] == "w1"
    assert (await world.ok("next_chunk"))["chunk_index"] == 0
