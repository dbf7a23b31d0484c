"""`begin_tick` and `commit`: each outcome, and exactly what it writes."""

import json
from typing import Any
from unittest.mock import ANY

import pytest
import redis.asyncio

from contracts.identity import MAX_INTEGER
from contracts.lifecycle import Status
from contracts.messages import WorkerRequest
from contracts.session_scripts import Committed, Limits, Outcome
from contracts.state import CommittedChunk
from support.script_world import WORKER, World


# --- begin_tick
async def test_a_tick_that_begins_is_in_flight_and_sent(world: World) -> None:
    await world.create()
    await world.accept(3)
    state = await world.state()
    record, request = await world.tick([3], "next-1", prompt="p")
    await world.mark()

    outcome, newer = await world.scripts.begin_tick(
        state, record, request, WORKER, cursor=await world.cursor(), strict=True
    )

    assert (outcome, newer) == (Outcome.BEGUN, ())
    changed = await world.changes()
    assert changed.keys() == {"state", "requests"}
    assert changed["state"].items() >= {"inflight": record.to_json(), "fence": str(state.fence + 1)}.items()
    assert changed["state"].keys() <= {"inflight", "fence", "updated_at_ms"}
    (sent,) = changed["requests"]
    assert sent.items() >= request.to_entry().items()
    assert int(sent["expires_at_ms"]) == int((await world.stored()).updated_at_ms or 0) + 60_000


async def test_the_request_reads_back_as_what_was_sent(world: World) -> None:
    await world.create()
    await world.accept(3)
    await world.begin([3], "next-1", prompt="p")

    ((_, fields),) = await world.client.xrange(world.requests)
    request = WorkerRequest.from_entry(fields)

    assert request.tick is not None
    assert request.tick.applied_event_ids == (3,)
    assert request.expires_at_ms is not None


async def test_on_a_cluster_the_request_follows_the_script(broker_client: redis.asyncio.Redis) -> None:
    world = World(broker_client, cluster=True)
    await world.create()

    await world.begin([], "next-1")

    ((_, fields),) = await world.client.xrange(world.requests)
    assert (
        WorkerRequest.from_entry(fields).expires_at_ms
        == int((await world.stored()).updated_at_ms or 0) + 60_000
    )


async def test_bare_entries_are_remembered_once_a_tick_takes_them(world: World) -> None:
    await world.create()
    await world.bare(4)
    await world.accept(9)
    await world.bare(2)

    await world.begin([2, 4, 9])

    assert await world.ids() == [9, 2, 4]
    assert await world.accept(4) == "DUPLICATE"


async def test_in_strict_mode_any_newer_entry_stops_it(world: World) -> None:
    await world.create()
    await world.accept(3)
    cursor = await world.cursor()
    entry = await world.bare(8)
    await world.mark()

    outcome, newer = await world.begin([3], cursor=cursor)

    assert outcome is Outcome.NEWER
    assert newer == ((entry, {b"event_id": b"8", b"prompt": b"p"}),)
    assert await world.changes() == {}


@pytest.mark.parametrize(
    ("event_id", "outcome"),
    [
        pytest.param(2, Outcome.NEWER, id="below the new floor"),
        pytest.param(6, Outcome.BEGUN, id="above the new floor"),
        pytest.param(5, Outcome.BEGUN, id="the same as one in the snapshot"),
        pytest.param(1, Outcome.BEGUN, id="at the old floor"),
        pytest.param(0, Outcome.BEGUN, id="below the old floor"),
        pytest.param("02", Outcome.BEGUN, id="no event id"),
        pytest.param("2.0", Outcome.BEGUN, id="a fraction"),
        pytest.param("-2", Outcome.BEGUN, id="negative"),
        pytest.param("2e0", Outcome.BEGUN, id="scientific"),
        pytest.param("0x2", Outcome.BEGUN, id="hexadecimal"),
        pytest.param(" 2", Outcome.BEGUN, id="blank in front"),
        pytest.param(2**53, Outcome.BEGUN, id="too large"),
        pytest.param("", Outcome.BEGUN, id="empty"),
        pytest.param(None, Outcome.BEGUN, id="absent"),
        pytest.param(b"\xff2", Outcome.BEGUN, id="no text"),
    ],
)
async def test_in_floor_mode_only_a_newer_id_below_the_new_floor_stops_it(
    event_id: Any, outcome: Outcome, world: World
) -> None:
    await world.create()
    await world.chunks([1])
    await world.accept(5)
    cursor = await world.cursor()
    await world.bare(event_id)
    await world.mark()

    got, newer = await world.begin([5], cursor=cursor, strict=False)

    assert got is outcome
    assert bool(newer) is (outcome is Outcome.NEWER)
    assert (await world.changes() == {}) is (outcome is Outcome.NEWER)


async def test_in_floor_mode_a_tick_without_events_is_stopped_by_nothing(world: World) -> None:
    await world.create()
    await world.accept(0)

    assert (await world.begin([], cursor="0-0", strict=False))[0] is Outcome.BEGUN


async def test_a_flood_of_events_does_not_keep_a_tick_without_events_from_beginning(
    broker_client: redis.asyncio.Redis,
) -> None:
    world = World(broker_client, limits=Limits(batch=2))
    await world.create(max_pending_events=9)
    for event_id in (1, 2, 3):
        await world.accept(event_id)

    assert (await world.begin([], cursor="0-0", strict=False))[0] is Outcome.BEGUN


async def test_a_batch_that_is_full_may_hide_more_and_stops_it_in_both_modes(
    broker_client: redis.asyncio.Redis,
) -> None:
    world = World(broker_client, limits=Limits(batch=2))
    await world.create(max_pending_events=9)
    await world.accept(5)
    cursor = await world.cursor()
    for event_id in (7, 8, 2):
        await world.accept(event_id)
    await world.mark()

    outcome, newer = await world.begin([5], cursor=cursor, strict=False)

    assert outcome is Outcome.NEWER
    assert [fields[b"event_id"] for _, fields in newer] == [b"7", b"8"]
    assert await world.changes() == {}


@pytest.mark.parametrize("strict", [True, False])
async def test_an_event_accepted_while_a_snapshot_is_taken_with_an_id_below_it_is_applied_never_lost(
    strict: bool, world: World
) -> None:
    await world.create()
    await world.accept(10)
    cursor = await world.cursor()  # the snapshot sees 10 only
    assert await world.accept(4) == "ACCEPTED"

    outcome, newer = await world.begin([10], cursor=cursor, strict=strict)
    assert outcome is Outcome.NEWER
    assert [fields[b"event_id"] for _, fields in newer] == [b"4"]
    assert (await world.begin([4, 10], cursor=newer[-1][0], strict=strict))[0] is Outcome.BEGUN
    await world.commit()

    chunk = CommittedChunk.from_entry((await world.client.xrange(world.k.chunks))[0][1])
    assert chunk.applied_event_ids == (4, 10)


async def test_an_event_accepted_while_a_snapshot_is_taken_with_an_id_above_it_waits_for_the_next_tick(
    world: World,
) -> None:
    await world.create()
    await world.accept(10)
    cursor = await world.cursor()
    await world.accept(11)

    assert (await world.begin([10], cursor=cursor, strict=False))[0] is Outcome.BEGUN
    committed = await world.commit(cursor=cursor)

    assert [fields[b"event_id"] for _, fields in committed.newer] == [b"11"]
    assert await world.ids() == [10, 11]
    assert (await world.begin([11]))[0] is Outcome.BEGUN


async def test_a_command_that_was_answered_begins_no_tick(world: World) -> None:
    await world.create()
    await world.begin([], "next-1")
    await world.commit()
    await world.mark()

    assert (await world.begin([], "next-1"))[0] is Outcome.ANSWERED
    assert await world.changes() == {"answers": [ANY, -1]}


@pytest.mark.parametrize("status", [status for status in Status if status is not Status.ACTIVE])
async def test_outside_active_no_tick_begins(status: Status, world: World) -> None:
    await world.bring_to(status)
    await world.mark()

    assert (await world.begin([], "next-1"))[0] is Outcome.STATUS
    assert await world.changes() == {}


async def test_one_request_is_in_flight_at_most(world: World) -> None:
    await world.create()
    await world.begin([], "next-1")
    await world.mark()

    assert (await world.begin([], "next-2"))[0] is Outcome.BUSY
    assert await world.begin_reset() is Outcome.BUSY
    assert await world.begin_close() is Outcome.BUSY
    assert await world.changes() == {}


# --- commit
async def test_a_commit_moves_what_is_in_flight_into_place(world: World) -> None:
    await world.create()
    await world.accept(3)
    entry = (await world.entries())[3]
    await world.begin([3], "next-1", prompt="left", controls='[{"track":"t"}]', reducer_state='{"n":1}')
    record = await world.in_flight()
    await world.mark()

    accepted_ms = int(entry.partition("-")[0])
    committed = await world.commit(accepted_ms=accepted_ms)

    waited = committed.now_ms - accepted_ms
    assert committed == Committed(Outcome.COMMITTED, ANY, waited, ())
    state = {
        "prompt": "left",
        "controls": '[{"track":"t"}]',
        "reducer_state": '{"n":1}',
        "chunk_index": "1",
        "event_floor": "3",
        "last_request_id": record.request_id,
        "worker_incarnation": "inc-1",
        "inflight": None,
    }
    changed = await world.changes()
    changed["state"].pop("updated_at_ms", None)
    assert changed == {
        "state": state,
        "events": [-1],
        "chunks": [ANY],
        "ticks": [ANY],
        "answers": [{"answer": ANY}],
        "answered": {"next-1": ANY},
    }
    (tick,), (chunk,) = changed["ticks"], changed["chunks"]
    assert {**tick, "accepted_to_applied_ms": str(waited)} == {
        **chunk,
        "prompt": "left",
        "controls": '[{"track":"t"}]',
    }


async def test_a_commit_without_events_leaves_floor_events_and_ids_alone(world: World) -> None:
    await world.create()
    await world.chunks([3])
    await world.accept(7)
    await world.begin([], cursor="0-0", strict=False)
    await world.mark()

    committed = await world.commit()

    changed = await world.changes()
    assert committed.accepted_to_applied_ms is None
    assert changed.keys() == {"state", "chunks", "ticks"}
    assert "event_floor" not in changed["state"]
    assert "accepted_to_applied_ms" not in changed["chunks"][0]


async def test_a_tick_that_nobody_waits_for_answers_nobody(world: World) -> None:
    await world.create()
    await world.begin([], None)
    await world.mark()

    await world.commit()

    assert (await world.changes()).keys() == {"state", "chunks", "ticks"}


async def test_what_a_tick_lacks_is_absent_after_the_commit(world: World) -> None:
    await world.create(prompt="first", reducer_state="1")
    await world.begin([], prompt=None, reducer_state=None)

    await world.commit(frames=None)

    stored = await world.client.hgetall(world.k.state)
    assert stored.keys().isdisjoint({b"prompt", b"reducer_state", b"inflight"})
    ((_, tick),) = await world.client.xrange(world.k.ticks)
    ((_, chunk),) = await world.client.xrange(world.k.chunks)
    assert b"prompt" not in tick
    assert b"frames" not in chunk


VALUES = [
    pytest.param("{}", id="an empty object"),
    pytest.param("[]", id="an empty list"),
    pytest.param('{"a":{},"b":[],"c":[[],{}]}', id="empty containers inside"),
    pytest.param("[1.0,1,1e-7,1.5e300,0.1,-0.0,100000000000000000.0]", id="floats that look like others"),
    pytest.param(f"[{MAX_INTEGER},-{MAX_INTEGER},9007199254740990]", id="the largest integers"),
    pytest.param('["é","\u2028","𝄞","\\u0000","\\u001f","\\"\\\\/"]', id="text"),
    pytest.param('{"x":null,"y":false,"z":[null]}', id="nothing"),
    pytest.param("[" * 31 + "]" * 31, id="as deep as data may be"),
    pytest.param(json.dumps([{"k" * 50: "v" * 1_000}] * 40, separators=(",", ":")), id="long"),
]


@pytest.mark.parametrize("text", VALUES)
async def test_json_is_moved_byte_for_byte(text: str, world: World) -> None:
    await world.create()
    await world.begin([], controls=text, reducer_state=text)

    await world.commit()

    stored = await world.client.hgetall(world.k.state)
    ((_, tick),) = await world.client.xrange(world.k.ticks)
    assert stored[b"controls"] == stored[b"reducer_state"] == tick[b"controls"] == text.encode()


@pytest.mark.parametrize(
    "prompt", ["", " ", "null", "é\u2028𝄞", "a\0b", '"\\', "x" * 60_000, "\x7f\x1b\n\r\t"]
)
async def test_a_prompt_is_moved_byte_for_byte(prompt: str, world: World) -> None:
    await world.create()
    await world.begin([], prompt=prompt)

    await world.commit()

    assert (await world.client.hget(world.k.state, "prompt")).decode() == prompt
    ((_, tick),) = await world.client.xrange(world.k.ticks)
    assert tick[b"prompt"].decode() == prompt


@pytest.mark.parametrize("ids", [(), (3,), (3, MAX_INTEGER)])
@pytest.mark.parametrize("frames", [None, "memory://frames"])
async def test_the_answer_is_exactly_the_chunks_entry_typed(
    ids: tuple[int, ...], frames: str | None, world: World
) -> None:
    await world.create()
    for event_id in ids:
        await world.accept(event_id)
    entries = await world.entries()
    await world.begin(ids, "next-1")

    accepted_ms = min((int(entry.partition("-")[0]) for entry in entries.values()), default=None)
    await world.commit(accepted_ms=accepted_ms, frames=frames)

    ((_, fields),) = await world.client.xrange(world.k.chunks)
    answer = (await world.answers())[-1]
    assert answer == {"command_id": "next-1", "ok": True, "result": ANY}
    chunk = CommittedChunk.from_entry(fields)
    assert answer["result"] == chunk.to_dict() | {"applied_event_ids": list(ids)}
    assert CommittedChunk.from_dict(answer["result"]) == chunk
    assert {type(value) for value in answer["result"].values()} <= {str, int, list, type(None)}


async def test_the_time_since_the_acceptance_is_never_negative(world: World) -> None:
    await world.create()
    await world.begin([])

    assert (await world.commit(accepted_ms=2**52)).accepted_to_applied_ms == 0


async def test_a_commit_deletes_exactly_the_entries_that_the_tick_took(world: World) -> None:
    await world.create()
    await world.accept(1)
    await world.accept(2)
    duplicate = await world.bare(1)
    await world.begin([1, 2])

    await world.commit()

    left = await world.client.xrange(world.k.events)
    assert [entry_id.decode() for entry_id, _ in left] == [duplicate]


async def test_a_commit_returns_what_came_after_the_cursor_at_most_a_batch(
    broker_client: redis.asyncio.Redis,
) -> None:
    world = World(broker_client, limits=Limits(batch=2))
    await world.create(max_pending_events=9)
    await world.accept(1)
    cursor = await world.cursor()
    await world.begin([1])
    for event_id in (4, 5, 6):
        await world.accept(event_id)

    committed = await world.commit(cursor=cursor)

    assert [fields[b"event_id"] for _, fields in committed.newer] == [b"4", b"5"]


async def test_the_same_commit_again_is_dup(world: World) -> None:
    await world.create()
    await world.begin([], "next-1")
    state, record = await world.state(), await world.in_flight()
    fields, head = world.chunk(state, record)
    await world.commit()
    await world.mark()

    again = await world.scripts.commit(
        state, fields, head, incarnation="i", accepted_ms=None, cursor="0-0", ticks_kept=None
    )

    assert again == Committed(Outcome.DUP)
    assert await world.changes() == {}


async def test_a_commit_of_the_last_chunk_is_dup_while_the_next_is_in_flight(world: World) -> None:
    await world.create()
    await world.begin([])
    state, record = await world.state(), await world.in_flight()
    fields, head = world.chunk(state, record)
    await world.commit()
    await world.begin([])
    await world.mark()

    again = await world.scripts.commit(
        state, fields, head, incarnation="i", accepted_ms=None, cursor="0-0", ticks_kept=None
    )

    assert again == Committed(Outcome.DUP)
    assert await world.changes() == {}


@pytest.mark.parametrize(
    "meanwhile", ["nothing in flight", "another tick", "a release", "a reset", "a new life"]
)
async def test_a_commit_of_what_is_not_in_flight_is_stale(meanwhile: str, world: World) -> None:
    await world.create()
    await world.begin([], "next-1")
    state, record = await world.state(), await world.in_flight()
    fields, head = world.chunk(state, record)
    if meanwhile == "a release":
        await world.fail()
    else:
        await world.scripts.end_inflight(state, record.request_id)
    if meanwhile == "another tick":
        await world.begin([], "next-2")
    if meanwhile in ("a reset", "a new life"):
        await world.begin_reset()
    if meanwhile == "a new life":
        await world.finish_reset()
    await world.mark()

    outcome = await world.scripts.commit(
        state, fields, head, incarnation="i", accepted_ms=None, cursor="0-0", ticks_kept=None
    )

    assert outcome == Committed(Outcome.STALE)
    assert await world.changes() == {}


async def test_the_request_id_of_a_running_reset_commits_no_tick(world: World) -> None:
    await world.create()
    await world.begin_reset()
    await world.mark()

    assert (await world.commit()).outcome is Outcome.STALE
    assert await world.changes() == {}


@pytest.mark.parametrize(
    ("kept", "left"), [(0, []), (1, [3]), (2, [2, 3]), (9, [0, 1, 2, 3]), (None, [0, 1, 2, 3])]
)
async def test_ticks_are_recorded_as_the_session_wants_it(
    kept: int | None, left: list[int], world: World
) -> None:
    await world.create()
    for _ in range(4):
        await world.begin([])
        await world.commit(ticks_kept=kept)

    recorded = [int(fields[b"chunk_index"]) for _, fields in await world.client.xrange(world.k.ticks)]
    assert recorded == left
    assert await world.client.xlen(world.k.chunks) == 4


async def test_the_chunks_stream_is_capped(broker_client: redis.asyncio.Redis) -> None:
    world = World(broker_client, limits=Limits(chunks=2))
    await world.create()
    await world.chunks([], [], [])

    assert [int(fields[b"chunk_index"]) for _, fields in await world.client.xrange(world.k.chunks)] == [1, 2]


# --- what is remembered of events
async def test_as_many_applied_ids_are_remembered_as_events_may_be_pending(world: World) -> None:
    await world.create(max_pending_events=3)

    await world.chunks([1], [2], [3], [4], [5])

    assert await world.ids() == [3, 4, 5]


async def test_ids_above_the_floor_are_kept_however_many_are_remembered_below(world: World) -> None:
    await world.create(max_pending_events=3)
    await world.chunks([1], [2])
    await world.accept(3)
    for event_id in (10, 11):
        await world.accept(event_id)
    await world.begin([3])
    await world.commit()
    await world.accept(12)
    await world.begin([], cursor="0-0", strict=False)
    await world.commit()

    assert await world.ids() == [1, 2, 3, 10, 11, 12]


async def test_an_id_above_the_floor_is_kept_even_if_it_was_accepted_first(world: World) -> None:
    await world.create(max_pending_events=2)
    await world.accept(10)
    for event_id in (1, 2, 3):
        await world.accept(event_id)
        await world.begin([event_id])
        await world.commit()

    assert await world.ids() == [10, 2, 3]
    assert await world.accept(10) == "DUPLICATE"


async def test_what_is_forgotten_first_was_accepted_first_not_lowest(world: World) -> None:
    await world.create(max_pending_events=3)
    for event_id in (7, 5, 6):
        await world.accept(event_id)
    await world.begin([5, 6, 7])
    await world.commit()

    await world.chunks([8])

    assert await world.ids() == [5, 6, 8]


async def test_a_command_answered_meanwhile_keeps_its_one_answer(world: World) -> None:
    await world.create()
    await world.begin([], "next-1")
    await world.scripts.answer(world.session_id, world.epoch, "next-1", world.refused("next-1"))
    await world.mark()

    assert (await world.commit()).outcome is Outcome.COMMITTED
    assert (await world.changes()).keys() == {"state", "chunks", "ticks"}


@pytest.mark.parametrize("field", ["event_floor", "max_pending_events", "chunk_index", "inflight"])
async def test_a_state_that_cannot_be_read_stops_the_commit_before_it_writes(
    field: str, world: World
) -> None:
    await world.create()
    await world.begin([], "next-1")
    state, record = await world.state(), await world.in_flight()
    fields, head = world.chunk(state, record)
    await world.client.hset(world.k.state, field, "{")
    await world.mark()

    with pytest.raises(Exception):  # noqa: B017 - each broker has its own text; what counts is what follows
        await world.scripts.commit(
            state, fields, head, incarnation="i", accepted_ms=None, cursor="0-0", ticks_kept=None
        )
    assert await world.changes() == {}
