"""`create`, `adopt`, `fail`, resets, placement, pace, re-sending and answers: each outcome, and exactly what it writes."""

import json
from dataclasses import replace
from unittest.mock import ANY

import pytest
import redis.asyncio

from contracts.errors import OwnershipLostError
from contracts.lifecycle import LIVE, Status, Trigger
from contracts.messages import InFlight, Kind, WorkerRequest
from contracts.session_scripts import Limits, Outcome
from support.script_world import EPOCH, WORKER, World

CONTROLS = '[{"track":"camera","schema":"v1","data":{}}]'
NOT_LIVE = [status for status in Status if status not in LIVE]


# --- create
async def test_a_creation_writes_state_an_empty_stream_history_and_the_answer(world: World) -> None:
    assert await world.create("create-1", seed=5) is Outcome.CREATED

    changed = await world.changes()
    state = changed.pop("state")
    assert changed == {
        "events": [],
        "answers": [{"answer": ANY}],
        "answered": {"create-1": ANY},
        "history": [
            {"trigger": "created", "from": "", "to": "ACTIVE", "by": "host-1", "reason": "", "at_ms": ANY}
        ],
    }
    assert (
        state.items() >= {"status": "ACTIVE", "epoch": str(EPOCH), "seed": "5", "event_floor": "-1"}.items()
    )
    assert state["created_at_ms"] == state["updated_at_ms"] == changed["history"][0]["at_ms"]
    assert int(state["fence"]) > 1_600_000_000_000_000, "the broker's clock in microseconds"


async def test_bare_events_reach_a_session_from_its_creation_on(world: World) -> None:
    assert await world.bare(1) == ""
    await world.create()
    assert await world.bare(1) != ""


@pytest.mark.parametrize("status", [status for status in Status if status is not Status.CLOSED])
async def test_a_session_that_exists_is_not_created_again_a_tombstone_counts(
    status: Status, world: World
) -> None:
    await world.bring_to(status)
    await world.mark()

    assert await world.create("create-2") is Outcome.EXISTS
    assert await world.changes() == {}


async def test_a_creation_over_a_closed_session_keeps_only_answers_and_history(world: World) -> None:
    await world.create()
    await world.chunks([1], [2])
    await world.accept(3)
    await world.begin_close()
    await world.finish_close()
    old = await world.stored()
    await world.mark()

    assert await world.create("create-2") is Outcome.CREATED

    changed = await world.changes()
    assert {name for name, change in changed.items() if change is None} == {
        "chunks",
        "ticks",
        "ids",
        "rejected",
    }
    expiring = {name for name, change in changed.items() if name.endswith(".expires")}
    assert expiring == {f"{name}.expires" for name in ("state", "events", "answers", "answered", "history")}
    assert not any(changed[name] for name in expiring)
    assert [entry["trigger"] for entry in changed["history"]] == ["created"]
    assert [answer["command_id"] for answer in await world.answers()] == ["create-1", "close-1", "create-2"]
    new = await world.stored()
    assert (new.status, new.chunk_index, new.event_floor, new.prompt) == (Status.ACTIVE, 0, -1, None)
    assert new.fence > old.fence
    assert await world.accept(1) == "ACCEPTED"


async def test_the_fence_of_a_new_life_is_above_the_old_one_even_if_the_clock_went_back(world: World) -> None:
    await world.bring_to(Status.CLOSED)
    ahead = 2**52
    await world.client.hset(world.k.state, "fence", ahead)

    await world.create("create-2")

    assert (await world.stored()).fence == ahead + 1


async def test_a_creation_found_again_is_answered_again_whatever_became_of_the_session(world: World) -> None:
    await world.bring_to(Status.CLOSED)
    await world.mark()

    assert await world.create("create-1") is Outcome.ANSWERED
    assert await world.changes() == {"answers": [ANY, -1]}


async def test_a_creation_by_an_old_epoch_is_refused(world: World) -> None:
    await world.bring_to(Status.CLOSED)
    await world.mark()

    with pytest.raises(OwnershipLostError):
        await world.create("create-2", epoch=EPOCH - 1)
    assert await world.changes() == {}


# --- adopt
async def test_an_adoption_sets_the_epoch_raises_the_fence_and_returns_the_state(world: World) -> None:
    await world.create()
    before = await world.stored()
    await world.mark()

    state = await world.scripts.adopt(world.session_id, EPOCH + 1)

    assert state == await world.stored()
    assert state is not None
    assert (state.epoch, state.life) == (EPOCH + 1, before.life)
    assert state.fence > before.fence
    assert await world.changes() == {"state": {"epoch": str(EPOCH + 1), "fence": str(state.fence)}}


async def test_the_fence_grows_by_one_where_it_is_ahead_of_the_clock(world: World) -> None:
    await world.create()
    await world.client.hset(world.k.state, "fence", 2**52)

    state = await world.scripts.adopt(world.session_id, EPOCH)

    assert state is not None
    assert state.fence == 2**52 + 1


async def test_a_session_that_does_not_exist_is_not_adopted(world: World) -> None:
    assert await world.scripts.adopt(world.session_id, EPOCH) is None
    assert await world.changes() == {}


async def test_a_zombie_adopts_nothing(world: World) -> None:
    await world.create()
    await world.mark()

    with pytest.raises(OwnershipLostError, match=f"epoch {EPOCH}"):
        await world.scripts.adopt(world.session_id, EPOCH - 1)
    assert await world.changes() == {}


# --- fail
async def test_a_failed_tick_leaves_index_and_events_and_puts_a_release_in_flight(world: World) -> None:
    await world.create(pace_ms=5)
    await world.accept(3)
    await world.begin([3], "next-1")
    fence = (await world.stored()).fence
    await world.mark()

    assert await world.fail(command_id="next-1") is Outcome.FAILED

    changed = await world.changes()
    record = InFlight.from_json(changed["state"].pop("inflight"))
    assert (record.kind, record.fence, record.command_id) == (Kind.RELEASE, fence + 1, None)
    changed["state"].pop("updated_at_ms", None)
    assert changed == {
        "state": {
            "status": "FAILED",
            "failure_code": "model_error",
            "failure_message": "boom",
            "pace_ms": None,
            "fence": str(fence + 1),
        },
        "requests": [ANY],
        "answers": [{"answer": world.refused("next-1")}],
        "answered": {"next-1": world.refused("next-1")},
        "history": [
            {
                "trigger": "tick_failed",
                "from": "ACTIVE",
                "to": "FAILED",
                "by": "host-1",
                "reason": "model_error: boom",
                "at_ms": ANY,
            }
        ],
    }
    ((_, _), (_, sent)) = await world.client.xrange(world.requests)
    request = WorkerRequest.from_entry(sent)
    assert (request.kind, request.request_id, request.expires_at_ms) == (
        Kind.RELEASE,
        record.request_id,
        None,
    )


async def test_a_failure_without_a_release_leaves_nothing_in_flight(world: World) -> None:
    await world.create()
    await world.begin([])
    fence = (await world.stored()).fence
    await world.mark()

    assert await world.fail(Trigger.WORKER_LOST, code="worker_lost", release=False) is Outcome.FAILED

    changed = await world.changes()
    assert changed.keys() == {"state", "history"}
    assert changed["state"]["inflight"] is None
    assert (await world.stored()).fence == fence


@pytest.mark.parametrize("status", [status for status in Status if status is not Status.ACTIVE])
async def test_only_what_is_allowed_fails(status: Status, world: World) -> None:
    await world.bring_to(status)
    await world.mark()

    assert await world.fail() is Outcome.STATUS
    assert await world.changes() == {}


async def test_a_status_is_compared_whole(world: World) -> None:
    await world.bring_to(Status.CLEANUP_FAILED)

    assert await world.fail(allowed=[Status.FAILED]) is Outcome.STATUS


@pytest.mark.parametrize("other", ["request", "life"])
async def test_a_failure_of_what_is_not_in_flight_is_stale(other: str, world: World) -> None:
    await world.create()
    await world.begin([])
    state = await world.state()
    assert state.inflight is not None
    mirror = {
        "request": replace(state, inflight=replace(state.inflight, request_id="ar-x")),
        "life": replace(state, life="ar-other"),
    }[other]
    world.state = _always(mirror)  # type: ignore[method-assign]
    await world.mark()

    assert await world.fail() is Outcome.STALE
    assert await world.changes() == {}


async def test_an_eviction_replaces_a_running_tick(world: World) -> None:
    await world.create()
    await world.begin([], "next-1")

    assert await world.fail(Trigger.EVICTED, code="evicted", command_id="next-1") is Outcome.FAILED

    assert (await world.in_flight()).kind is Kind.RELEASE
    assert len(await world.answers()) == 2


async def test_a_failure_repeats_the_answer_of_a_command_that_has_one(world: World) -> None:
    await world.create()
    await world.begin([], "next-1")
    await world.scripts.answer(world.session_id, EPOCH, "next-1", world.ok("next-1", first=True))

    assert await world.fail(command_id="next-1") is Outcome.FAILED

    assert (await world.answers())[-1] == json.loads(world.ok("next-1", first=True))
    assert len(await world.answers()) == 2


async def test_a_release_in_flight_is_not_failed_twice(world: World) -> None:
    await world.create()
    await world.fail()
    await world.mark()

    assert await world.fail(allowed=[Status.ACTIVE]) is Outcome.STATUS
    assert await world.changes() == {}


# --- reset
@pytest.mark.parametrize("status", sorted(LIVE))
async def test_a_reset_is_in_flight_and_sent_and_changes_no_status(status: Status, world: World) -> None:
    await world.bring_to(status)
    fence = (await world.stored()).fence
    await world.mark()

    assert await world.begin_reset() is Outcome.BEGUN

    changed = await world.changes()
    record = InFlight.from_json(changed["state"]["inflight"])
    assert (record.kind, record.life, record.fence) == (Kind.RESET, record.request_id, fence + 1)
    assert changed.keys() == {"state", "requests"}
    assert changed["state"].keys() <= {"inflight", "fence", "updated_at_ms"}
    assert changed["requests"][-1].items() >= {"kind": "reset", "life": record.request_id}.items()
    assert "expires_at_ms" not in changed["requests"][-1]


async def test_a_reset_takes_the_place_of_a_release_after_a_failure(world: World) -> None:
    await world.create()
    await world.fail()

    assert await world.begin_reset() is Outcome.BEGUN
    assert (await world.in_flight()).kind is Kind.RESET


@pytest.mark.parametrize("status", NOT_LIVE)
async def test_no_reset_begins_outside_active_and_failed(status: Status, world: World) -> None:
    await world.bring_to(status)
    await world.mark()

    assert await world.begin_reset() is Outcome.STATUS
    assert await world.changes() == {}


async def test_a_reset_found_again_is_answered_again(world: World) -> None:
    await world.create()
    await world.begin_reset()
    await world.finish_reset()
    await world.mark()

    assert await world.begin_reset() is Outcome.ANSWERED
    assert await world.changes() == {"answers": [ANY, -1]}


async def test_a_finished_reset_begins_a_new_life_at_chunk_0(world: World) -> None:
    await world.create(pace_ms=5)
    await world.accept(1)
    await world.begin([1], prompt="p", controls=CONTROLS, reducer_state="1")
    await world.commit()
    await world.fail()
    await world.begin_reset()
    record = await world.in_flight()
    await world.mark()

    assert await world.finish_reset() is Outcome.RESET

    changed = await world.changes()
    changed["state"].pop("updated_at_ms", None)
    assert changed == {
        "state": {
            "status": "ACTIVE",
            "life": record.request_id,
            "chunk_index": "0",
            "controls": "[]",
            "prompt": None,
            "reducer_state": None,
            "last_request_id": None,
            "worker_incarnation": "inc-2",
            "failure_code": None,
            "failure_message": None,
            "inflight": None,
        },
        "history": [
            {
                "trigger": "reset_succeeded",
                "from": "FAILED",
                "to": "ACTIVE",
                "by": "host-1",
                "reason": "",
                "at_ms": ANY,
            }
        ],
        "answers": [{"answer": ANY}],
        "answered": {"reset-1": ANY},
    }
    result = {"life": record.request_id, "chunk_index": 0, "event_floor": 1}
    assert (await world.answers())[-1] == {"command_id": "reset-1", "ok": True, "result": result}
    assert await world.ids() == [1], "what was applied stays known"


async def test_a_reset_drops_the_queue_reports_it_and_raises_the_floor_above_it(world: World) -> None:
    await world.create()
    await world.accept(3)
    await world.bare(7)
    await world.bare("x" * 100)
    await world.begin_reset()
    await world.mark()

    await world.finish_reset()

    changed = await world.changes()
    assert changed["events"] == [-1, -1, -1]
    assert changed["ids"] is None
    assert [(e["event_id"], e["reason"], e["message"]) for e in changed["rejected"]] == [
        ("3", "reset", "dropped by reset"),
        ("7", "reset", "dropped by reset"),
        ("x" * 80, "reset", "dropped by reset"),
    ]
    assert changed["state"]["rejected_total"] == '{"reset":3}'
    assert changed["state"]["event_floor"] == "7"
    for event_id in (3, 7):
        with pytest.raises(ValueError, match="event floor is 7"):
            await world.accept(event_id)
    assert await world.accept(8) == "ACCEPTED"


async def test_a_failed_tick_then_a_reset_then_the_next_event_is_chunk_0_with_that_event(
    world: World,
) -> None:
    await world.create()
    await world.accept(3)
    await world.begin([3])
    await world.fail()
    await world.begin_reset()
    await world.finish_reset()
    await world.accept(4)

    await world.begin([4])
    await world.commit()

    ((_, chunk),) = await world.client.xrange(world.k.chunks)
    assert (chunk[b"chunk_index"], chunk[b"applied_event_ids"]) == (b"0", b"[4]")


async def test_a_floor_is_never_lowered_by_a_reset(world: World) -> None:
    await world.create()
    await world.chunks([9])
    await world.bare(4)
    await world.begin_reset()

    await world.finish_reset()

    assert (await world.stored()).event_floor == 9


async def test_a_long_queue_is_dropped_whole(world: World) -> None:
    await world.create()
    pipe = world.client.pipeline()
    for number in range(700):
        pipe.xadd(world.k.events, {"event_id": number, "prompt": "p"})
    await pipe.execute()
    await world.begin_reset()

    await world.finish_reset()

    assert await world.client.xlen(world.k.events) == 0
    assert await world.client.xlen(world.k.rejected) == 700
    state = await world.stored()
    assert (state.event_floor, state.rejected_total) == (699, {"reset": 700})


async def test_the_same_finish_again_is_dup(world: World) -> None:
    await world.create()
    await world.begin_reset()
    state, record = await world.state(), await world.in_flight()
    await world.finish_reset()
    await world.mark()

    assert await world.scripts.finish_reset(state, record.request_id, "inc-2", "{") is Outcome.DUP
    assert await world.changes() == {}


@pytest.mark.parametrize("in_flight", ["nothing", "a tick", "another reset"])
async def test_a_finish_of_another_reset_is_stale(in_flight: str, world: World) -> None:
    await world.create()
    if in_flight == "a tick":
        await world.begin([])
    if in_flight == "another reset":
        await world.begin_reset()
    state = await world.state()
    await world.mark()

    assert await world.scripts.finish_reset(state, "ar-world-1-reset-x", "inc-2", "{") is Outcome.STALE
    assert await world.changes() == {}


async def test_a_tick_in_flight_is_not_finished_as_a_reset(world: World) -> None:
    await world.create()
    await world.begin([])
    await world.mark()

    assert await world.finish_reset() is Outcome.STALE
    assert await world.changes() == {}


async def test_a_failed_reset_makes_the_session_failed(world: World) -> None:
    await world.create()
    await world.begin_reset()

    assert await world.fail(Trigger.RESET_FAILED, code="reset_failed", allowed=sorted(LIVE)) is Outcome.FAILED

    state = await world.stored()
    assert (state.status, state.failure_code) == (Status.FAILED, "reset_failed")
    assert await world.begin_reset("reset-2") is Outcome.BEGUN


# --- end_inflight
async def test_an_expired_tick_ends_without_a_change_of_state_and_its_events_stay(world: World) -> None:
    await world.create()
    await world.accept(3)
    await world.begin([3], "next-1")
    state, record = await world.state(), await world.in_flight()
    await world.mark()

    assert (
        await world.scripts.end_inflight(state, record.request_id, world.refused("next-1")) is Outcome.ENDED
    )

    changed = await world.changes()
    changed["state"].pop("updated_at_ms", None)
    assert changed == {
        "state": {"inflight": None},
        "answers": [{"answer": world.refused("next-1")}],
        "answered": {"next-1": world.refused("next-1")},
    }
    assert (await world.begin([3]))[0] is Outcome.BEGUN


async def test_a_release_after_a_failure_ends_without_an_answer(world: World) -> None:
    await world.create()
    await world.fail()
    state, record = await world.state(), await world.in_flight()
    await world.mark()

    assert await world.scripts.end_inflight(state, record.request_id) is Outcome.ENDED
    assert (await world.changes()).keys() == {"state"}


async def test_only_what_is_in_flight_ends(world: World) -> None:
    await world.create()
    state = await world.state()
    assert await world.scripts.end_inflight(state, "ar-x") is Outcome.STALE
    await world.begin([])
    await world.mark()

    assert await world.scripts.end_inflight(state, "ar-x", world.refused("next-1")) is Outcome.STALE
    assert await world.changes() == {}


# --- resend
@pytest.mark.parametrize("kind", list(Kind))
async def test_what_is_in_flight_is_sent_again_under_a_higher_fence(kind: Kind, world: World) -> None:
    await _in_flight(world, kind)
    old = await world.in_flight()
    fence = (await world.stored()).fence
    await world.mark()

    assert await world.resend() is Outcome.SENT

    changed = await world.changes()
    assert changed.keys() == {"state", "requests"}
    assert changed["state"] == {"inflight": replace(old, fence=fence + 1).to_json(), "fence": str(fence + 1)}
    (sent,) = changed["requests"]
    assert (sent["request_id"], sent["fence"]) == (old.request_id, str(fence + 1))
    assert ("expires_at_ms" in sent) is (kind is Kind.TICK)


@pytest.mark.parametrize("kind", list(Kind))
async def test_on_a_cluster_it_is_sent_after_the_script(
    kind: Kind, broker_client: redis.asyncio.Redis
) -> None:
    world = World(broker_client, cluster=True)
    await _in_flight(world, kind)
    before = await world.client.xlen(world.requests)

    assert await world.resend() is Outcome.SENT

    entries = await world.client.xrange(world.requests)
    assert len(entries) == before + 1
    assert (b"expires_at_ms" in entries[-1][1]) is (kind is Kind.TICK)


async def test_what_is_not_in_flight_is_not_sent(world: World) -> None:
    await world.create()
    state = await world.state()
    record = world.record(state, Kind.RELEASE, None)
    await world.mark()

    assert await world.scripts.resend(state, record, world.request(state, record), WORKER) is Outcome.STALE
    await world.begin([])
    await world.mark()
    assert await world.scripts.resend(state, record, world.request(state, record), WORKER) is Outcome.STALE
    assert await world.changes() == {}


async def test_a_fence_that_is_not_higher_sends_nothing(world: World) -> None:
    await world.create()
    await world.begin([])
    state = await world.state()
    assert state.inflight is not None
    await world.scripts.adopt(world.session_id, EPOCH)
    await world.mark()

    record = replace(state.inflight, fence=state.fence + 1)
    assert await world.scripts.resend(state, record, world.request(state, record), WORKER) is Outcome.STALE
    assert await world.changes() == {}


# --- place, set_pace, answer
async def test_a_placement_forgets_the_start_of_the_worker_that_ran_it(world: World) -> None:
    await world.create(worker_incarnation="inc-1")
    await world.mark()

    await world.scripts.place(await world.state(), "gpu-1")

    assert await world.changes() == {"state": {"worker": "gpu-1", "worker_incarnation": None}}


async def test_a_pace_is_set_taken_away_and_answered(world: World) -> None:
    await world.create()
    await world.mark()
    assert await world.scripts.set_pace(await world.state(), "run-1", 0, "{}") is Outcome.DONE
    changed = await world.changes()
    assert changed["state"]["pace_ms"] == "0"
    assert changed.keys() == {"state", "answers", "answered"}

    assert await world.scripts.set_pace(await world.state(), "pause-1", None, "{}") is Outcome.DONE
    assert (await world.stored()).pace_ms is None


async def test_a_pace_command_found_again_is_answered_again_and_sets_nothing(world: World) -> None:
    await world.create()
    state = await world.state()
    await world.scripts.set_pace(state, "run-1", 40, world.ok("run-1"))
    await world.scripts.set_pace(state, "pause-1", None, world.ok("pause-1"))

    assert await world.scripts.set_pace(state, "run-1", 40, world.ok("run-1")) is Outcome.ANSWERED
    assert (await world.stored()).pace_ms is None


@pytest.mark.parametrize("status", [status for status in Status if status is not Status.ACTIVE])
async def test_only_an_active_session_runs_or_pauses(status: Status, world: World) -> None:
    await world.bring_to(status)
    await world.mark()

    assert await world.scripts.set_pace(await world.state(), "run-1", 40, "{}") is Outcome.STATUS
    assert await world.changes() == {}


async def test_free_running_is_counted_once_a_claim_and_anew_for_each_chunk_of_each_life(
    world: World,
) -> None:
    await world.create()
    state = await world.state()
    key = world.keys.session("world-1").state

    async def counted(epoch: int) -> int:
        await world.client.hset(key, "epoch", epoch)
        return await world.scripts.free_attempt(state.changed(epoch=epoch))

    await world.mark()
    assert [await counted(EPOCH + n) for n in (0, 0, 1, 1, 2)] == [1, 1, 2, 2, 3]
    assert (await world.changes()).keys() == {"state"}
    await world.client.hset(key, "chunk_index", 1)
    assert [await counted(EPOCH + n) for n in (2, 3)] == [1, 2]
    await world.client.hset(key, "life", "another")
    assert await counted(EPOCH + 4) == 1
    with pytest.raises(OwnershipLostError):
        await world.scripts.free_attempt(state)


async def test_a_tick_that_was_begun_and_expired_ends_the_count_of_free_running(world: World) -> None:
    await world.create()
    assert await world.scripts.free_attempt(await world.state()) == 1
    await world.begin([])
    assert await world.client.hexists(world.keys.session("world-1").state, "free_attempts")

    await world.scripts.end_inflight(await world.state(), (await world.in_flight()).request_id)

    assert not await world.client.hexists(world.keys.session("world-1").state, "free_attempts")


async def test_an_answer_about_no_session_expires(world: World) -> None:
    assert await world.scripts.answer("world-1", EPOCH, "next-1", world.refused("next-1")) is Outcome.DONE

    assert await world.changes() == {
        "answers": [{"answer": world.refused("next-1")}],
        "answers.expires": True,
        "answered": {"next-1": world.refused("next-1")},
        "answered.expires": True,
    }


async def test_an_answer_about_a_session_stays(world: World) -> None:
    await world.create()
    await world.mark()

    assert (
        await world.scripts.answer(world.session_id, EPOCH, "next-1", world.refused("next-1")) is Outcome.DONE
    )
    assert (await world.changes()).keys() == {"answers", "answered"}


async def test_a_creation_keeps_what_was_answered_about_the_missing_session(world: World) -> None:
    await world.scripts.answer("world-1", EPOCH, "next-1", world.refused("next-1"))

    await world.create()

    for key in (world.k.answers, world.k.answered):
        assert await world.client.pttl(key) == -1
    assert len(await world.answers()) == 2


async def test_the_first_answer_of_a_command_holds(world: World) -> None:
    await world.create()
    await world.scripts.answer(world.session_id, EPOCH, "x", world.ok("x", n=1))

    assert await world.scripts.answer(world.session_id, EPOCH, "x", world.ok("x", n=2)) is Outcome.ANSWERED

    assert [answer["result"] for answer in await world.answers()][1:] == [{"n": 1}]


async def test_answers_and_answered_are_trimmed_together(broker_client: redis.asyncio.Redis) -> None:
    world = World(broker_client, limits=Limits(answers=3))
    await world.create()
    for number in range(6):
        await world.scripts.answer(world.session_id, EPOCH, f"c-{number}", world.ok(f"c-{number}"))
        if number == 4:  # repeated, and so the newest: it outlives what came after its first time
            await world.scripts.answer(world.session_id, EPOCH, "c-3", world.ok("c-3"))

    kept = [answer["command_id"] for answer in await world.answers()]
    assert kept == ["c-4", "c-3", "c-5"]
    assert (await world.answered()).keys() == set(kept)
    assert await world.scripts.answer(world.session_id, EPOCH, "c-3", "{}") is Outcome.ANSWERED
    assert await world.scripts.answer(world.session_id, EPOCH, "c-0", world.ok("c-0")) is Outcome.DONE


async def test_an_answer_repeated_without_end_does_not_fill_the_broker(world: World) -> None:
    await world.create()
    for _ in range(20):
        await world.scripts.answer(world.session_id, EPOCH, "x", world.ok("x"))

    assert [answer["command_id"] for answer in await world.answers()] == ["create-1", "x"]


@pytest.mark.parametrize("foreign", ["nonsense", "[]", "1", '{"command_id":7}', "{}"])
async def test_a_foreign_entry_among_the_answers_is_trimmed_like_any_other(
    foreign: str, broker_client: redis.asyncio.Redis
) -> None:
    world = World(broker_client, limits=Limits(answers=1))
    await world.client.xadd(world.k.answers, {"answer": foreign})

    assert await world.create() is Outcome.CREATED
    assert [answer["command_id"] for answer in await world.answers()] == ["create-1"]


async def _in_flight(world: World, kind: Kind) -> None:
    await world.create()
    match kind:
        case Kind.TICK:
            await world.begin([])
        case Kind.RESET:
            await world.begin_reset()
        case Kind.RELEASE:
            await world.begin_close()


def _always(value):
    async def answer():
        return value

    return answer
