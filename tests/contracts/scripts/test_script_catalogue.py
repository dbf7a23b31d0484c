"""What holds for every script, from the list of files: a new one without a case here fails."""

import asyncio
import re

import pytest
import redis.asyncio

from contracts.broker import BrokerFullError
from contracts.errors import CorruptDataError, OwnershipLostError
from contracts.identity import key_slot
from contracts.scripts import script_source
from contracts.session_scripts import Outcome
from support.broker import RealBroker
from support.script_cases import CASES
from support.script_world import World, snapshot
from support.tree import REPOSITORY

LUA = REPOSITORY / "contracts" / "lua"
SCRIPTS = sorted(path.stem for path in LUA.glob("*.lua") if not path.stem.startswith(("worker_", "index_")))

OWNED = [name for name in SCRIPTS if name not in ("accept_event", "lease_claim")]
"""Scripts that only an owner may run."""

SESSION_OWNED = [name for name in OWNED if not name.startswith(("inbox", "lease", "live"))]

ADMITTING = {"accept_event", "begin_tick", "create", "free_attempt"}
"""Scripts that take something new in, or prepare to; a broker without memory refuses them, and runs all others."""

REPEATS = {
    "adopt": {"state": {"fence"}},  # each adoption voids what was sent before it
    "lease_claim": {"lease": {"epoch", "expires_at_ms"}},  # each claim is a new epoch
    "lease_renew": {"lease": {"expires_at_ms"}},
    "place": {},
    "set_pace": {"answers": None},  # an answered command is answered again
    "create": {"answers": None},
    "answer": {"answers": None},
}
"""What a second, equal call may change: hash fields by key, or None for any change."""


def test_every_script_has_a_case_and_every_case_a_script() -> None:
    assert sorted(CASES) == SCRIPTS


@pytest.mark.parametrize("name", SCRIPTS)
async def test_a_script_runs_and_writes(name: str, world: World) -> None:
    call = await CASES[name](world)
    await world.mark()

    await call()

    assert world.calls[-1].name == name
    assert await world.changes() != {}


@pytest.mark.parametrize("name", SCRIPTS)
async def test_the_same_call_again_changes_nothing_twice(name: str, world: World) -> None:
    call = await CASES[name](world)
    await call()
    first = world.calls[-1]
    await world.mark()
    await asyncio.sleep(0.003)  # a later millisecond: a time that is written again would show

    await call()

    assert world.calls[-1] == first, "the second call is the same call"
    changed = await world.changes()
    allowed = REPEATS.get(name, {})
    assert changed.keys() <= allowed.keys()
    for key, fields in allowed.items():
        assert fields is None or key not in changed or changed[key].keys() <= fields


@pytest.mark.parametrize("name", ["set_pace", "create", "answer"])
async def test_an_answered_command_is_given_its_answer_again_and_the_stream_keeps_one(
    name: str, world: World
) -> None:
    call = await CASES[name](world)
    await call()
    await world.mark()
    (_, (before, _), _) = world.before[world.k.answers]

    await call()

    ((_, (after, _), _), changed) = (await snapshot(world.client))[world.k.answers], await world.changes()
    assert changed.keys() == {"answers"}
    assert after[-1][1] == before[-1][1]
    assert after[-1][0] > before[-1][0], "a reader that waits sees it"
    assert len(after) == len(before)


@pytest.mark.parametrize("name", SESSION_OWNED)
async def test_a_zombie_with_an_old_epoch_is_refused_and_writes_nothing(name: str, world: World) -> None:
    call = await CASES[name](world)
    await world.client.hset(world.k.state, mapping={"epoch": world.epoch + 1, "status": await _status(world)})
    await world.mark()

    with pytest.raises(OwnershipLostError):
        await call()

    assert await world.changes() == {}


@pytest.mark.parametrize(
    ("name", "command_id"),
    [
        ("answer", "next-1"),
        ("begin_close", "close-1"),
        ("begin_reset", "reset-1"),
        ("begin_tick", "next-1"),
        ("create", "create-1"),
        ("set_pace", "run-1"),
    ],
)
async def test_a_zombie_repeats_no_answer_either(name: str, command_id: str, world: World) -> None:
    call = await CASES[name](world)
    await world.client.hset(world.k.answered, command_id, "{}")
    await world.client.hset(world.k.state, mapping={"epoch": world.epoch + 1, "status": await _status(world)})
    await world.mark()

    with pytest.raises(OwnershipLostError):
        await call()

    assert await world.changes() == {}


@pytest.mark.parametrize("name", ["begin_close", "begin_reset", "begin_tick", "fail", "resend"])
async def test_a_call_that_arrives_after_the_owner_read_the_state_again_sends_nothing(
    name: str, world: World
) -> None:
    call = await CASES[name](world)
    await world.scripts.adopt(world.session_id, world.epoch)
    await world.mark()

    outcome = await call()

    assert Outcome.STALE in (outcome, outcome[0])
    assert await world.changes() == {}


@pytest.mark.parametrize("name", [name for name in OWNED if name not in SESSION_OWNED])
async def test_a_host_that_lost_the_partition_is_refused_and_writes_nothing(name: str, world: World) -> None:
    call = await CASES[name](world)
    lease = world.keys.partition(0).lease
    epoch = int(await world.client.hget(lease, "epoch") or 0)
    await world.client.hset(lease, "epoch", epoch + 1)
    await world.mark()

    try:
        outcome = await call()
    except OwnershipLostError:
        outcome = False

    assert outcome is False
    assert await world.changes() == {}


@pytest.mark.parametrize(
    "name", [name for name in SESSION_OWNED if name not in ("create", "adopt", "answer")]
)
async def test_without_a_session_an_owned_script_is_refused_and_makes_no_key(name: str, world: World) -> None:
    call = await CASES[name](world)
    await world.client.delete(world.k.state)
    await world.mark()

    with pytest.raises(OwnershipLostError):
        await call()

    assert await world.changes() == {}


@pytest.mark.parametrize("name", SCRIPTS)
async def test_a_key_of_a_wrong_type_is_named_and_nothing_is_written(name: str, world: World) -> None:
    call = await CASES[name](world)
    kept = {
        key: value
        for key in await world.client.keys("*")
        if (value := await world.client.dump(key)) is not None
    }
    await call()
    keys = world.calls[-1].keys

    for key in keys:
        await world.client.flushall()
        for name_of, value in kept.items():
            await world.client.restore(name_of, 0, value)
        await world.client.delete(key)
        await world.client.set(key, "not ours")
        before = await snapshot(world.client)
        with pytest.raises(CorruptDataError, match=re.escape(key)) as caught:
            await call()
        assert caught.value.field == key
        assert await snapshot(world.client) == before, f"with a wrong {key}"


@pytest.mark.parametrize("name", SCRIPTS)
async def test_all_keys_of_a_script_share_a_slot_where_the_broker_is_a_cluster(
    name: str, broker_client: redis.asyncio.Redis
) -> None:
    world = World(broker_client, cluster=True)
    await (await CASES[name](world))()

    assert len({key_slot(key) for call in world.calls if call.name == name for key in call.keys}) == 1


@pytest.mark.parametrize("name", SCRIPTS)
async def test_a_flushed_script_cache_is_filled_again(name: str, world: World) -> None:
    call = await CASES[name](world)
    await world.client.script_flush()
    await world.mark()

    await call()

    assert await world.changes() != {}


@pytest.mark.parametrize("name", SCRIPTS)
async def test_on_a_full_broker_only_what_takes_in_is_refused_and_that_writes_nothing(
    name: str, broker: RealBroker, real: redis.asyncio.Redis
) -> None:
    world = World(real)
    call = await CASES[name](world)
    await real.set("ballast", "x" * 3_000_000)
    await real.config_set("maxmemory", "1mb")
    await world.mark()

    if name in ADMITTING:
        with pytest.raises(BrokerFullError):
            await call()
        assert await world.changes() == {}
    else:
        await call()
        assert await world.changes() != {}


@pytest.mark.parametrize("name", SCRIPTS)
def test_includes_are_put_in_once_and_before_what_uses_them(name: str) -> None:
    source = script_source(name)

    assert "-- include:" not in source
    functions = re.findall(r"^local function (\w+)", source, re.MULTILINE)
    assert len(functions) == len(set(functions))
    for function in functions:
        first = min(found.start() for found in re.finditer(rf"\b{function}\(", source))
        assert source[:first].endswith("local function ")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_calls_nothing_that_it_does_not_include(name: str) -> None:
    source = re.sub(r"--.*|'[^']*'", "", script_source(name))
    known = {
        "if",
        "and",
        "or",
        "not",
        "function",
        "ipairs",
        "tonumber",
        "unpack",
        "type",
        "pcall",
        "return",
        "elseif",
    }
    known |= set(re.findall(r"\blocal function (\w+)", source))

    assert set(re.findall(r"(?<![.\w])(\w+)\(", source)) <= known


async def _status(world: World) -> str:
    return (await world.client.hget(world.k.state, "status") or b"CLOSED").decode()
