"""`accept_event` and `reject_events`: each outcome, and exactly what it writes."""

import json
from unittest.mock import ANY

import pytest
import redis.asyncio

from contracts.errors import (
    EventQueueFullError,
    EventStaleError,
    InvalidTypeError,
    SessionNotFoundError,
    SessionStateError,
)
from contracts.events import ARDiffusionControlInput, ARDiffusionSessionEvent
from contracts.identity import MAX_INTEGER
from contracts.lifecycle import Status
from contracts.session_scripts import Limits, Outcome, Rejection
from support.script_world import World


# --- accept_event
async def test_an_accepted_event_is_one_entry_and_one_remembered_id(world: World) -> None:
    await world.create()
    await world.mark()

    receipt = await world.producer.accept_event(world.session_id, ARDiffusionSessionEvent(0, "turn left"))

    assert (receipt.status, receipt.pending_event_count) == ("ACCEPTED", 1)
    assert await world.changes() == {"events": [{"event_id": "0", "prompt": "turn left"}], "ids": {"0": 1.0}}


async def test_controls_reach_the_stream_as_they_were_sent(world: World) -> None:
    await world.create()
    control = ARDiffusionControlInput("camera", "v1", {"x": [], "y": {}, "z": 1.5, "t": "é\0"})
    await world.mark()

    await world.producer.accept_event(world.session_id, ARDiffusionSessionEvent(1, None, (control,)))

    ((entry, *_), ids) = (await world.changes()).values()
    assert json.loads(entry["controls"]) == [control.to_dict()]
    assert ids == {"1": 1.0}


async def test_the_largest_id_is_kept_exactly(world: World) -> None:
    await world.create()

    assert await world.accept(MAX_INTEGER - 1) == "ACCEPTED"
    assert await world.accept(MAX_INTEGER) == "ACCEPTED"

    assert await world.ids() == [MAX_INTEGER - 1, MAX_INTEGER]
    assert (await world.begin([MAX_INTEGER - 1, MAX_INTEGER]))[0] is Outcome.BEGUN
    await world.commit()
    assert (await world.stored()).event_floor == MAX_INTEGER


async def test_a_pending_event_sent_again_is_a_duplicate(world: World) -> None:
    await world.create()
    await world.accept(5)
    await world.mark()

    receipt = await world.producer.accept_event(world.session_id, ARDiffusionSessionEvent(5, "other"))

    assert (receipt.status, receipt.pending_event_count) == ("DUPLICATE", 1)
    assert await world.changes() == {}


async def test_an_applied_event_that_is_still_remembered_is_a_duplicate(world: World) -> None:
    await world.create()
    await world.chunks([5])
    await world.mark()

    assert await world.accept(5) == "DUPLICATE"
    assert await world.changes() == {}


async def test_a_bare_entry_that_nobody_has_read_yet_makes_its_id_a_duplicate(world: World) -> None:
    await world.create()
    await world.bare(5, prompt="first")
    await world.mark()

    assert await world.accept(5) == "DUPLICATE"
    assert await world.changes() == {}


async def test_a_bare_entry_below_the_floor_takes_no_id(world: World) -> None:
    await world.create()
    await world.chunks([9])
    await world.bare(5)
    await world.mark()

    with pytest.raises(EventStaleError, match="event floor is 9"):
        await world.accept(5)
    assert await world.changes() == {}


async def test_of_an_id_written_twice_in_one_entry_the_last_counts(world: World) -> None:
    await world.create()
    await world.client.execute_command(
        "XADD", world.k.events, "*", "event_id", "1", "event_id", "2", "prompt", "p"
    )

    assert await world.accept(2) == "DUPLICATE"
    assert await world.accept(1) == "ACCEPTED"


async def test_an_id_at_the_floor_that_is_forgotten_is_stale(world: World) -> None:
    await world.create(max_pending_events=1)
    await world.chunks([5], [6])
    await world.mark()

    with pytest.raises(EventStaleError, match="event floor is 6"):
        await world.accept(5)
    assert await world.changes() == {}


async def test_the_floor_of_a_running_tick_counts(world: World) -> None:
    await world.create()
    await world.accept(10)
    await world.begin([10])
    await world.mark()

    with pytest.raises(EventStaleError, match="event floor is 10"):
        await world.accept(9)
    assert await world.changes() == {}
    assert await world.accept(11) == "ACCEPTED"


async def test_a_running_tick_without_events_raises_no_floor(world: World) -> None:
    await world.create()
    await world.begin([])

    assert await world.accept(0) == "ACCEPTED"


async def test_a_running_reset_or_release_raises_no_floor(world: World) -> None:
    await world.create()
    await world.begin_reset()

    assert await world.accept(0) == "ACCEPTED"


async def test_a_full_queue_refuses_and_says_its_length(world: World) -> None:
    await world.create(max_pending_events=2)
    await world.accept(1)
    await world.bare(2)
    await world.mark()

    with pytest.raises(EventQueueFullError, match=r"queue is full \(2 pending\)") as caught:
        await world.accept(3)
    assert caught.value.retryable
    assert await world.changes() == {}


async def test_a_duplicate_wins_over_a_full_queue_and_staleness_does_too(world: World) -> None:
    await world.create(max_pending_events=2)
    await world.chunks([3], [4], [5])
    await world.accept(6)
    await world.bare(7)

    assert await world.accept(6) == "DUPLICATE"
    assert await world.accept(7) == "DUPLICATE"
    with pytest.raises(EventStaleError):
        await world.accept(3)


async def test_the_state_is_asked_before_anything_else(world: World) -> None:
    await world.create()
    await world.accept(1)
    await world.fail(release=False)
    await world.mark()

    with pytest.raises(SessionStateError, match="failed") as caught:
        await world.accept(1)
    assert caught.value.field == "status"
    assert await world.changes() == {}


@pytest.mark.parametrize("status", [status for status in Status if status is not Status.ACTIVE])
async def test_outside_active_an_event_is_refused_naming_the_state(status: Status, world: World) -> None:
    await world.bring_to(status)
    await world.mark()

    with pytest.raises(SessionStateError, match=status.lower()):
        await world.accept(1)
    assert await world.changes() == {}


async def test_without_a_session_neither_way_makes_a_key(world: World) -> None:
    with pytest.raises(SessionNotFoundError, match="does not exist"):
        await world.accept(1)
    assert await world.bare(1) == ""

    assert await world.changes() == {}


async def test_an_accepted_event_is_in_the_stream_even_if_the_stream_was_deleted(world: World) -> None:
    await world.create()
    await world.client.delete(world.k.events)

    assert await world.accept(1) == "ACCEPTED"
    assert await world.entries() == {1: ANY}


async def test_what_is_no_event_is_refused_before_the_broker_is_asked(world: World) -> None:
    with pytest.raises(InvalidTypeError):
        await world.producer.accept_event(world.session_id, {"event_id": 1})  # type: ignore[arg-type]
    assert world.calls == []


# --- reject_events
async def test_a_rejected_entry_moves_to_rejected_and_is_counted(world: World) -> None:
    await world.create()
    entry = await world.bare("07")
    await world.mark()

    count = await world.scripts.reject_events(
        await world.state(), [Rejection(entry, "07", "invalid", "why", False)]
    )

    assert count == 1
    assert await world.changes() == {
        "events": [-1],
        "rejected": [{"entry_id": entry, "event_id": "07", "reason": "invalid", "message": "why"}],
        "state": {"rejected_total": '{"invalid":1}'},
    }


async def test_totals_add_up_by_reason(world: World) -> None:
    await world.create()
    entries = [await world.bare(number) for number in range(5)]
    reasons = ["invalid", "stale", "invalid", "duplicate", "invalid"]
    rejections = [
        Rejection(e, str(n), r, "", False) for n, (e, r) in enumerate(zip(entries, reasons, strict=True))
    ]

    assert await world.scripts.reject_events(await world.state(), rejections[:2]) == 2
    assert await world.scripts.reject_events(await world.state(), rejections) == 3

    assert (await world.stored()).rejected_total == {"invalid": 3, "stale": 1, "duplicate": 1}
    assert await world.client.xlen(world.k.rejected) == 5


@pytest.mark.parametrize("forget", [True, False])
async def test_a_rejection_frees_the_id_where_it_says_so(forget: bool, world: World) -> None:
    await world.create()
    await world.accept(3)
    entry = (await world.entries())[3]

    await world.scripts.reject_events(
        await world.state(), [Rejection(entry, "3", "invalid_control", "", forget)]
    )

    assert await world.ids() == ([] if forget else [3])
    assert await world.accept(3) == ("ACCEPTED" if forget else "DUPLICATE")


async def test_an_entry_that_is_gone_was_reported_before_and_keeps_the_id_of_its_successor(
    world: World,
) -> None:
    await world.create()
    await world.accept(3)
    rejection = Rejection((await world.entries())[3], "3", "invalid_control", "", True)
    await world.scripts.reject_events(await world.state(), [rejection])
    await world.accept(3)
    await world.mark()

    assert await world.scripts.reject_events(await world.state(), [rejection]) == 0
    assert await world.changes() == {}


async def test_the_rejected_stream_is_capped_and_the_totals_are_not(
    broker_client: redis.asyncio.Redis,
) -> None:
    world = World(broker_client, limits=Limits(rejected=2))
    await world.create()
    for number in range(4):
        entry = await world.bare(number)
        await world.scripts.reject_events(
            await world.state(), [Rejection(entry, str(number), "stale", "", False)]
        )

    kept = [fields[b"event_id"] for _, fields in await world.client.xrange(world.k.rejected)]
    assert kept == [b"2", b"3"]
    assert (await world.stored()).rejected_total == {"stale": 4}


async def test_what_is_swept_after_the_close_expires_with_the_session(world: World) -> None:
    await world.bring_to(Status.CLOSED)
    entry = await world.bare(1)
    await world.mark()

    await world.scripts.reject_events(await world.state(), [Rejection(entry, "1", "not_active", "", True)])

    assert (await world.changes())["rejected.expires"] is True


async def test_totals_that_cannot_be_read_stop_the_script_before_it_writes(world: World) -> None:
    await world.create()
    entry = await world.bare(1)
    state = await world.state()
    await world.client.hset(world.k.state, "rejected_total", "{")
    await world.mark()

    with pytest.raises(
        ValueError
    ):  # the broker says CorruptDataError, the one in memory what its JSON reader says
        await world.scripts.reject_events(state, [Rejection(entry, "1", "stale", "", False)])
    assert await world.changes() == {}
