"""What stands beside a session's state: entered before the state says so, left after, and taken back when refused."""

import asyncio

import pytest
import redis.asyncio

from actors.host import Host
from contracts.errors import OwnershipLostError
from contracts.lifecycle import Trigger
from contracts.session_scripts import Outcome
from support.broker import RealBroker
from support.hosting import Caller, running_host
from support.invariants import check_invariants
from support.scripted_worker import ScriptedWorker


async def test_a_session_is_in_the_tombstones_before_it_is_closing_and_leaves_them_after_it_is_closed(
    world: Caller, host: Host, worker: ScriptedWorker
) -> None:
    # Given a close whose scripts look at the tombstones as they begin
    scripts, listed = host.services.scripts, []
    begin, finish = scripts.begin_close, scripts.finish_close

    async def begin_close(*args: object, **options: object) -> object:
        listed.append(await world.client.zscore("wl:tombstones", "world-1"))
        return await begin(*args, **options)  # type: ignore[arg-type]

    async def finish_close(*args: object) -> object:
        outcome = await finish(*args)  # type: ignore[arg-type]
        listed.append(await world.client.zscore("wl:tombstones", "world-1"))
        return outcome

    scripts.begin_close = begin_close  # type: ignore[method-assign, assignment]
    scripts.finish_close = finish_close  # type: ignore[method-assign, assignment]

    await world.ok("close")

    assert len(listed) == 2
    assert None not in listed


@pytest.mark.parametrize("trigger", [Trigger.TICK_FAILED, Trigger.CLOSE_REQUESTED])
async def test_a_transition_that_another_owner_forbids_leaves_nothing_in_the_indexes(
    world: Caller, host: Host, trigger: Trigger
) -> None:
    core = next(p.actors["world-1"].core for p in host.owned.values() if "world-1" in p.actors)

    async def refused() -> Outcome:
        raise OwnershipLostError("another host owns the session")

    with pytest.raises(OwnershipLostError):
        await core.move(trigger, refused, Outcome.FAILED)

    for index in ("sessions:FAILED", "sessions:CLOSING", "tombstones"):
        assert await world.client.zscore(f"wl:{index}", "world-1") is None
    assert await world.client.zscore("wl:sessions:ACTIVE", "world-1") is not None


async def test_a_worker_that_is_silent_but_not_lost_is_still_asked_to_release(
    broker: RealBroker, real: redis.asyncio.Redis, worker: ScriptedWorker
) -> None:
    # Given a host that has been connected for longer than a worker may be silent
    world = Caller(real)
    async with running_host(broker.url, worker_lost_after_ms=1_000, heartbeat_ms=100):
        await world.ok("create", model="scripted")
        await world.ok("next_chunk")
        await asyncio.sleep(1.1)

        # When the worker's heartbeat has just lapsed
        await worker.vanish(silent_for_ms=0)
        command = await world.send("close")
        async with asyncio.timeout(5):
            while (await world.state())["status"] == "ACTIVE":
                await asyncio.sleep(0.005)

        # Then its release is on the way, and the session is closed once it is given up
        assert await real.xlen("wl:{w:w0}:requests") == 1
        assert (await world.state())["status"] == "CLOSING"
        assert (await world.answer_to(command))["ok"]
        await real.delete("wl:{w:w0}:requests")
        await check_invariants(real)


@pytest.mark.parametrize("op", ["create", "run"])
async def test_the_next_owner_finds_a_session_that_runs_free_before_its_command_is_answered(
    stranger: Caller, host: Host, op: str
) -> None:
    scripts, live, listed = host.services.scripts, stranger.inbox.replace("inbox", "live"), []
    if op == "run":
        await stranger.ok("create", model="scripted")
    name = {"create": "create", "run": "set_pace"}[op]
    answering = getattr(scripts, name)

    async def look(*args: object) -> object:
        listed.append(await stranger.client.sismember(live, "world-1"))
        return await answering(*args)

    setattr(scripts, name, look)
    args = {"model": "scripted"} if op == "create" else {}
    await stranger.ok(op, pace_ms=3_600_000, **args)

    assert listed == [1]
    await stranger.ok("close")
