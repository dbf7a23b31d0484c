"""What a session, and its partition, make of input that nobody should have written: it is refused and nothing is harmed."""

import asyncio
import json
import tracemalloc
from collections import Counter
from typing import Any

import pytest
import redis.asyncio

from actors.host import Host
from contracts.errors import BrokerError
from contracts.identity import partition_of
from support.broker import RealBroker
from support.hosting import Caller, running_host
from support.invariants import check_invariants
from support.scripted_worker import ScriptedWorker

CONTROL = {"track": "t", "schema": "s", "data": {}}


def controls(**changes: Any) -> str:
    return json.dumps([CONTROL | changes])


BAD_EVENTS: dict[str, dict[Any, Any]] = {
    "no id": {"prompt": "p"},
    "an empty id": {"event_id": "", "prompt": "p"},
    "a negative id": {"event_id": "-1", "prompt": "p"},
    "a fractional id": {"event_id": "1.5", "prompt": "p"},
    "an id with a sign": {"event_id": "+7", "prompt": "p"},
    "an id with a leading zero": {"event_id": "07", "prompt": "p"},
    "an id in words": {"event_id": "seven", "prompt": "p"},
    "an id in other digits": {"event_id": "\u0667", "prompt": "p"},
    "an id of 2^53": {"event_id": str(2**53), "prompt": "p"},
    "an id of a thousand digits": {"event_id": "9" * 1000, "prompt": "p"},
    "an id that is no UTF-8": {"event_id": b"\xff\xfe", "prompt": "p"},
    "an id of many lines": {"event_id": "1\n2", "prompt": "p"},
    "neither prompt nor controls": {"event_id": "7"},
    "an unknown field": {"event_id": "7", "prompt": "p", "colour": "red"},
    "an unknown field that is no UTF-8": {"event_id": "7", "prompt": "p", b"\xc3\x28": "x"},
    "a prompt that is no UTF-8": {"event_id": "7", "prompt": b"\xff\xfe\xfd"},
    "controls that are no UTF-8": {"event_id": "7", "controls": b'[{"track":"\xff"}]'},
    "controls that are no JSON": {"event_id": "7", "controls": "{track: t"},
    "controls that are cut off": {"event_id": "7", "controls": controls()[:-3]},
    "controls that are an object": {"event_id": "7", "controls": json.dumps(CONTROL)},
    "controls that are null": {"event_id": "7", "controls": "null"},
    "controls with NaN": {"event_id": "7", "controls": '[{"track":"t","schema":"s","data":{"x":NaN}}]'},
    "controls with infinity": {
        "event_id": "7",
        "controls": '[{"track":"t","schema":"s","data":{"x":1e999}}]',
    },
    "controls with an integer beyond 2^53": {"event_id": "7", "controls": controls(data={"x": 2**53})},
    "controls nested too deeply": {"event_id": "7", "controls": "[" * 10_000 + "]" * 10_000},
    "a control without a track": {"event_id": "7", "controls": json.dumps([{"schema": "s", "data": {}}])},
    "a control with a blank track": {"event_id": "7", "controls": controls(track=" ")},
    "a control with an unknown field": {"event_id": "7", "controls": controls(more=1)},
    "a control with data that are a list": {"event_id": "7", "controls": controls(data=[])},
    "one track twice": {"event_id": "7", "controls": json.dumps([CONTROL, CONTROL])},
    "too much text": {"event_id": "7", "prompt": "x" * (64 * 1024)},
}


@pytest.mark.parametrize("what", BAD_EVENTS)
async def test_a_bare_event_with(world: Caller, worker: ScriptedWorker, what: str) -> None:
    # Given a malformed entry between two good ones
    await world.event(5, prompt="before")
    await world.client.xadd(f"{world.base}:events", BAD_EVENTS[what])
    await world.event(9, prompt="after")

    # When a chunk is made
    chunk = await world.ok("next_chunk")

    # Then the good ones are applied, the other is reported, and its id may still be used
    assert chunk["applied_event_ids"] == [5, 9]
    assert [entry["reason"] for entry in await world.rejected()] == ["invalid"]
    assert json.loads((await world.state())["rejected_total"]) == {"invalid": 1}
    assert await world.pending() == 0
    assert worker.ticks()[0]["prompt"] == "after"


async def test_a_malformed_event_leaves_its_id_to_a_good_one(world: Caller) -> None:
    await world.event(7, controls="no JSON")
    await world.event(7, prompt="better")
    assert (await world.ok("next_chunk"))["applied_event_ids"] == [7]


async def test_a_malformed_event_with_a_high_id_does_not_raise_the_floor_of_a_reset(world: Caller) -> None:
    await world.event(2**53 - 1, controls="no JSON")
    assert (await world.ok("reset"))["event_floor"] == -1
    assert [entry["reason"] for entry in await world.rejected()] == ["invalid"]


async def test_ten_thousand_bare_events_at_once_are_each_applied_or_reported(
    world: Caller, worker: ScriptedWorker
) -> None:
    # Given more events than a session may hold, good, doubled and malformed
    pipe = world.client.pipeline(transaction=False)
    for i in range(10_000):
        fields = {"event_id": i, "prompt": "p"} if i % 10 else {"event_id": i, "controls": "nonsense"}
        pipe.xadd(f"{world.base}:events", fields if i % 7 else fields | {"event_id": 3})
    await pipe.execute()

    # When chunks are made
    tracemalloc.start()
    applied: list[int] = []
    for _ in range(3):
        applied += (await world.ok("next_chunk"))["applied_event_ids"]
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    # Then each is accounted for, with no more of them in memory than a few batches
    totals = json.loads((await world.state())["rejected_total"])
    assert len(applied) == 256 == len(set(applied))
    assert applied == sorted(applied)
    assert sum(totals.values()) + len(applied) == 10_000
    assert set(totals) == {"invalid", "duplicate", "queue_full"}
    assert Counter(entry["reason"] for entry in await world.rejected()) == totals
    assert await world.pending() == 0
    assert peak_bytes < 32 * 2**20
    await world.accept(20_000, "still alive")
    assert (await world.ok("next_chunk"))["applied_event_ids"] == [20_000]


async def test_a_long_stream_is_swept_outside_active_as_well(world: Caller, worker: ScriptedWorker) -> None:
    await world.accept(1, "accepted in time")
    await world.event(2, prompt="bare and unread")
    worker.gate.clear()
    close = await world.send("close")
    await worker.arrived(1)
    pipe = world.client.pipeline(transaction=False)
    for i in range(1_000):
        pipe.xadd(f"{world.base}:events", {"event_id": i + 3, "prompt": "p"})
    await pipe.execute()

    assert (await world.ok("sweep"))["pending"] == 2
    worker.gate.set()
    await world.answer_to(close)
    assert json.loads((await world.state())["rejected_total"]) == {"closed": 2, "not_active": 1_000}


def body(**changes: Any) -> dict[str, Any]:
    usual = {"op": "next_chunk", "session_id": "world-1", "command_id": "bad", "args": {}}
    return {name: value for name, value in (usual | changes).items() if value is not ...}


ANSWERED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown op": (body(op="explode"), "op"),
    "no op": (body(op=...), "op"),
    "an op that is a list": (body(op=[]), "op"),
    "an op that is an object": (body(op={"a": 1}), "op"),
    "an unknown field": (body(more=1), "more"),
    "args that are a list": (body(args=[1]), "args"),
    "args that are a string": (body(args="x"), "args"),
    "an unknown argument": (body(args={"speed": 1}), "speed"),
    "a pace that is a string": (body(op="run", args={"pace_ms": "5"}), "pace_ms"),
    "a pace that is negative": (body(op="run", args={"pace_ms": -1}), "pace_ms"),
    "a pace that is a bool": (body(op="run", args={"pace_ms": True}), "pace_ms"),
    "a life that is a number": (body(op="close", args={"life": 1}), "life"),
    "a create without a model": (body(op="create"), "model"),
    "a create with a null model": (body(op="create", args={"model": None}), "model"),
    "a create with a model that is a number": (body(op="create", args={"model": 1}), "model"),
    "a create with an unknown argument": (body(op="create", args={"model": "m", "gpu": 1}), "gpu"),
    "a create with no room for events": (body(op="create", args={"model": "m", "max_pending_events": 0}), "max_pending_events"),
    "a create with a seed of 400 digits": (body(op="create", args={"model": "m", "seed": 10**400}), "seed"),
    "a create with params of 400 digits": (body(op="create", args={"model": "m", "params": {"n": 10**400}}), "params.n"),
    "a create with a fractional seed": (body(op="create", args={"model": "m", "seed": 1.5}), "seed"),
    "a create with params that are a list": (body(op="create", args={"model": "m", "params": []}), "params"),
    "a create with a bad recording": (body(op="create", args={"model": "m", "recording": "last"}), "recording"),
}  # fmt: skip


@pytest.mark.parametrize("what", ANSWERED)
async def test_a_malformed_command_is_answered_naming_the_field(world: Caller, what: str) -> None:
    value, field = ANSWERED[what]
    await world.client.xadd(world.inbox, {"command": json.dumps(value)})

    error = (await world.answer_to("bad"))["error"]

    assert (error["code"], error["field"]) == ("invalid_argument", field)
    assert (await world.ok("next_chunk"))["chunk_index"] == 0


DROPPED: dict[str, dict[Any, Any]] = {
    "no JSON": {"command": "{op:"},
    "an empty command": {"command": ""},
    "a command that is no UTF-8": {"command": b"\xff\xfe"},
    "a command that is a list": {"command": "[]"},
    "a command that is null": {"command": "null"},
    "a command that is nested too deeply": {"command": "[" * 10_000},
    "a command without a session": {"command": json.dumps(body(session_id=...))},
    "a command of an illegal session": {"command": json.dumps(body(session_id="a b"))},
    "a command whose session is a number": {"command": json.dumps(body(session_id=1))},
    "a command without an id": {"command": json.dumps(body(command_id=...))},
    "a command whose id is a number": {"command": json.dumps(body(command_id=5))},
    "a command whose id is blank": {"command": json.dumps(body(command_id=" "))},
    "a command whose id is too long": {"command": json.dumps(body(command_id="x" * 201))},
    "no field that is known": {"request": "{}"},
    "a reply that is no JSON": {"reply": "{"},
    "a reply that is a list": {"reply": "[]"},
    "a reply without a request": {"reply": json.dumps({"session_id": "world-1", "fence": 1})},
    "a reply with a fence that is a string": {
        "reply": json.dumps({"session_id": "world-1", "request_id": "r", "fence": "1"})
    },
    "a reply to a request that nobody sent": {
        "reply": json.dumps(
            {"session_id": "world-1", "request_id": "r", "fence": 1, "life": "l", "incarnation": "i"}
        )
    },
    "a reply to a session that never was": {
        "reply": json.dumps(
            {"session_id": "world-1x", "request_id": "r", "fence": 1, "life": "l", "incarnation": "i"}
        )
    },
    "a notice that is no JSON": {"notice": "nonsense"},
    "a notice of an unknown kind": {"notice": json.dumps({"kind": "party", "session_id": "world-1"})},
    "a notice without a life": {
        "notice": json.dumps({"kind": "evicted", "session_id": "world-1", "worker": "w0", "incarnation": "i"})
    },
    "a notice with an unknown field": {
        "notice": json.dumps(
            {
                "kind": "evicted",
                "session_id": "world-1",
                "worker": "w0",
                "life": "l",
                "incarnation": "i",
                "x": 1,
            }
        )
    },
}


@pytest.mark.parametrize("what", DROPPED)
async def test_an_inbox_entry_that_nobody_waits_for_is_dropped(world: Caller, what: str) -> None:
    await world.ok("next_chunk")
    before = await world.state()
    await world.client.xadd(world.inbox, DROPPED[what])

    async with asyncio.timeout(5):
        while await world.client.xlen(world.inbox):
            await asyncio.sleep(0.005)
    assert await world.state() == before
    assert (await world.ok("next_chunk"))["chunk_index"] == 1


@pytest.mark.parametrize("other", ["first", "last"])
async def test_a_command_in_the_inbox_of_another_partition_harms_neither(
    stranger: Caller, host: Host, other: str
) -> None:
    # Given a session between the partitions that were claimed first and last, so with a higher and a lower epoch
    by_epoch = sorted(host.owned, key=lambda k: host.owned[k].epoch)
    world = Caller(stranger.client, session_in(by_epoch[3]))
    there = Caller(stranger.client, session_in(by_epoch[0] if other == "first" else by_epoch[-1]))
    await world.ok("create", model="scripted")
    before = {k: partition.epoch for k, partition in host.owned.items()}

    # When a command of it lands in the wrong inbox, amidst others
    await there.client.xadd(there.inbox, {"command": json.dumps(body(session_id=world.session_id))})
    await there.ok("create", model="scripted")

    # Then it is not carried out, the partition is kept, and the next command there is served
    assert (await there.ok("next_chunk"))["chunk_index"] == 0
    assert (await world.state())["chunk_index"] == "0"
    assert {k: partition.epoch for k, partition in host.owned.items()} == before
    told = [answer["error"]["field"] for answer in await world.answers() if answer["command_id"] == "bad"]
    assert told in ([], ["session_id"])


def session_in(partition: int) -> str:
    """A session id that belongs to a partition."""
    return next(f"there-{i}" for i in range(1000) if partition_of(f"there-{i}", 8) == partition)


async def test_commands_behind_a_malformed_one_are_served_though_the_broker_failed_at_it(
    world: Caller, host: Host
) -> None:
    # Given a broker that fails once, just when the malformed command is answered
    answer = host.services.scripts.answer
    failed: list[str] = []

    async def answer_badly(*args: Any) -> Any:
        if not failed:
            failed.append("once")
            raise BrokerError("gone for a moment")
        return await answer(*args)

    host.services.scripts.answer = answer_badly  # type: ignore[method-assign]

    # When good commands come right behind it
    pipe = world.client.pipeline()
    pipe.xadd(world.inbox, {"command": json.dumps(body(op="explode"))})
    for i in range(3):
        pipe.xadd(world.inbox, {"command": json.dumps(body(command_id=f"good-{i}"))})
    await pipe.execute()

    # Then all are answered
    assert (await world.answer_to("bad"))["error"]["field"] == "op"
    assert [(await world.answer_to(f"good-{i}"))["ok"] for i in range(3)] == [True] * 3


async def test_a_state_that_can_not_be_read_is_said_and_harms_nobody_else(
    broker: RealBroker, worker: ScriptedWorker, real: redis.asyncio.Redis
) -> None:
    # Given a session whose state somebody has edited
    world, neighbour = Caller(real), Caller(real, "world-2")
    async with running_host(broker.url):
        for caller in (world, neighbour):
            await caller.ok("create", model="scripted")
    await real.hset(f"{world.base}:state", "chunk_index", "many")

    # When a new owner looks at it, Then it names the field, and the others are served
    async with running_host(broker.url):
        for _ in range(3):
            error = await world.refused("next_chunk")
            assert (error["code"], error["field"]) == ("corrupt_data", "chunk_index")
        await neighbour.ok("next_chunk")

        # And once it is repaired it goes on
        await real.hset(f"{world.base}:state", "chunk_index", "0")
        await world.ok("next_chunk")
    await check_invariants(real)
