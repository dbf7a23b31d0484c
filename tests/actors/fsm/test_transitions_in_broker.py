"""Each trigger in each state, in memory and in the broker, with the scripts that a host runs."""

import itertools
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
import redis.asyncio

from actors.fsm import Lifecycle
from contracts.errors import CorruptDataError, OwnershipLostError, SessionStateError
from contracts.lifecycle import LIVE, Status, Trigger, destination
from contracts.messages import InFlight, Kind
from contracts.session_scripts import Outcome
from support.script_world import World

FAILURES = {
    Trigger.TICK_FAILED: "model_error",
    Trigger.WORKER_LOST: "worker_lost",
    Trigger.EVICTED: "evicted",
    Trigger.RESET_FAILED: "reset_failed",
}
PAIRS = list(itertools.product(Status, Trigger))
LEGAL = [(status, trigger) for status, trigger in PAIRS if destination(trigger, status)]
ILLEGAL = [pair for pair in PAIRS if pair not in LEGAL]


class Session:
    """A session as a host has it: a status in memory and one in the broker."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self.world = World(client)
        self.lifecycle = Lifecycle()
        self.status = Status.CLOSED

    async def bring_to(self, status: Status, trigger: Trigger) -> None:
        """To a state in which the script of `trigger` finds in flight what it ends, where there can be such a thing."""
        await self.world.bring_to(status)
        if trigger in (Trigger.RESET_SUCCEEDED, Trigger.RESET_FAILED) and status in LIVE:
            assert await self.world.begin_reset() is Outcome.BEGUN
        self.status = status
        await self.world.mark()

    def script(self, trigger: Trigger) -> tuple[Callable[[], Awaitable[Outcome]], Outcome]:
        """The script of a trigger, and the outcome with which it says that it wrote."""
        world = self.world
        match trigger:
            case Trigger.CREATED:
                return lambda: world.create("create-2"), Outcome.CREATED
            case Trigger.RESET_SUCCEEDED:
                return world.finish_reset, Outcome.RESET
            case Trigger.CLOSE_REQUESTED:
                return lambda: world.begin_close("close-2"), Outcome.BEGUN
            case Trigger.CLEANUP_SUCCEEDED:
                return world.finish_close, Outcome.CLOSED
            case Trigger.CLEANUP_FAILED:
                return world.fail_close, Outcome.CLEANUP_FAILED
            case _:
                allowed = sorted(LIVE) if trigger is Trigger.RESET_FAILED else [Status.ACTIVE]
                return lambda: world.fail(trigger, code=FAILURES[trigger], allowed=allowed), Outcome.FAILED

    async def fire(self, trigger: Trigger) -> None:
        """As a host does: the script first, then memory."""
        script, wrote = self.script(trigger)

        async def persist() -> Status:
            outcome = await script()
            if outcome is not wrote:
                raise Refused(outcome)
            return (await self.world.stored()).status

        self.status = await self.lifecycle.move(self.status, trigger, persist)


class Refused(Exception):
    """Raised where the script wrote nothing."""


@pytest.fixture
def session(broker_client: redis.asyncio.Redis) -> Session:
    return Session(broker_client)


@pytest.mark.parametrize(("status", "trigger"), LEGAL)
async def test_a_legal_trigger_moves_memory_and_broker_alike_and_is_in_the_history(
    status: Status, trigger: Trigger, session: Session
) -> None:
    await session.bring_to(status, trigger)

    await session.fire(trigger)

    assert session.status is (await session.world.stored()).status is destination(trigger, status)
    (entry,) = (await session.world.changes())["history"]
    assert (entry["trigger"], entry["from"], entry["to"]) == (trigger, status, session.status)


@pytest.mark.parametrize(("status", "trigger"), ILLEGAL)
async def test_an_illegal_trigger_leaves_memory_and_broker_as_they_were(
    status: Status, trigger: Trigger, session: Session
) -> None:
    await session.bring_to(status, trigger)
    ran = len(session.world.calls)

    with pytest.raises(SessionStateError, match=status.lower()):
        await session.fire(trigger)

    assert session.status is status
    assert await session.world.changes() == {}
    assert len(session.world.calls) == ran, "its script was not even run"


@pytest.mark.parametrize(("status", "trigger"), ILLEGAL)
async def test_the_script_of_an_illegal_trigger_refuses_by_itself(
    status: Status, trigger: Trigger, session: Session
) -> None:
    await session.bring_to(status, trigger)
    world = session.world
    if (
        await world.stored()
    ).inflight is None:  # the strongest case: what it would end is named as if in flight
        state = await world.state()
        kind = Kind.RESET if trigger is Trigger.RESET_SUCCEEDED else Kind.RELEASE
        record = world.record(state, kind, None)
        world.in_flight = _always(record)  # type: ignore[method-assign]
    script, wrote = session.script(trigger)

    assert await script() is not wrote
    assert await world.changes() == {}


@pytest.mark.parametrize(("status", "trigger"), LEGAL)
async def test_an_exception_in_the_script_leaves_memory_and_broker_as_they_were(
    status: Status, trigger: Trigger, session: Session
) -> None:
    await session.bring_to(status, trigger)
    world = session.world
    script, _ = session.script(trigger)
    await script()
    keys = [key for key in world.calls[-1].keys if key != world.k.state]
    for key in keys:
        await world.client.flushall()
        await session.bring_to(status, trigger)
        await world.client.delete(key)
        await world.client.set(key, "not ours")
        await world.mark()

        with pytest.raises(CorruptDataError):
            await session.fire(trigger)

        assert session.status is status
        assert await world.changes() == {}, f"after {key} stopped the script"


@pytest.mark.parametrize(("status", "trigger"), LEGAL)
async def test_a_script_that_lost_its_session_leaves_memory_and_broker_as_they_were(
    status: Status, trigger: Trigger, session: Session
) -> None:
    await session.bring_to(status, trigger)
    world = session.world
    await world.scripts.adopt(world.session_id, world.epoch + 1)
    await world.mark()

    with pytest.raises(OwnershipLostError):
        await session.fire(trigger)

    assert session.status is status
    assert await world.changes() == {}


async def test_a_session_that_never_was_is_created_like_a_closed_one(session: Session) -> None:
    await session.fire(Trigger.CREATED)

    assert session.status is (await session.world.stored()).status is Status.ACTIVE


@pytest.mark.parametrize("trigger", [trigger for trigger in Trigger if trigger is not Trigger.CREATED])
async def test_a_session_that_never_was_takes_no_other_trigger(trigger: Trigger, session: Session) -> None:
    with pytest.raises(SessionStateError):
        await session.fire(trigger)

    assert await session.world.changes() == {}


async def test_two_sessions_in_one_machine_and_one_broker_do_not_touch_each_other(session: Session) -> None:
    other = Session(session.world.client)
    other.world = World(session.world.client, session_id="world-2")
    other.lifecycle = session.lifecycle
    await session.bring_to(Status.CLOSING, Trigger.CLEANUP_SUCCEEDED)
    await other.bring_to(Status.CLOSING, Trigger.CLEANUP_FAILED)

    await session.fire(Trigger.CLEANUP_SUCCEEDED)
    await other.fire(Trigger.CLEANUP_FAILED)

    assert (await session.world.stored()).status is Status.CLOSED
    assert (await other.world.stored()).status is Status.CLEANUP_FAILED


def _always(record: InFlight) -> Callable[[], Awaitable[InFlight]]:
    async def answer() -> InFlight:
        return replace(record)

    return answer
