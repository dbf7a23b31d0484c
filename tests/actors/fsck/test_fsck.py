"""The invariants on live keys: nothing to say about a healthy life, and each kind of damage found by its code."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import redis.asyncio

from actors.broker_pool import Broker
from actors.config import ClientSettings
from actors.fsck import Finding, check_all
from contracts.identity import partition_of
from support.broker import RealBroker
from support.hosting import Caller, running_host
from support.scripted_worker import ScriptedWorker, failing

OLD = 1_000
PARTITION = 0  # of world-1


@pytest.fixture
async def worker(broker: RealBroker) -> AsyncIterator[ScriptedWorker]:
    async with ScriptedWorker(broker.url, name="gpu-0") as running:
        yield running


@pytest.fixture
async def world(
    broker: RealBroker, worker: ScriptedWorker, real: redis.asyncio.Redis
) -> AsyncIterator[Caller]:
    async with running_host(broker.url):
        yield Caller(real)


@pytest.fixture
async def check(broker: RealBroker) -> AsyncIterator[Callable[[], Awaitable[list[Finding]]]]:
    async with Broker(settings=ClientSettings(REDIS_URL=broker.url)) as connected:  # type: ignore[call-arg]

        async def run() -> list[Finding]:
            return await check_all(connected, settle_s=0.05)

        yield run


async def lived(world: Caller, worker: ScriptedWorker) -> None:
    """A session with a history: two chunks, a reset, another chunk, and an event that waits."""
    await world.ok("create", model=worker.model, idle_ms=3_600_000)
    await world.accept(1, "a")
    await world.ok("next_chunk")
    await world.accept(2, "b")
    await world.ok("next_chunk")
    await world.ok("reset")
    await world.accept(5, "c")
    await world.ok("next_chunk")
    await world.accept(7, "d")


# --- healthy
async def test_an_empty_broker_is_right(check: Any, broker: RealBroker) -> None:
    assert await check() == []


async def test_a_healthy_life_is_right_at_every_step(
    world: Caller, worker: ScriptedWorker, check: Any
) -> None:
    await lived(world, worker)
    assert await check() == []

    worker.gate.clear()
    waiting = await world.send("next_chunk")
    await worker.arrived(5)
    assert await check() == [], "with a tick in flight"
    worker.gate.set()
    await world.answer_to(waiting)

    worker.on_request = failing(times=1)
    await world.refused("next_chunk")
    await world.until("FAILED")
    await world.event(100, prompt="nobody listens")
    assert await check() == [], "after a failure"

    await world.ok("reset")
    await tombstone_of(world, worker)
    assert await check() == [], "as a tombstone"

    await world.ok("close")
    assert await check() == [], "closed"

    await world.ok("create", model=worker.model)
    assert await check() == [], "and created again"


async def tombstone_of(world: Caller, worker: ScriptedWorker) -> None:
    worker.on_request = failing("model_error", "no release", kind="release", times=1)
    await world.refused("close")


async def test_it_stays_right_while_many_live_and_die(
    world: Caller, worker: ScriptedWorker, check: Any
) -> None:
    async def live(number: int) -> None:
        caller = Caller(world.client, f"w{number}")
        for _ in range(3):
            await caller.ok("create", model=worker.model, idle_ms=3_600_000)
            await caller.accept(1, "p")
            await caller.ok("run", pace_ms=0)
            await asyncio.sleep(0.1)
            await caller.ok("pause")
            await caller.ok("reset")
            await caller.ok("close")

    lives = [asyncio.create_task(live(number)) for number in range(8)]
    while not all(task.done() for task in lives):
        assert await check() == []
    await asyncio.gather(*lives)
    assert await check() == []


async def test_what_is_settled_by_the_second_look_is_not_told(world: Caller, broker: RealBroker) -> None:
    await world.client.zadd("wl:sessions:ACTIVE", {"nobody": OLD})
    async with Broker(settings=ClientSettings(REDIS_URL=broker.url)) as connected:  # type: ignore[call-arg]
        looking = asyncio.create_task(check_all(connected, settle_s=1.0))
        await asyncio.sleep(0.5)
        await world.client.zrem("wl:sessions:ACTIVE", "nobody")

        assert await looking == []


# --- damage
async def state(world: Caller, **fields: Any) -> None:
    await world.client.hset(f"{world.base}:state", mapping={k: str(v) for k, v in fields.items()})


async def drop(world: Caller, *names: str) -> None:
    await world.client.hdel(f"{world.base}:state", *names)


async def move(world: Caller, status: str, **fields: Any) -> None:
    """Another status, with index and history to match, so that only what a test breaks is broken."""
    before = (await world.state())["status"]
    await state(world, status=status, **fields)
    await world.client.zrem(f"wl:sessions:{before}", world.session_id)
    await world.client.zadd(f"wl:sessions:{status}", {world.session_id: OLD})
    await world.client.delete(f"{world.base}:history")
    if status in ("CLOSING", "CLEANUP_FAILED"):
        await world.client.zadd("wl:tombstones", {world.session_id: OLD})


async def last_chunk(world: Caller) -> dict[bytes, bytes]:
    [(_, fields)] = await world.client.xrevrange(f"{world.base}:chunks", count=1)
    return dict(fields)


async def add_chunk(world: Caller, **fields: Any) -> None:
    chunk = {k.decode(): v for k, v in (await last_chunk(world)).items()} | fields
    await world.client.xadd(f"{world.base}:chunks", chunk)


async def record(world: Caller, kind: str, **fields: Any) -> None:
    now = await world.state()
    flying = {
        "request_id": "ar-world-1-x",
        "kind": kind,
        "fence": int(now["fence"]),
        "life": now["life"],
        "chunk_index": int(now["chunk_index"]) if kind == "tick" else None,
    } | fields
    if kind == "reset":
        flying["life"] = flying["request_id"]
    await state(world, inflight=json.dumps(flying | fields))


async def replace_key(world: Caller, part: str) -> None:
    await world.client.delete(f"{world.base}:{part}")
    await (world.client.sadd if part != "state" else world.client.set)(f"{world.base}:{part}", "not ours")


async def no_release_in_flight(world: Caller) -> None:
    await move(world, "CLOSING")


async def release_while_active(world: Caller) -> None:
    await record(world, "release")


async def tick_while_failed(world: Caller) -> None:
    await move(world, "FAILED", failure_code="model_error")
    await record(world, "tick")


async def reservation(world: Caller, **fields: Any) -> None:
    body = {"life": (await world.state())["life"], "reserved_at_ms": OLD} | fields
    await world.client.hset("wl:{w:gpu-0}:sessions", world.session_id, json.dumps(body))


async def history_step(world: Caller, trigger: str, start: str, end: str) -> None:
    entry = {"trigger": trigger, "from": start, "to": end, "by": "test", "reason": "", "at_ms": 1}
    await world.client.xadd(f"{world.base}:history", entry)


async def swap_answer(world: Caller) -> None:
    [first, *_] = await world.client.hkeys(f"{world.base}:answered")
    await world.client.hset(f"{world.base}:answered", first, "{}")


async def leave_reservation(world: Caller) -> None:
    await world.client.hset(
        "wl:{w:gpu-0}:sessions", "nobody", json.dumps({"life": "l", "reserved_at_ms": OLD})
    )


async def old_closed(world: Caller) -> None:
    await world.client.zadd("wl:sessions:CLOSED", {"nobody": OLD})


DAMAGE: dict[str, tuple[str, Callable[[Caller], Awaitable[Any]]]] = {
    # the state by itself
    "a state that no writer of ours wrote": ("corrupt_state", lambda w: state(w, chunk_index="seven")),
    "a status that does not exist": ("corrupt_state", lambda w: state(w, status="SLEEPING")),
    "a state without a status": ("corrupt_state", lambda w: drop(w, "status")),
    "no life": ("no_life", lambda w: drop(w, "life")),
    "ACTIVE with a reason to be failed": ("failure_code", lambda w: state(w, failure_code="evicted")),
    "FAILED without a reason": ("failure_code", lambda w: move(w, "FAILED")),
    "a tombstone without a reason": ("no_cleanup_error", lambda w: move(w, "CLEANUP_FAILED")),
    "FAILED and running free": ("runs_free", lambda w: move(w, "FAILED", failure_code="evicted", pace_ms=5)),
    "a last request at chunk 0": ("last_request", lambda w: state(w, chunk_index=0)),
    # what is in flight
    "CLOSING and nothing in flight": ("nothing_in_flight", no_release_in_flight),
    "a release in flight while ACTIVE": ("in_flight", release_while_active),
    "a tick in flight while FAILED": ("in_flight", tick_while_failed),
    "a fence above the session's": ("in_flight_fence", lambda w: record(w, "tick", fence=2**52)),
    "a tick of another life": ("in_flight_life", lambda w: record(w, "tick", life="another")),
    "a reset that begins another life": ("in_flight_life", lambda w: record(w, "reset", life="another")),
    "a tick of another chunk": ("in_flight_chunk", lambda w: record(w, "tick", chunk_index=9)),
    "an applied event in flight": ("in_flight_events", lambda w: record(w, "tick", event_ids=[5])),
    # times to live
    "CLOSED for ever": ("never_expires", lambda w: move(w, "CLOSED")),
    "ACTIVE and about to expire": ("expires", lambda w: w.client.pexpire(f"{w.base}:state", 60_000)),
    "events about to expire": ("expires", lambda w: w.client.pexpire(f"{w.base}:events", 60_000)),
    # chunks, events, history, answers
    "a chunk that is no chunk": ("corrupt_chunk", lambda w: w.client.xadd(f"{w.base}:chunks", {"a": 1})),
    "a chunk twice": ("chunk_gap", add_chunk),
    "a chunk left out": ("chunk_gap", lambda w: add_chunk(w, chunk_index=5)),
    "a life that begins in the middle": ("chunk_gap", lambda w: add_chunk(w, life="next", chunk_index=3)),
    "a chunk index ahead of the chunks": ("chunk_index", lambda w: state(w, chunk_index=4)),
    "another last request": ("last_request", lambda w: state(w, last_request_id="ar-another")),
    "an event applied twice": ("applied_twice", lambda w: add_chunk(w, applied_event_ids="[5]")),
    "events applied out of order": ("applied_twice", lambda w: add_chunk(w, applied_event_ids="[4]")),
    "an applied event above the floor": ("event_floor", lambda w: state(w, event_floor=4)),
    "an accepted event that is gone": ("event_lost", lambda w: w.client.xtrim(f"{w.base}:events", maxlen=0)),
    "an id that is none": ("corrupt_ids", lambda w: w.client.zadd(f"{w.base}:ids", {"seven": 9})),
    "CLOSED without CLOSING": (
        "illegal_transition",
        lambda w: history_step(w, "cleanup_succeeded", "ACTIVE", "CLOSED"),
    ),
    "a trigger that does not exist": (
        "illegal_transition",
        lambda w: history_step(w, "wished_away", "ACTIVE", "ACTIVE"),
    ),
    "a transition that was left out": (
        "history_gap",
        lambda w: history_step(w, "reset_succeeded", "FAILED", "ACTIVE"),
    ),
    "a history that ends elsewhere": (
        "history_end",
        lambda w: history_step(w, "evicted", "ACTIVE", "FAILED"),
    ),
    "an answer that is remembered otherwise": ("answer_not_kept", swap_answer),
    "an answer that is none": (
        "corrupt_answer",
        lambda w: w.client.xadd(f"{w.base}:answers", {"answer": "x"}),
    ),
    "a rejection that is not counted": (
        "rejected_total",
        lambda w: w.client.xadd(f"{w.base}:rejected", {"entry_id": "1-1", "reason": "invalid"}),
    ),
    # indexes
    "missing in its index": ("index_missing", lambda w: w.client.zrem("wl:sessions:ACTIVE", w.session_id)),
    "in a second index": ("index_wrong", lambda w: w.client.zadd("wl:sessions:FAILED", {w.session_id: OLD})),
    "in the index without a state": (
        "index_without_state",
        lambda w: w.client.zadd("wl:sessions:ACTIVE", {"nobody": OLD}),
    ),
    "in the index of closed sessions long after": ("index_without_state", old_closed),
    "a tombstone without a due entry": (
        "tombstone_missing",
        lambda w: _then(move(w, "CLEANUP_FAILED", cleanup_error="x"), w.client.delete("wl:tombstones")),
    ),
    "due although it lives": (
        "tombstone_left",
        lambda w: w.client.zadd("wl:tombstones", {w.session_id: OLD}),
    ),
    "due although it is gone": ("tombstone_left", lambda w: w.client.zadd("wl:tombstones", {"nobody": OLD})),
    "a member that is no session id": (
        "bad_member",
        lambda w: w.client.zadd("wl:sessions:ACTIVE", {"no id": OLD}),
    ),
    # partitions and workers
    "ahead of its partition": ("epoch_ahead", lambda w: state(w, epoch=2**52)),
    "a limit that no owner knows of": (
        "live_missing",
        lambda w: w.client.srem(f"wl:{{p{PARTITION}}}:live", w.session_id),
    ),
    "live although it is gone": (
        "live_left",
        lambda w: w.client.sadd(f"wl:{{p{partition_of('nobody', 8)}}}:live", "nobody"),
    ),
    "live in another partition": (
        "live_left",
        lambda w: w.client.sadd(f"wl:{{p{PARTITION + 1}}}:live", w.session_id),
    ),
    "counted although it is not there": (
        "attempts_left",
        lambda w: w.client.hset(f"wl:{{p{PARTITION}}}:attempts", "1-1", "1@1"),
    ),
    "placed without room": ("no_room", lambda w: w.client.hdel("wl:{w:gpu-0}:sessions", w.session_id)),
    "room for another life": ("room_of_another", lambda w: reservation(w, life="another")),
    "room that nobody needs": ("room_left", leave_reservation),
    "room that can't be read": (
        "corrupt_reservation",
        lambda w: w.client.hset("wl:{w:gpu-0}:sessions", w.session_id, "{"),
    ),
    "another version": ("schema_version", lambda w: w.client.hset("wl:config", "schema_version", 2)),
    "a number of partitions that is none": (
        "corrupt_config",
        lambda w: w.client.hset("wl:config", "partitions", "many"),
    ),
}


async def _then(first: Awaitable[Any], second: Awaitable[Any]) -> None:
    await first
    await second


@pytest.mark.parametrize("damage", DAMAGE)
async def test_damage_is_found_by_its_code(
    damage: str, broker: RealBroker, worker: ScriptedWorker, real: redis.asyncio.Redis, check: Any
) -> None:
    code, plant = DAMAGE[damage]
    world = Caller(real)
    async with running_host(broker.url):
        await lived(world, worker)
    assert await check() == []

    await plant(world)
    found = await check()

    assert code in {finding.code for finding in found}, found
    corrupt = {finding.corrupt for finding in found if finding.code == code}
    assert corrupt == {code.startswith(("corrupt", "bad"))}


@pytest.mark.parametrize(
    "part",
    ["state", "events", "ids", "rejected", "answers", "answered", "chunks", "ticks", "history", "presence"],
)
async def test_a_wrong_type_at_any_key_of_a_session_is_named(
    part: str, world: Caller, worker: ScriptedWorker, check: Any
) -> None:
    await lived(world, worker)
    neighbour = Caller(world.client, "world-2")
    await neighbour.ok("create", model=worker.model)
    await replace_key(world, part)

    found = await check()

    assert {(f.code, f.key, f.corrupt) for f in found} == {("wrong_type", f"{world.base}:{part}", True)}
    assert {f.session_id for f in found} == {world.session_id}


@pytest.mark.parametrize(
    "key",
    [
        "wl:config", "wl:workers", "wl:hosts", "wl:janitors", "wl:tombstones", "wl:sessions:ACTIVE",
        "wl:{p0}:lease", "wl:{p3}:inbox", "wl:{p0}:live", "wl:{p5}:attempts",
        "wl:{w:gpu-0}:requests", "wl:{w:gpu-0}:sessions", "wl:{w:gpu-0}:info",
    ],
)  # fmt: skip
async def test_a_wrong_type_at_any_other_key_is_named(
    key: str, broker: RealBroker, worker: ScriptedWorker, real: redis.asyncio.Redis, check: Any
) -> None:
    async with running_host(broker.url):
        await lived(Caller(real), worker)
    await real.delete(key)
    await real.set(key, "not ours")

    found = await check()

    assert [f.code for f in found if f.key == key] == ["wrong_type"]
    assert all(f.corrupt for f in found if f.key == key)


async def test_a_thousand_sessions_are_read_in_pages(real: redis.asyncio.Redis, check: Any) -> None:
    await real.zadd("wl:sessions:FAILED", {f"gone-{number}": OLD for number in range(1_000)})

    found = await check()

    assert {f.session_id for f in found} == {f"gone-{number}" for number in range(1_000)}
    assert {f.code for f in found} == {"index_without_state"}


async def test_nothing_scans_the_key_space_and_nothing_is_written(
    world: Caller, worker: ScriptedWorker, check: Any, broker: RealBroker
) -> None:
    await lived(world, worker)
    with broker.client() as client:
        client.config_resetstat()
        assert await check() == []
        used = {name.removeprefix("cmdstat_") for name in client.info("commandstats")}

    assert "scan" not in used
    assert "keys" not in used
