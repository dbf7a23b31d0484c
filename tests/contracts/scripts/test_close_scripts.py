"""`begin_close`, `finish_close` and `fail_close`: each outcome, and exactly what it writes."""

from unittest.mock import ANY

import pytest
import redis.asyncio

from contracts.lifecycle import Status
from contracts.messages import InFlight, Kind, WorkerRequest
from contracts.session_scripts import Limits, Outcome
from support.script_world import World

OPEN = [Status.ACTIVE, Status.FAILED, Status.CLEANUP_FAILED]


# --- begin_close
@pytest.mark.parametrize("status", OPEN)
async def test_a_close_puts_a_release_in_flight_and_sends_it(status: Status, world: World) -> None:
    await world.bring_to(status)
    before = await world.stored()
    await world.mark()

    assert await world.begin_close("close-2") is Outcome.BEGUN

    changed = await world.changes()
    assert changed.keys() == {"state", "history", "requests"}
    record = InFlight.from_json(changed["state"].pop("inflight"))
    assert (record.kind, record.life, record.command_id) == (Kind.RELEASE, before.life, "close-2")
    changed["state"].pop("updated_at_ms", None)
    assert changed["state"] == {"status": "CLOSING", "fence": str(before.fence + 1)}
    assert changed["history"] == [
        {
            "trigger": "close_requested",
            "from": str(status),
            "to": "CLOSING",
            "by": "host-1",
            "reason": "asked",
            "at_ms": ANY,
        }
    ]
    sent = (await world.client.xrange(world.requests))[-1][1]
    request = WorkerRequest.from_entry(sent)
    assert (request.kind, request.request_id, request.life) == (Kind.RELEASE, record.request_id, before.life)
    assert request.expires_at_ms is None


async def test_a_close_ends_free_running(world: World) -> None:
    await world.create(pace_ms=0)

    await world.begin_close()

    assert (await world.stored()).pace_ms is None


async def test_a_close_takes_the_place_of_a_release_after_a_failure(world: World) -> None:
    await world.create()
    await world.fail()

    assert await world.begin_close() is Outcome.BEGUN
    assert (await world.in_flight()).command_id == "close-1"


async def test_nothing_is_sent_to_a_worker_that_is_gone(world: World) -> None:
    await world.create()

    assert await world.begin_close(gone=True) is Outcome.BEGUN
    assert await world.client.exists(world.requests) == 0
    assert (await world.in_flight()).kind is Kind.RELEASE


@pytest.mark.parametrize("running", [Kind.TICK, Kind.RESET])
async def test_a_close_waits_for_what_is_in_flight(running: Kind, world: World) -> None:
    await world.create()
    await (world.begin([]) if running is Kind.TICK else world.begin_reset())
    await world.mark()

    assert await world.begin_close() is Outcome.BUSY
    assert await world.changes() == {}


@pytest.mark.parametrize("status", [Status.CLOSING, Status.CLOSED])
async def test_a_session_that_is_closing_or_closed_begins_no_second_close(
    status: Status, world: World
) -> None:
    await world.bring_to(status)
    await world.mark()

    assert await world.begin_close("close-2") is Outcome.STATUS
    assert await world.changes() == {}


async def test_a_close_that_was_answered_is_answered_again_and_closes_nothing(world: World) -> None:
    await world.bring_to(Status.CLEANUP_FAILED)
    await world.mark()

    assert await world.begin_close("close-1") is Outcome.ANSWERED
    assert await world.changes() == {"answers": [ANY, -1]}


# --- finish_close
async def test_a_finished_close_reports_the_queue_and_lets_every_key_expire(world: World) -> None:
    await world.create()
    await world.chunks([1])
    await world.accept(3)
    await world.bare("no id")
    await world.begin_close()
    await world.mark()

    assert await world.finish_close() is Outcome.CLOSED

    changed = await world.changes()
    changed["state"].pop("updated_at_ms", None)
    own = {"state", "events", "ids", "rejected", "answers", "answered", "history", "chunks", "ticks"}
    assert {name for name in changed if name.endswith(".expires")} == {f"{name}.expires" for name in own}
    assert {name: change for name, change in changed.items() if not name.endswith(".expires")} == {
        "state": {"status": "CLOSED", "inflight": None, "rejected_total": '{"closed":2}'},
        "events": [-1, -1],
        "ids": {"3": None},
        "rejected": [
            {"entry_id": ANY, "event_id": "3", "reason": "closed", "message": "dropped by closed"},
            {"entry_id": ANY, "event_id": "no id", "reason": "closed", "message": "dropped by closed"},
        ],
        "history": [
            {
                "trigger": "cleanup_succeeded",
                "from": "CLOSING",
                "to": "CLOSED",
                "by": "host-1",
                "reason": "",
                "at_ms": ANY,
            }
        ],
        "answers": [{"answer": world.ok("close-1", status="CLOSED")}],
        "answered": {"close-1": world.ok("close-1", status="CLOSED")},
    }


async def test_the_keys_live_for_the_retention_time(broker_client: redis.asyncio.Redis) -> None:
    world = World(broker_client, limits=Limits(closed_retention_ms=5_000))
    await world.bring_to(Status.CLOSED)

    for key in (world.k.state, world.k.events, world.k.answers, world.k.answered, world.k.history):
        assert 0 < await world.client.pttl(key) <= 5_000


async def test_a_close_without_a_command_answers_nobody(world: World) -> None:
    await world.create()
    await world.begin_close(None)
    await world.mark()

    await world.finish_close()

    changed = await world.changes()
    assert "answers" not in changed
    assert "answered" not in changed


async def test_a_tombstone_that_closes_at_last_forgets_its_error_and_keeps_the_count(world: World) -> None:
    await world.bring_to(Status.CLEANUP_FAILED)
    await world.begin_close("close-2")

    assert await world.finish_close() is Outcome.CLOSED

    state = await world.stored()
    assert (state.cleanup_error, state.close_attempts) == (None, 1)


@pytest.mark.parametrize("status", [status for status in Status if status is not Status.CLOSING])
async def test_closed_is_reached_through_closing_only(status: Status, world: World) -> None:
    await world.bring_to(status)
    if status in OPEN:
        await world.begin_close("close-2")
        request_id = (await world.in_flight()).request_id
        await world.client.hset(world.k.state, "status", str(status))
    else:
        request_id = "ar-x"
    state = await world.state()
    await world.mark()

    assert await world.scripts.finish_close(state, request_id, "{}") is Outcome.STALE
    outcome, attempts, now_ms = await world.scripts.fail_close(state, request_id, "no", "{}")
    assert (outcome, attempts, now_ms) == (Outcome.STALE, 0, 0)
    assert await world.changes() == {}


async def test_only_the_release_in_flight_finishes_the_close(world: World) -> None:
    await world.bring_to(Status.CLOSING)
    state = await world.state()
    await world.mark()

    assert await world.scripts.finish_close(state, "ar-x", "{}") is Outcome.STALE
    assert (await world.scripts.fail_close(state, "ar-x", "no", "{}"))[0] is Outcome.STALE
    assert await world.changes() == {}


async def test_the_release_after_a_failure_closes_nothing(world: World) -> None:
    await world.create()
    await world.fail()
    await world.mark()

    assert await world.finish_close() is Outcome.STALE
    assert await world.fail_close() is Outcome.STALE
    assert await world.changes() == {}


# --- fail_close
async def test_a_failed_close_leaves_a_tombstone_and_answers_with_the_error(world: World) -> None:
    await world.bring_to(Status.CLOSING)
    await world.mark()

    assert await world.fail_close() is Outcome.CLEANUP_FAILED

    changed = await world.changes()
    changed["state"].pop("updated_at_ms", None)
    assert changed == {
        "state": {
            "status": "CLEANUP_FAILED",
            "cleanup_error": "no release",
            "close_attempts": "1",
            "inflight": None,
        },
        "history": [
            {
                "trigger": "cleanup_failed",
                "from": "CLOSING",
                "to": "CLEANUP_FAILED",
                "by": "host-1",
                "reason": "no release",
                "at_ms": ANY,
            }
        ],
        "answers": [{"answer": world.refused("close-1")}],
        "answered": {"close-1": world.refused("close-1")},
    }


async def test_attempts_are_counted_over_all_closes(world: World) -> None:
    await world.create()
    for number in (1, 2, 3):
        await world.begin_close(f"close-{number}")
        state, record = await world.state(), await world.in_flight()
        outcome, attempts, now_ms = await world.scripts.fail_close(state, record.request_id, "no", "{}")
        assert (outcome, attempts) == (Outcome.CLEANUP_FAILED, number)
        assert now_ms == (await world.stored()).updated_at_ms


async def test_a_tombstone_keeps_its_queue_and_expires_never(world: World) -> None:
    await world.create()
    await world.accept(3)
    await world.begin_close()
    await world.fail_close()

    assert await world.entries() == {3: ANY}
    for key in await world.client.keys("*"):
        assert await world.client.pttl(key) == -1
