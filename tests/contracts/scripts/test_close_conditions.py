"""A close that was sent on suspicion: the script itself looks whether the suspicion holds."""

import pytest

from contracts.commands import Command, Condition, Op
from contracts.errors import CorruptDataError, InvalidArgumentError
from contracts.lifecycle import Status
from contracts.messages import Kind
from contracts.session_scripts import Outcome
from support.script_world import WORKER, World

LONG_AGO = "1000-0"


async def close(world: World, only_if: Condition) -> Outcome:
    state = await world.state()
    record = world.record(state, Kind.RELEASE, "close-1")
    request = world.request(state, record)
    return await world.scripts.begin_close(state, record, request, WORKER, "suspected", only_if=only_if)


async def idle_world(world: World) -> None:
    """A session that nobody has touched for a long time."""
    await world.create(idle_ms="5000")
    await world.client.hset(world.k.state, "updated_at_ms", "1000")
    for stream in (world.k.events, world.k.answers, world.k.chunks):
        await world.client.delete(stream)
        await world.client.xadd(stream, {"x": "x"}, id=LONG_AGO)


async def test_an_absent_client_is_closed(world: World) -> None:
    await world.create(presence_ms="5000")

    assert await close(world, Condition.ABSENT) is Outcome.BEGUN
    assert (await world.state()).status is Status.CLOSING


async def test_a_client_that_came_back_is_not(world: World) -> None:
    await world.create(presence_ms="5000")
    await world.client.set(world.k.presence, "1")
    await world.mark()

    assert await close(world, Condition.ABSENT) is Outcome.KEPT
    assert await world.changes() == {}


async def test_an_idle_session_is_closed(world: World) -> None:
    await idle_world(world)

    assert await close(world, Condition.IDLE) is Outcome.BEGUN


@pytest.mark.parametrize("stream", ["events", "answers", "chunks"])
async def test_what_came_just_now_keeps_it_even_if_it_is_gone_again(stream: str, world: World) -> None:
    await idle_world(world)
    key = getattr(world.k, stream)
    await world.client.xdel(key, await world.client.xadd(key, {"x": "x"}))
    await world.mark()

    assert await close(world, Condition.IDLE) is Outcome.KEPT
    assert await world.changes() == {}


async def test_a_change_of_its_state_keeps_it(world: World) -> None:
    await idle_world(world)
    seconds, _ = await world.client.time()
    await world.client.hset(world.k.state, "updated_at_ms", str(seconds * 1000))

    assert await close(world, Condition.IDLE) is Outcome.KEPT


async def test_a_session_without_a_limit_is_never_idle(world: World) -> None:
    await idle_world(world)
    await world.client.hdel(world.k.state, "idle_ms")

    assert await close(world, Condition.IDLE) is Outcome.KEPT


async def test_streams_that_do_not_exist_are_no_sign_of_life(world: World) -> None:
    await idle_world(world)
    await world.client.delete(world.k.events, world.k.answers, world.k.chunks)

    assert await close(world, Condition.IDLE) is Outcome.BEGUN


@pytest.mark.parametrize(
    ("only_if", "part"),
    [(Condition.ABSENT, "presence"), (Condition.IDLE, "events"), (Condition.IDLE, "chunks")],
)
async def test_a_key_of_a_wrong_type_is_named(only_if: Condition, part: str, world: World) -> None:
    await idle_world(world)
    key = getattr(world.k, part)
    await world.client.delete(key)
    await world.client.sadd(key, "not ours")
    await world.mark()

    with pytest.raises(CorruptDataError) as caught:
        await close(world, only_if)

    assert caught.value.field == key
    assert await world.changes() == {}


# --- the command
def test_only_a_disconnect_may_have_a_condition() -> None:
    command = Command(Op.DISCONNECT, "world-1", "c1", {"only_if": "absent"})

    assert Command.from_json(command.to_json().encode()) == command
    with pytest.raises(InvalidArgumentError, match="only_if"):
        Command(Op.CLOSE, "world-1", "c1", {"only_if": "absent"})
    with pytest.raises(InvalidArgumentError) as caught:
        Command(Op.DISCONNECT, "world-1", "c1", {"only_if": "bored"})
    assert caught.value.field == "only_if"
