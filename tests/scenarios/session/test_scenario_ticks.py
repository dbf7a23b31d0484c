"""Events in, chunks out: what a tick takes, in which order, and what stays."""

import asyncio
import json
import re

import pytest

from actors.host import Host
from contracts.errors import EventQueueFullError, EventStaleError
from support.hosting import Caller
from support.reducers import ScriptedReducer
from support.scripted_worker import ScriptedWorker


def control(track: str, value: object) -> dict[str, object]:
    return {"track": track, "schema": "s", "data": {"v": value}}


async def test_events_that_came_as_2_then_1_are_applied_in_the_order_of_their_ids(
    world: Caller, worker: ScriptedWorker
) -> None:
    # Given two events, the newer first
    await world.accept(2, "late", control("camera", 2), control("action", 2))
    await world.accept(1, "early", control("camera", 1), control("zoom", 1))

    # When a chunk is made
    chunk = await world.ok("next_chunk")

    # Then the tick carries both in order, the newest prompt, per track the newest value, sorted by track
    assert chunk["applied_event_ids"] == [1, 2]
    tick = worker.ticks()[0]
    assert tick["applied_event_ids"] == [1, 2]
    assert tick["prompt"] == "late"
    assert [(c["track"], c["data"]["v"]) for c in tick["controls"]] == [
        ("action", 2),
        ("camera", 2),
        ("zoom", 1),
    ]


async def test_prompt_and_controls_hold_until_an_event_touches_them(
    world: Caller, worker: ScriptedWorker
) -> None:
    await world.event(0, prompt="a valley", controls=[control("camera", 1)])
    await world.ok("next_chunk")

    await world.ok("next_chunk")
    await world.event(1, controls=[control("camera", 2)])
    await world.ok("next_chunk")

    _, untouched, touched = worker.ticks()
    assert (untouched["applied_event_ids"], untouched["prompt"]) == ([], "a valley")
    assert untouched["controls"] == [control("camera", 1)]
    assert (touched["prompt"], touched["controls"]) == ("a valley", [control("camera", 2)])


async def test_the_prompt_of_the_creation_is_the_first_one(stranger: Caller, worker: ScriptedWorker) -> None:
    await stranger.ok("create", model="scripted", prompt="a valley", seed=7, params={"size": [1, 2]})

    await stranger.ok("next_chunk")

    assert worker.ticks()[0]["prompt"] == "a valley"
    assert (worker.requests[0]["seed"], json.loads(worker.requests[0]["params"])) == ("7", {"size": [1, 2]})


async def test_two_next_chunks_at_once_run_one_after_the_other(world: Caller, worker: ScriptedWorker) -> None:
    # Given a worker that is slow
    worker.gate.clear()
    first, second = await world.send("next_chunk"), await world.send("next_chunk")

    # When one request has arrived, Then no second one comes before it is answered
    await worker.arrived(1)
    await asyncio.sleep(0.1)
    assert len(worker.requests) == 1
    worker.gate.set()
    answers = [await world.answer_to(first), await world.answer_to(second)]
    assert [answer["result"]["chunk_index"] for answer in answers] == [0, 1]


async def test_what_is_in_flight_does_not_change(world: Caller, worker: ScriptedWorker) -> None:
    # Given a chunk in flight that applies event 10
    await world.accept(10, "ten")
    worker.gate.clear()
    command = await world.send("next_chunk")
    await worker.arrived(1)

    # When event 11 and event 9 come meanwhile
    await world.accept(11, "eleven")
    with pytest.raises(EventStaleError, match="event floor is 10"):
        await world.accept(9, "nine")
    await world.event(8, prompt="eight, bare")
    worker.gate.set()

    # Then 11 is in the next chunk only, and what came too late is reported
    assert (await world.answer_to(command))["result"]["applied_event_ids"] == [10]
    assert (await world.ok("next_chunk"))["applied_event_ids"] == [11]
    assert [(e["event_id"], e["reason"]) for e in await world.rejected()] == [("8", "stale")]


async def test_a_chunk_in_flight_without_events_leaves_the_old_floor(
    world: Caller, worker: ScriptedWorker
) -> None:
    await world.accept(5, "five")
    await world.ok("next_chunk")
    worker.gate.clear()
    command = await world.send("next_chunk")
    await worker.arrived(2)

    await world.accept(6, "six")
    with pytest.raises(EventStaleError, match="event floor is 5"):
        await world.accept(4, "four")
    worker.gate.set()

    assert (await world.answer_to(command))["result"]["applied_event_ids"] == []
    assert (await world.ok("next_chunk"))["applied_event_ids"] == [6]


async def test_a_commit_moves_everything_at_once(world: Caller) -> None:
    life = (await world.state())["life"]
    await world.accept(0, "zero", control("camera", 1))

    answer = await world.ok("next_chunk")

    state = await world.state()
    assert re.fullmatch(r"ar-world-1-0-[0-9a-f]{32}", answer["request_id"])
    assert (state["chunk_index"], state["event_floor"], state["prompt"]) == ("1", "0", "zero")
    assert json.loads(state["controls"]) == [control("camera", 1)]
    assert state["last_request_id"] == answer["request_id"]
    assert "inflight" not in state
    assert await world.pending() == 0
    entry = (await world.chunks())[0]
    assert (entry["life"], entry["chunk_index"], entry["applied_event_ids"]) == (life, "0", "[0]")
    assert {
        name: str(value) for name, value in answer.items() if name in entry and name != "applied_event_ids"
    } == {name: value for name, value in entry.items() if name != "applied_event_ids"}


async def test_each_tick_names_the_chunk_before_it_and_a_higher_fence(
    world: Caller, worker: ScriptedWorker
) -> None:
    life = (await world.state())["life"]
    for _ in range(3):
        await world.ok("next_chunk")

    ids = [request["request_id"] for request in worker.requests]
    assert [request["parent_request_id"] for request in worker.requests] == [life, *ids[:2]]
    fences = [int(request["fence"]) for request in worker.requests]
    assert fences == sorted(set(fences))
    assert {request["life"] for request in worker.requests} == {life}


async def test_an_applied_id_is_a_duplicate_while_it_is_remembered_and_stale_after(stranger: Caller) -> None:
    # Given a session that remembers two ids, and events 0, 1 and 2 applied
    await stranger.ok("create", model="scripted", max_pending_events=2)
    for event_id in range(3):
        await stranger.accept(event_id, "p")
        await stranger.ok("next_chunk")

    # Then the newest answer DUPLICATE, the oldest is stale
    assert (await stranger.accept(2, "again")).status == "DUPLICATE"
    assert (await stranger.accept(1, "again")).status == "DUPLICATE"
    with pytest.raises(EventStaleError, match="event floor is 2"):
        await stranger.accept(0, "again")


async def test_a_duplicate_wins_over_a_full_queue(stranger: Caller) -> None:
    await stranger.ok("create", model="scripted", max_pending_events=2)
    await stranger.accept(1, "p")
    await stranger.accept(2, "p")

    assert (await stranger.accept(2, "q")).status == "DUPLICATE"
    with pytest.raises(EventQueueFullError, match="queue is full"):
        await stranger.accept(3, "p")
    await stranger.event(4, prompt="bare")
    assert (await stranger.ok("next_chunk"))["applied_event_ids"] == [1, 2]
    assert [(e["event_id"], e["reason"]) for e in await stranger.rejected()] == [("4", "queue_full")]
    await stranger.accept(4, "now")
    assert (await stranger.ok("next_chunk"))["applied_event_ids"] == [4]


async def test_of_two_bare_entries_with_one_id_the_first_wins(world: Caller, worker: ScriptedWorker) -> None:
    await world.event(3, prompt="first")
    await world.event(3, prompt="second")

    assert (await world.ok("next_chunk"))["applied_event_ids"] == [3]
    assert worker.ticks()[0]["prompt"] == "first"
    assert [(e["event_id"], e["reason"]) for e in await world.rejected()] == [("3", "duplicate")]


@pytest.mark.parametrize("rounds", [1, 2, 3, 5])
async def test_events_below_the_snapshot_that_come_while_it_is_taken_are_applied(
    world: Caller, host: Host, rounds: int
) -> None:
    # Given event 100, and a producer that slips in a lower id each time the tick is about to begin
    await world.accept(100, "hundred")
    begin = host.services.scripts.begin_tick
    slipped: list[int] = []

    async def begin_late(*args: object, **options: object) -> object:
        if len(slipped) < rounds:
            slipped.append(90 - 10 * len(slipped))
            await world.accept(slipped[-1], f"low {slipped[-1]}")
        return await begin(*args, **options)  # type: ignore[arg-type]

    host.services.scripts.begin_tick = begin_late  # type: ignore[method-assign, assignment]

    # When chunks are made
    chunks = [await world.ok("next_chunk") for _ in range(3)]

    # Then every event is applied, none twice, in order
    applied = [event_id for chunk in chunks for event_id in chunk["applied_event_ids"]]
    assert applied == sorted([100, *slipped])
    assert await world.rejected() == []


async def test_a_producer_that_always_slips_in_lower_ids_can_not_hold_a_tick_up(
    world: Caller, host: Host
) -> None:
    await world.accept(1000, "top")
    begin = host.services.scripts.begin_tick
    slipped: list[int] = []

    async def begin_late(*args: object, **options: object) -> object:
        slipped.append(900 - len(slipped))
        await world.event(slipped[-1], prompt="low")
        return await begin(*args, **options)  # type: ignore[arg-type]

    host.services.scripts.begin_tick = begin_late  # type: ignore[method-assign, assignment]
    chunk = await world.ok("next_chunk")
    host.services.scripts.begin_tick = begin  # type: ignore[method-assign]

    assert chunk["applied_event_ids"] == []
    assert len(slipped) <= 5
    assert (await world.ok("next_chunk"))["applied_event_ids"] == sorted([1000, *slipped])


async def test_a_doubt_about_one_tick_sends_no_later_one_twice(
    world: Caller, host: Host, worker: ScriptedWorker
) -> None:
    # Given a tick in flight, and a host that has to look again at what the broker holds when its reply is there
    worker.gate.clear()
    command = await world.send("next_chunk")
    await worker.arrived(1)
    (actor,) = (p.actors["world-1"] for p in host.owned.values() if "world-1" in p.actors)
    actor._stale = True

    # When it is committed after that, and another one is made
    worker.gate.set()
    assert (await world.answer_to(command))["ok"]
    await world.ok("next_chunk")

    # Then each was sent once
    assert worker.kinds() == ["tick", "tick"]


async def test_a_reducer_is_told_what_it_remembered_and_commits_once_a_chunk(
    stranger: Caller, reducer: type[ScriptedReducer]
) -> None:
    await stranger.ok("create", model="scripted", reducer="scripted")
    for event_id in range(2):
        await stranger.event(event_id, prompt="p")
        await stranger.ok("next_chunk")

    assert json.loads((await stranger.state())["reducer_state"]) == {"count": 2}
    assert reducer.calls.count("commit") == 2


async def test_each_session_has_a_reducer_of_its_own(
    stranger: Caller, reducer: type[ScriptedReducer]
) -> None:
    other = Caller(stranger.client, "world-2")
    for caller in (stranger, other):
        await caller.ok("create", model="scripted", reducer="scripted")
    await stranger.event(1, prompt="p")

    await stranger.ok("next_chunk")
    await other.ok("next_chunk")

    counts = [json.loads((await caller.state())["reducer_state"]) for caller in (stranger, other)]
    assert counts == [{"count": 1}, {"count": 0}]


async def test_an_event_that_the_reducer_can_not_understand_never_reaches_a_tick(
    stranger: Caller, reducer: type[ScriptedReducer]
) -> None:
    await stranger.ok("create", model="scripted", reducer="scripted")
    await stranger.accept(1, "refuse me")
    await stranger.accept(2, "fine")

    assert (await stranger.ok("next_chunk"))["applied_event_ids"] == [2]
    assert [(e["event_id"], e["reason"]) for e in await stranger.rejected()] == [("1", "invalid_control")]


@pytest.mark.parametrize(("recording", "kept"), [("off", 0), ("last 2", 2), ("all", 4)])
async def test_committed_ticks_are_recorded_as_the_session_says(
    stranger: Caller, recording: str, kept: int
) -> None:
    await stranger.ok("create", model="scripted", recording=recording, prompt="p")
    for _ in range(4):
        await stranger.ok("next_chunk")

    entries = await stranger.client.xrange(f"{stranger.base}:ticks")
    assert [int(fields[b"chunk_index"]) for _, fields in entries] == list(range(4 - kept, 4))
    assert all(fields[b"prompt"] == b"p" for _, fields in entries)
