"""Free running: chunks come by themselves until a pause, a failure or a close."""

import asyncio
import json

from support.hosting import Caller
from support.scripted_worker import ScriptedWorker, failing


async def chunks_reach(world: Caller, count: int, timeout_s: float = 10) -> None:
    async with asyncio.timeout(timeout_s):
        while len(await world.chunks()) < count:
            await asyncio.sleep(0.01)


async def test_a_session_runs_free_until_it_is_paused(world: Caller, worker: ScriptedWorker) -> None:
    # When it runs
    await world.ok("run")
    await chunks_reach(world, 20)
    assert await world.client.sismember(world.inbox.replace("inbox", "live"), "world-1")
    await world.ok("pause")

    # Then nothing comes after the pause was answered
    made = len(await world.chunks())
    await asyncio.sleep(0.1)
    assert len(await world.chunks()) == made == len(worker.ticks())
    assert [int(chunk["chunk_index"]) for chunk in await world.chunks()] == list(range(made))


async def test_events_are_applied_while_it_runs(world: Caller) -> None:
    await world.ok("run")
    for event_id in range(50):
        await world.accept(event_id, f"p{event_id}")
        await asyncio.sleep(0.002)
    async with asyncio.timeout(10):
        while int((await world.state())["event_floor"]) < 49:
            await asyncio.sleep(0.01)
    await world.ok("pause")

    applied = [
        event_id for chunk in await world.chunks() for event_id in json.loads(chunk["applied_event_ids"])
    ]
    assert applied == list(range(50))
    assert (await world.state())["prompt"] == "p49"


async def test_a_command_that_is_asked_for_takes_its_turn_while_it_runs(world: Caller) -> None:
    await world.ok("run")
    chunk = await world.ok("next_chunk")
    await world.ok("pause")

    indexes = [int(entry["chunk_index"]) for entry in await world.chunks()]
    assert chunk["chunk_index"] in indexes
    assert indexes == list(range(len(indexes)))


async def test_a_pace_is_a_lower_bound_of_the_distance(world: Caller) -> None:
    await world.ok("run", pace_ms=3_600_000)
    await chunks_reach(world, 1)
    await asyncio.sleep(0.1)

    # A chunk that is asked for does not wait for the pace, and a new pace counts at once.
    assert (await world.ok("next_chunk"))["chunk_index"] == 1
    assert len(await world.chunks()) == 2
    await world.ok("run", pace_ms=1)
    await chunks_reach(world, 5)
    await world.ok("pause")


async def test_a_session_may_be_created_running(stranger: Caller) -> None:
    await stranger.ok("create", model="scripted", pace_ms=0)
    await chunks_reach(stranger, 3)
    await stranger.ok("close")
    assert (await stranger.state())["status"] == "CLOSED"


async def test_a_failure_ends_free_running_and_a_reset_does_not_resume_it(
    world: Caller, worker: ScriptedWorker
) -> None:
    worker.on_request = lambda request: failing()(request) if len(worker.ticks()) == 4 else None
    await world.ok("run")

    state = await world.until("FAILED")

    assert "pace_ms" not in state
    assert (await world.refused("run"))["code"] == "invalid_state"
    await world.ok("reset")
    await asyncio.sleep(0.05)
    assert (await world.state())["chunk_index"] == "0"


async def test_an_expired_tick_does_not_end_free_running(world: Caller, worker: ScriptedWorker) -> None:
    worker.on_request = failing("expired", times=1)
    await world.ok("run")
    await chunks_reach(world, 3)
    await world.ok("pause")
    assert (await world.state())["status"] == "ACTIVE"


async def test_a_reset_while_it_runs_starts_a_new_life_that_runs_on(world: Caller) -> None:
    await world.ok("run")
    await chunks_reach(world, 3)

    life = (await world.ok("reset"))["life"]

    async with asyncio.timeout(10):
        while not any(chunk["life"] == life for chunk in await world.chunks()):
            await asyncio.sleep(0.01)
    await world.ok("pause")


async def test_run_and_pause_act_once_however_often_they_are_sent(world: Caller) -> None:
    for command_id in ("run-1", "run-1", "run-1"):
        await world.answer_to(await world.send("run", command_id, pace_ms=5))
    await world.ok("pause")
    answer = await world.answer_to(await world.send("run", "run-1", pace_ms=5))

    assert answer["result"] == {"pace_ms": 5}
    assert "pace_ms" not in (await world.state())


async def test_a_close_ends_free_running(world: Caller, worker: ScriptedWorker) -> None:
    await world.ok("run")
    await chunks_reach(world, 3)
    await world.ok("close")

    made = len(worker.ticks())
    await asyncio.sleep(0.05)
    assert len(worker.ticks()) == made
    assert worker.kinds()[-1] == "release"
