"""Reset: chunk 0 of a new life, the queue dropped and reported, ids that were used stay used."""

import asyncio

import pytest

from contracts.errors import EventStaleError
from support.hosting import Caller
from support.reducers import ScriptedReducer
from support.scripted_worker import ScriptedWorker, failing


async def test_after_a_failure_with_event_3_pending_a_reset_leaves_event_4_as_the_first(
    world: Caller, worker: ScriptedWorker
) -> None:
    # Given a session that failed with event 3 pending
    worker.on_request = failing()
    await world.accept(3, "three")
    await world.refused("next_chunk")
    worker.on_request = None

    # When it is reset
    answer = await world.ok("reset")

    # Then it starts again, and only a higher id counts
    assert (answer["chunk_index"], answer["event_floor"]) == (0, 3)
    with pytest.raises(EventStaleError, match="event floor is 3"):
        await world.accept(3, "again")
    await world.accept(4, "four")
    chunk = await world.ok("next_chunk")
    assert (chunk["chunk_index"], chunk["applied_event_ids"], chunk["life"]) == (0, [4], answer["life"])
    assert [(e["event_id"], e["reason"]) for e in await world.rejected()] == [("3", "reset")]


async def test_a_reset_forgets_the_prompt_the_controls_and_what_the_reducer_knew(
    stranger: Caller, worker: ScriptedWorker, reducer: type[ScriptedReducer]
) -> None:
    await stranger.ok("create", model="scripted", reducer="scripted", prompt="first")
    await stranger.event(1, prompt="p", controls=[{"track": "t", "schema": "s", "data": {}}])
    await stranger.ok("next_chunk")
    old = (await stranger.state())["life"]

    answer = await stranger.ok("reset")

    state = await stranger.state()
    assert answer["life"] == state["life"] != old
    assert (state["status"], state["chunk_index"], state["controls"]) == ("ACTIVE", "0", "[]")
    assert not {"prompt", "reducer_state", "last_request_id", "failure_code"} & set(state)
    await stranger.ok("next_chunk")
    assert worker.ticks()[-1]["prompt"] is None
    assert worker.requests[-1]["parent_request_id"] == answer["life"]
    assert "count" in (await stranger.state())["reducer_state"]


async def test_the_floor_of_a_reset_is_never_lower_than_before(world: Caller) -> None:
    await world.accept(9, "p")
    await world.ok("next_chunk")

    assert (await world.ok("reset"))["event_floor"] == 9


async def test_events_that_came_while_the_reset_ran_are_dropped_as_well(
    world: Caller, worker: ScriptedWorker
) -> None:
    worker.gate.clear()
    command = await world.send("reset")
    await worker.arrived(1)
    await world.accept(7, "meanwhile")
    worker.gate.set()

    assert (await world.answer_to(command))["result"]["event_floor"] == 7
    assert [(e["event_id"], e["reason"]) for e in await world.rejected()] == [("7", "reset")]


async def test_a_running_reset_is_no_state_but_a_request_in_flight(
    world: Caller, worker: ScriptedWorker
) -> None:
    worker.gate.clear()
    reset, tick = await world.send("reset"), await world.send("next_chunk")
    request = await worker.arrived(1)

    state = await world.state()
    assert (state["status"], '"kind":"reset"' in state["inflight"]) == ("ACTIVE", True)
    assert request["life"] == request["request_id"]
    worker.gate.set()
    life = (await world.answer_to(reset))["result"]["life"]
    assert (await world.answer_to(tick))["result"]["life"] == life


@pytest.mark.parametrize("failed", [False, True], ids=["ACTIVE", "FAILED"])
async def test_a_reset_that_the_worker_can_not_do_leaves_the_session_failed(
    world: Caller, worker: ScriptedWorker, failed: bool
) -> None:
    # Given a session in either state that has lived
    await world.ok("next_chunk")
    if failed:
        worker.on_request = failing(times=1)
        await world.refused("next_chunk")
        await world.until("FAILED")
    life = (await world.state())["life"]

    # When the worker fails to reset it
    worker.on_request = failing("kv_state", "pages are gone", kind="reset", times=1)
    error = await world.refused("reset")

    # Then it is FAILED in its old life, and another reset brings it back
    state = await world.until("FAILED")
    assert error["code"] == state["failure_code"] == "reset_failed"
    assert "pages are gone" in error["message"]
    assert (state["life"], state["chunk_index"]) == (life, "1")
    assert (await world.ok("reset"))["life"] != life
    assert (await world.ok("next_chunk"))["chunk_index"] == 0


async def test_the_room_of_a_reset_that_failed_is_given_back_at_the_close(
    world: Caller, worker: ScriptedWorker
) -> None:
    worker.on_request = failing(kind="reset")
    await world.refused("reset")
    await world.until("FAILED")
    worker.on_request = None

    await world.ok("close")

    assert not await world.client.hlen("wl:{w:w0}:sessions")


async def test_a_reset_takes_the_place_of_a_release_that_nobody_answered(
    world: Caller, worker: ScriptedWorker
) -> None:
    # Given a failed session whose release is still at the worker
    await world.ok("next_chunk")
    worker.on_request = failing()
    command = await world.send("next_chunk")
    await world.answer_to(command)
    worker.on_request = lambda request: {"silence": True} if request["kind"] == "release" else None
    await world.until("FAILED")
    worker.on_request = failing(times=1)
    await world.ok("reset")
    worker.on_request = lambda request: (
        {"silence": True} if request["kind"] == "release" else failing()(request)
    )
    await world.refused("next_chunk")
    release = (
        await worker.arrived(len(worker.requests) + 1)
        if worker.kinds()[-1] != "release"
        else worker.requests[-1]
    )
    assert '"kind":"release"' in (await world.state())["inflight"]

    # When it is reset
    worker.on_request = None
    await world.ok("reset")

    # Then it lives, and the late answer to the release changes nothing
    await worker.send(release)
    assert (await world.ok("next_chunk"))["chunk_index"] == 0
    assert (await world.state())["status"] == "ACTIVE"


async def test_the_same_reset_sent_twice_resets_once_and_keeps_its_room(
    world: Caller, worker: ScriptedWorker
) -> None:
    first = await world.ok("reset", command_id="one-reset")
    await world.ok("next_chunk")

    again = await world.answer_to(await world.send("reset", "one-reset"))
    await world.ok("next_chunk")
    await world.ok("close")

    assert again["result"] == first
    assert worker.kinds() == ["reset", "tick", "tick", "release"]
    assert not await world.client.hlen("wl:{w:w0}:sessions")


async def test_a_reset_without_room_is_refused_as_retryable_and_changes_nothing(
    world: Caller, worker: ScriptedWorker
) -> None:
    # Given a failed session that was released, and whose room somebody else has taken
    worker.on_request = failing(times=1)
    await world.refused("next_chunk")
    await world.until("FAILED")
    await worker.announce(capacity=1)
    other = Caller(world.client, "world-2")
    async with asyncio.timeout(5):
        while not (await other.call("create", model="scripted"))["ok"]:
            await asyncio.sleep(0.01)

    # When it asks for a reset
    error = await world.refused("reset")

    # Then it may ask again later
    assert (error["code"], error["retryable"]) == ("no_capacity", True)
    assert (await world.state())["status"] == "FAILED"
    await other.ok("close")
    await world.ok("reset")
