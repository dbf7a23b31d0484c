"""The machine alone: each trigger in each state, what an exception leaves, and that sessions share it without harm."""

import asyncio
import itertools

import pytest

from actors.fsm import Lifecycle, _Mover
from contracts.errors import SessionStateError
from contracts.lifecycle import TRANSITIONS, Status, Trigger

PAIRS = list(itertools.product(Status, Trigger))

LEGAL = {
    ("CLOSED", "created"): "ACTIVE",
    ("ACTIVE", "tick_failed"): "FAILED",
    ("ACTIVE", "worker_lost"): "FAILED",
    ("ACTIVE", "evicted"): "FAILED",
    ("ACTIVE", "reset_succeeded"): "ACTIVE",
    ("FAILED", "reset_succeeded"): "ACTIVE",
    ("ACTIVE", "reset_failed"): "FAILED",
    ("FAILED", "reset_failed"): "FAILED",
    ("ACTIVE", "close_requested"): "CLOSING",
    ("FAILED", "close_requested"): "CLOSING",
    ("CLEANUP_FAILED", "close_requested"): "CLOSING",
    ("CLOSING", "cleanup_succeeded"): "CLOSED",
    ("CLOSING", "cleanup_failed"): "CLEANUP_FAILED",
}
"""Written down once more, so that a slip in the table shows."""


class Script:
    """Stands for a script: says what it stored, and that it ran."""

    def __init__(self, stored: Status | None, error: Exception | None = None) -> None:
        self.stored, self.error, self.runs = stored, error, 0

    async def __call__(self) -> Status:
        self.runs += 1
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        assert self.stored is not None
        return self.stored


@pytest.fixture
def lifecycle() -> Lifecycle:
    return Lifecycle()


@pytest.mark.parametrize(("status", "trigger"), PAIRS)
async def test_a_trigger_leads_where_the_table_says_or_is_refused_before_its_script_runs(
    status: Status, trigger: Trigger, lifecycle: Lifecycle
) -> None:
    target = LEGAL.get((status, trigger))
    script = Script(Status(target) if target else None)

    if target is None:
        with pytest.raises(SessionStateError, match=status.lower()) as caught:
            await lifecycle.move(status, trigger, script)
        assert caught.value.field == "status"
        with pytest.raises(SessionStateError):
            lifecycle.check(status, trigger)
        assert script.runs == 0
    else:
        assert lifecycle.check(status, trigger) == target
        assert await lifecycle.move(status, trigger, script) == target
        assert script.runs == 1


@pytest.mark.parametrize(("status", "trigger"), sorted(LEGAL))
@pytest.mark.parametrize(
    "error", [ConnectionError("gone"), SessionStateError("no"), ValueError("x"), KeyError("status")]
)
async def test_what_the_script_raises_comes_out_unchanged_and_nothing_is_kept(
    status: str, trigger: str, error: Exception, lifecycle: Lifecycle
) -> None:
    with pytest.raises(type(error)) as caught:
        await lifecycle.move(Status(status), Trigger(trigger), Script(None, error))

    assert caught.value is error
    assert lifecycle._machine.models == []


@pytest.mark.parametrize(("status", "trigger", "stored"), [(s, t, x) for (s, t) in LEGAL for x in Status])
async def test_memory_moves_only_where_the_script_says_it_went(
    status: str, trigger: str, stored: Status, lifecycle: Lifecycle
) -> None:
    move = lifecycle.move(Status(status), Trigger(trigger), Script(stored))

    if stored == LEGAL[status, trigger]:
        assert await move is stored
    else:
        with pytest.raises(SessionStateError, match=f"stored {stored}"):
            await move
    assert lifecycle._machine.models == []


async def test_a_cancelled_move_leaves_nothing_in_the_machine(lifecycle: Lifecycle) -> None:
    async def never() -> Status:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    task = asyncio.create_task(lifecycle.move(Status.ACTIVE, Trigger.EVICTED, never))
    await asyncio.sleep(0)
    assert len(lifecycle._machine.models) == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert lifecycle._machine.models == []


def test_the_machine_has_the_five_states_and_only_triggers_of_the_table(lifecycle: Lifecycle) -> None:
    machine = lifecycle._machine

    assert set(machine.states) == set(Status)
    assert set(machine.events) == set(Trigger)
    edges = {
        (t.source, event.name, t.dest)
        for event in machine.events.values()
        for ts in event.transitions.values()
        for t in ts
    }
    assert edges == {(source, trigger, dest) for (source, trigger), dest in LEGAL.items()}


def test_there_is_no_way_around_the_table(lifecycle: Lifecycle) -> None:
    mover = _Mover(status="ACTIVE")
    lifecycle._machine.add_model(mover, initial="ACTIVE")

    assert [name for name in dir(mover) if name.startswith("to_")] == []
    assert [name for name in lifecycle._machine.events if name.startswith("to_")] == []
    for status in Status:
        with pytest.raises(AttributeError):
            getattr(mover, f"to_{status}")


def test_no_trigger_is_named_like_something_that_a_mover_has(lifecycle: Lifecycle) -> None:
    own = set(dir(_Mover(status="ACTIVE"))) | set(_Mover.__dataclass_fields__)
    added = set(Trigger) | {f"may_{trigger}" for trigger in Trigger} | {"trigger", "may_trigger"}

    assert own & added == set()


def test_a_trigger_of_a_mover_is_the_machine_s(lifecycle: Lifecycle) -> None:
    mover = _Mover(status="ACTIVE", stored=Status.FAILED, target=Status.FAILED)
    lifecycle._machine.add_model(mover, initial="ACTIVE")

    assert mover.evicted() is True  # type: ignore[attr-defined]
    assert mover.status == "FAILED"


async def test_two_sessions_move_at_once_each_to_its_own_end(lifecycle: Lifecycle) -> None:
    gates = {name: asyncio.Event() for name in ("first", "second", "third")}
    order: list[str] = []

    async def script(name: str, stored: Status) -> Status:
        await gates[name].wait()
        order.append(name)
        return stored

    first = asyncio.create_task(
        lifecycle.move(Status.ACTIVE, Trigger.CLOSE_REQUESTED, lambda: script("first", Status.CLOSING))
    )
    second = asyncio.create_task(
        lifecycle.move(Status.CLOSING, Trigger.CLEANUP_SUCCEEDED, lambda: script("second", Status.CLOSED))
    )
    third = asyncio.create_task(
        lifecycle.move(Status.CLOSING, Trigger.CLEANUP_FAILED, lambda: script("third", Status.CLOSED))
    )
    await asyncio.sleep(0)
    assert len(lifecycle._machine.models) == 3
    for name in ("third", "second", "first"):
        gates[name].set()
        await asyncio.sleep(0)

    assert await first is Status.CLOSING
    assert await second is Status.CLOSED
    with pytest.raises(SessionStateError):
        await third
    assert order == ["third", "second", "first"]
    assert lifecycle._machine.models == []


async def test_hundreds_of_sessions_move_at_once(lifecycle: Lifecycle) -> None:
    walk = [
        (Status.CLOSED, Trigger.CREATED),
        (Status.ACTIVE, Trigger.TICK_FAILED),
        (Status.FAILED, Trigger.RESET_SUCCEEDED),
        (Status.ACTIVE, Trigger.CLOSE_REQUESTED),
        (Status.CLOSING, Trigger.CLEANUP_FAILED),
        (Status.CLEANUP_FAILED, Trigger.CLOSE_REQUESTED),
        (Status.CLOSING, Trigger.CLEANUP_SUCCEEDED),
    ]

    async def live() -> list[Status]:
        return [await lifecycle.move(s, t, Script(Status(LEGAL[s, t]))) for s, t in walk]

    lives = await asyncio.gather(*(live() for _ in range(300)))

    assert all(life == [LEGAL[pair] for pair in walk] for life in lives)
    assert lifecycle._machine.models == []


async def test_a_move_inside_a_move_is_one_of_its_own(lifecycle: Lifecycle) -> None:
    async def outer() -> Status:
        assert await lifecycle.move(Status.CLOSED, Trigger.CREATED, Script(Status.ACTIVE)) is Status.ACTIVE
        return Status.FAILED

    assert await lifecycle.move(Status.ACTIVE, Trigger.EVICTED, outer) is Status.FAILED


def test_the_table_names_each_source_of_a_trigger_once() -> None:
    pairs = [(row.trigger, source) for row in TRANSITIONS for source in row.sources]

    assert len(pairs) == len(set(pairs)) == len(LEGAL)
