"""One host goes, another comes: what was unfinished is finished once, and the first one's late writes are refused."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio

from actors.config import HostSettings
from actors.host import Host
from contracts.errors import OwnershipLostError
from contracts.state import SessionState
from support.broker import RealBroker
from support.hosting import Caller, dying_host, running_host
from support.invariants import check_invariants
from support.scripted_worker import SILENCE, ScriptedWorker, failing

LEASE_MS = 400


@pytest.fixture
async def world(real: redis.asyncio.Redis) -> AsyncIterator[Caller]:
    """A caller without a host; afterwards the broker must hold together, as far as it does when hosts have died."""
    yield Caller(real)
    await check_invariants(real, crashed=True)


def first_host(url: str) -> Any:
    return dying_host(url, host_id="first", lease_ms=LEASE_MS)


def doomed_host(url: str, dies_in: str, number: int) -> Any:
    return dying_host(url, dies_in=dies_in, host_id=f"victim-{number}", lease_ms=LEASE_MS)


def second_host(url: str, **settings: Any) -> Any:
    return running_host(url, host_id="second", lease_ms=LEASE_MS, **settings)


@pytest.mark.parametrize("handed_over", [True, False], ids=["stopped", "killed"])
@pytest.mark.parametrize("replied", [True, False], ids=["after the reply", "before the reply"])
async def test_a_tick_in_flight_is_committed_by_the_next_host(
    broker: RealBroker, worker: ScriptedWorker, world: Caller, handed_over: bool, replied: bool
) -> None:
    # Given a tick in flight when its host goes
    first = running_host(broker.url, host_id="first") if handed_over else first_host(broker.url)
    async with first:
        await world.ok("create", model="scripted")
        await world.ok("next_chunk")
        await world.accept(1, "p")
        worker.gate.clear()
        command = await world.send("next_chunk")
        await worker.arrived(2)
    if replied:
        worker.gate.set()
        async with asyncio.timeout(5):
            while await world.client.xlen("wl:{w:w0}:requests"):
                await asyncio.sleep(0.005)

    # When another takes over
    async with second_host(broker.url):
        if not replied:
            again = await worker.arrived(2)
            worker.gate.set()
            assert again["request_id"] == worker.requests[1]["request_id"]
        answer = await world.answer_to(command)
        if replied:  # it was read before anything was sent again
            assert worker.kinds() == ["tick", "tick"]

        # Then the chunk was made once and committed once, and life goes on
        assert (answer["result"]["chunk_index"], answer["result"]["applied_event_ids"]) == (1, [1])
        assert set(worker.runs.values()) == {1}
        assert (await world.ok("next_chunk"))["chunk_index"] == 2
        assert len([a for a in await world.answers() if a["command_id"] == command]) == 1


async def test_a_reply_to_an_earlier_delivery_is_ignored(
    broker: RealBroker, worker: ScriptedWorker, world: Caller
) -> None:
    # Given a tick that was sent by one host, and again by the next
    async with first_host(broker.url):
        await world.ok("create", model="scripted")
        worker.on_request = lambda request: SILENCE
        command = await world.send("next_chunk")
        await worker.arrived(1)
    worker._records.clear()
    worker.on_request = None
    worker.gate.clear()
    async with second_host(broker.url):
        await worker.arrived(2)
        first, again = worker.requests
        assert first["request_id"] == again["request_id"]

        # When the first delivery is answered after all
        await worker.send(
            first, error={"code": "model_error", "message": "late", "field": None, "retryable": False}
        )
        async with asyncio.timeout(5):
            while any(b"reply" in fields for _, fields in await world.client.xrange(world.inbox)):
                await asyncio.sleep(0.005)

        # Then nothing comes of it: the answer to the second counts
        assert (await world.state())["status"] == "ACTIVE"
        worker.gate.set()
        assert (await world.answer_to(command))["ok"]


async def test_what_came_while_no_host_ran_is_carried_out_in_order(
    broker: RealBroker, worker: ScriptedWorker, world: Caller
) -> None:
    commands = [await world.send("create", model="scripted")]
    commands += [await world.send("next_chunk") for _ in range(5)]
    commands += [await world.send("reset"), await world.send("next_chunk"), await world.send("close")]

    async with second_host(broker.url):
        answers = [await world.answer_to(command) for command in commands]

    assert [answer["ok"] for answer in answers] == [True] * 9
    assert [answer["result"]["chunk_index"] for answer in answers[1:6]] == [0, 1, 2, 3, 4]
    assert worker.kinds() == ["tick"] * 5 + ["reset", "tick", "release"]


@pytest.mark.parametrize("op", ["reset", "close"])
async def test_a_reset_or_close_in_flight_goes_on(
    broker: RealBroker, worker: ScriptedWorker, world: Caller, op: str
) -> None:
    async with first_host(broker.url):
        await world.ok("create", model="scripted")
        await world.ok("next_chunk")
        worker.gate.clear()
        commands = [await world.send(op), await world.send(op)]
        await worker.arrived(2)

    async with second_host(broker.url):
        worker.gate.set()
        answers = [await world.answer_to(command) for command in commands]

    assert [answer["ok"] for answer in answers] == [True, True]
    assert worker.kinds().count("tick") == 1
    assert set(worker.runs.values()) == {1}


async def test_a_release_after_a_failure_is_sent_again_until_it_is_answered(
    broker: RealBroker, worker: ScriptedWorker, world: Caller
) -> None:
    # Given a failure, the release of which the worker never answered
    async with first_host(broker.url):
        await world.ok("create", model="scripted")
        worker.on_request = lambda request: (
            {"silence": True} if request["kind"] == "release" else failing()(request)
        )
        await world.refused("next_chunk")
        release = await worker.arrived(2)
    worker._records.clear()
    worker.on_request = None

    # When the session is adopted, because somebody asks about it
    async with second_host(broker.url):
        await world.ok("sweep")
        state = await world.until("FAILED")

        # Then the release went out again, under the same id
        assert worker.requests[-1]["request_id"] == release["request_id"]
        assert state["failure_code"] == "model_error"


async def test_a_free_running_session_runs_on(
    broker: RealBroker, worker: ScriptedWorker, world: Caller
) -> None:
    async with first_host(broker.url):
        await world.ok("create", model="scripted")
        await world.ok("run")
        async with asyncio.timeout(10):
            while len(await world.chunks()) < 5:
                await asyncio.sleep(0.005)
    made = len(await world.chunks())

    async with second_host(broker.url):
        async with asyncio.timeout(10):
            while len(await world.chunks()) < made + 5:
                await asyncio.sleep(0.005)
        await world.ok("pause")

    indexes = [int(chunk["chunk_index"]) for chunk in await world.chunks()]
    assert indexes == list(range(len(indexes)))
    assert set(worker.runs.values()) == {1}


async def test_events_that_a_dead_host_had_read_are_applied_by_the_next(
    broker: RealBroker, worker: ScriptedWorker, world: Caller
) -> None:
    async with first_host(broker.url):
        await world.ok("create", model="scripted")
        for event_id in range(20):
            await world.event(event_id, prompt=f"p{event_id}")
        await world.ok("sweep")

    async with second_host(broker.url):
        assert (await world.ok("next_chunk"))["applied_event_ids"] == list(range(20))


async def test_a_command_id_that_is_sent_twice_acts_once_also_across_hosts(
    broker: RealBroker, worker: ScriptedWorker, world: Caller
) -> None:
    ids = {
        "create": {"model": "scripted"},
        "next_chunk": {},
        "reset": {},
        "run": {"pace_ms": 60_000},
        "pause": {},
        "close": {},
    }
    first: dict[str, Any] = {}
    async with running_host(broker.url, host_id="first"):
        for op, args in ids.items():
            first[op] = await world.answer_to(await world.send(op, f"the-{op}", **args))
    kinds = worker.kinds()

    async with second_host(broker.url):
        for op, args in ids.items():
            for _ in range(2):
                await world.send(op, f"the-{op}", **args)
        await check_invariants(world.client)

    assert worker.kinds() == kinds
    assert {answer["command_id"]: answer for answer in await world.answers()} == {
        f"the-{op}": answer for op, answer in first.items()
    }


async def test_a_late_write_of_the_first_host_is_refused(
    broker: RealBroker, worker: ScriptedWorker, world: Caller
) -> None:
    # Given a session that the second host has taken over from the first
    async with first_host(broker.url):
        await world.ok("create", model="scripted")
        await world.ok("next_chunk")
        raw = await world.client.hgetall(f"{world.base}:state")
    state = SessionState.from_hash("world-1", raw)
    assert state is not None
    async with second_host(broker.url):
        await world.ok("next_chunk")

        # Then the first can write neither the session nor its partition
        revived = Host(HostSettings(REDIS_URL=broker.url, host_id="first"))  # type: ignore[call-arg]
        scripts, leases = revived.services.scripts, revived.leases
        for write in (
            scripts.end_inflight(state, "any"),
            scripts.set_pace(state, "late-1", 0, "{}"),
            scripts.place(state, "w9"),
            scripts.free_attempt(state),
            scripts.answer("world-1", state.epoch, "late-2", "{}"),
            scripts.adopt("world-1", state.epoch),
            leases.set_live(0, state.epoch, "world-1", True),
            leases.inbox_done(0, state.epoch, ["0-1"]),
            leases.inbox_attempt(0, state.epoch, "0-1"),
        ):
            with pytest.raises(OwnershipLostError):
                await write
        assert not await leases.renew(0, "first", state.epoch, LEASE_MS)
        await revived.client.aclose()
        await revived.blocking.aclose()
        assert (await world.ok("next_chunk"))["chunk_index"] == 2


async def test_a_host_that_slept_past_its_lease_drops_what_another_has_taken(
    broker: RealBroker, worker: ScriptedWorker, world: Caller
) -> None:
    # Given a host with a tick in flight that stops renewing, as if it were paused
    async with running_host(broker.url, host_id="first", lease_ms=LEASE_MS) as first:
        await world.ok("create", model="scripted")
        await world.ok("next_chunk")
        worker.gate.clear()
        command = await world.send("next_chunk")
        await worker.arrived(2)
        renew = first._round

        async def asleep() -> None:
            first._renewed_ms = dict.fromkeys(first.owned, float("inf"))

        first._round = asleep  # type: ignore[method-assign]
        await asyncio.sleep(LEASE_MS / 1000 * 1.2)

        # When another takes over while the first one's actors still run, and both hear the replies
        async with second_host(broker.url) as second:
            await check_owned(second, 8)
            worker.gate.set()
            assert (await world.answer_to(command))["result"]["chunk_index"] == 1
            for _ in range(5):
                await world.ok("next_chunk")

            # Then everything happened once, and the revived one gives up what it lost
            first._round = renew  # type: ignore[method-assign]
            await check_owned(first, 4)
            assert not set(first.owned) & set(second.owned)
            assert set(worker.runs.values()) == {1}
            indexes = [int(chunk["chunk_index"]) for chunk in await world.chunks()]
            assert indexes == list(range(7))


async def check_owned(host: Host, count: int) -> None:
    async with asyncio.timeout(10):
        while len(host.owned) != count:
            await asyncio.sleep(0.02)


async def test_two_hosts_share_the_partitions_and_one_inherits_the_others(
    broker: RealBroker, worker: ScriptedWorker, world: Caller
) -> None:
    callers = [Caller(world.client, f"world-{i}") for i in range(16)]
    async with running_host(broker.url, host_id="first", lease_ms=LEASE_MS) as first:
        for caller in callers:
            await caller.ok("create", model="scripted")
        async with second_host(broker.url) as second:
            await check_owned(second, 4)
            await check_owned(first, 4)
            assert [(await caller.ok("next_chunk"))["chunk_index"] for caller in callers] == [0] * 16
        await check_owned(first, 8)
        assert [(await caller.ok("next_chunk"))["chunk_index"] for caller in callers] == [1] * 16


async def test_a_command_that_kills_three_hosts_is_answered_and_the_fourth_lives(
    broker: RealBroker, worker: ScriptedWorker, world: Caller
) -> None:
    # Given a session, and a command that its host dies of
    async with running_host(broker.url):
        await world.ok("create", model="scripted")
    command = await world.send("next_chunk")
    behind = await world.send("next_chunk")

    # When three owners in a row die as they begin to carry it out
    for death in range(2):
        async with doomed_host(broker.url, "begin_tick", death) as dying:
            await asyncio.wait_for(dying.wait(), 10)
    async with doomed_host(broker.url, "begin_tick", 2) as dying:
        # Then the third answers it before, and goes on to the next
        assert (await world.answer_to(command))["error"]["code"] == "command_poisoned"
        await asyncio.wait_for(dying.wait(), 10)
    async with second_host(broker.url):
        assert (await world.answer_to(behind))["result"]["chunk_index"] == 0


async def test_a_reply_that_kills_three_hosts_fails_its_session(
    broker: RealBroker, worker: ScriptedWorker, world: Caller
) -> None:
    # Given a tick whose reply waits in the inbox, and a commit that hosts die of
    async with first_host(broker.url):
        await world.ok("create", model="scripted")
        worker.gate.clear()
        command = await world.send("next_chunk")
        await worker.arrived(1)
    worker.gate.set()

    for death in range(2):
        async with doomed_host(broker.url, "commit", death) as dying:
            await asyncio.wait_for(dying.wait(), 10)

    # When a third one finds it, Then the session fails, and the host lives
    async with second_host(broker.url):
        assert (await world.answer_to(command))["error"]["code"] == "reducer_failed"
        await world.until("FAILED")
        await world.ok("reset")
        assert (await world.ok("next_chunk"))["chunk_index"] == 0


async def test_only_an_orderly_end_gives_the_lease_back_at_once(
    broker: RealBroker, worker: ScriptedWorker, world: Caller
) -> None:
    async with running_host(broker.url, host_id="first", lease_ms=600_000):
        await world.ok("create", model="scripted")

    async with second_host(broker.url) as second:
        assert len(second.owned) == 8
        await world.ok("next_chunk")
    assert json.loads((await world.state())["rejected_total"]) == {}


async def test_a_live_set_that_names_a_session_which_has_ended_is_put_right(
    broker: RealBroker, worker: ScriptedWorker, world: Caller
) -> None:
    # Given what a host leaves that dies between closing a session and saying that it does not live
    async with running_host(broker.url):
        await world.ok("create", model="scripted")
        await world.ok("close")
    await world.client.sadd(world.inbox.replace("inbox", "live"), "world-1", "world-never")

    async with second_host(broker.url), asyncio.timeout(5):
        while await world.client.exists(world.inbox.replace("inbox", "live")):
            await asyncio.sleep(0.01)


async def test_an_actor_that_was_forgotten_does_not_come_back_for_its_successor(
    broker: RealBroker, worker: ScriptedWorker, world: Caller
) -> None:
    # Given a session that was closed and created again before the timers of its first actor are due
    async with running_host(broker.url, host_id="first", queue_limit_ms=200, execution_limit_ms=100) as host:
        await world.ok("create", model="scripted")
        worker.gate.clear()
        close = await world.send("close")
        await worker.arrived(1)
        await asyncio.sleep(0.05)
        worker.gate.set()
        await world.answer_to(close)
        await world.ok("create", model="scripted")
        worker.gate.clear()
        command = await world.send("next_chunk")
        await worker.arrived(2)
        actor = next(p.actors["world-1"] for p in host.owned.values() if "world-1" in p.actors)

        # When they would be
        await asyncio.sleep(0.5)

        # Then the second actor is still the session's
        assert any(p.actors.get("world-1") is actor for p in host.owned.values())
        worker.gate.set()
        assert (await world.answer_to(command))["ok"]
        assert set(worker.runs.values()) == {1}
