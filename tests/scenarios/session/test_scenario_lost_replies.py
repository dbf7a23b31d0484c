"""A reply of the broker that is lost: the host can't know whether its write happened, and nothing happens twice."""

import asyncio
import hashlib
import json
from typing import Any

import pytest
import redis.asyncio

from contracts.scripts import script_source
from support.broker import RealBroker
from support.hosting import Caller, running_host
from support.invariants import check_invariants
from support.relay import Relay
from support.scripted_worker import ScriptedWorker, failing

SCRIPTS = {
    # script: how often a whole life calls it at least
    "create": 2, "adopt": 1, "begin_tick": 4, "commit": 3, "fail": 1, "begin_reset": 1, "finish_reset": 1,
    "begin_close": 3, "finish_close": 2, "fail_close": 1, "end_inflight": 2, "set_pace": 2, "answer": 2,
    "reject_events": 1, "inbox_done": 4, "live_set": 2, "lease_claim": 8, "worker_reserve": 3, "worker_unreserve": 3, "index_add": 6,
}  # fmt: skip
COMMANDS = {"ZREM": 3, "HGETALL": 8, "XRANGE": 3, "ZRANGE": 2, "XREAD": 6}


async def whole_life(world: Caller, worker: ScriptedWorker) -> list[Any]:
    """Everything that can happen to a session; returns what was answered, without what differs from run to run."""
    told: list[Any] = []

    async def call(op: str, **args: Any) -> None:
        answer = await world.call(op, **args)
        result = answer.get("result") or {}
        kept = {
            name: result[name]
            for name in ("chunk_index", "event_floor", "applied_event_ids", "status")
            if name in result
        }
        told.append((op, answer["ok"], answer.get("error", {}).get("code"), kept))

    await call("create", model="scripted")
    await world.accept(1, "one")
    await world.event(1, prompt="doubled")
    await call("next_chunk")
    worker.on_request = failing("expired", times=1)
    await call("next_chunk")
    await world.accept(2, "two")
    await call("next_chunk")
    await call("run", pace_ms=3_600_000)
    async with asyncio.timeout(10):
        while len(await world.chunks()) < 3:
            await asyncio.sleep(0.005)
    await call("next_chunk")
    await call("pause")
    worker.on_request = failing(times=1)
    await world.accept(10, "never applied")
    await call("next_chunk")
    await world.until("FAILED")
    await call("next_chunk")
    await call("reset")
    await world.accept(11, "eleven")
    await call("next_chunk")
    worker.on_request = failing(kind="release", times=1)
    await call("close")
    await call("reset")
    await call("close")
    await call("close")
    await call("create", model="scripted")
    await call("next_chunk")
    await call("close")
    return told


def expected() -> list[Any]:
    chunk = lambda index, ids: ("next_chunk", True, None, {"chunk_index": index, "applied_event_ids": ids})  # noqa: E731
    start = {"chunk_index": 0, "event_floor": -1}
    closed = ("close", True, None, {"status": "CLOSED"})
    return [
        ("create", True, None, start),
        chunk(0, [1]),
        ("next_chunk", False, "expired", {}),
        chunk(1, [2]),
        ("run", True, None, {}),
        chunk(3, []),
        ("pause", True, None, {}),
        ("next_chunk", False, "model_error", {}),
        ("next_chunk", False, "invalid_state", {}),
        ("reset", True, None, start | {"event_floor": 10}),
        chunk(0, [11]),
        ("close", False, "model_error", {}),
        ("reset", False, "invalid_state", {}),
        closed,
        closed,
        ("create", True, None, start),
        chunk(0, []),
        closed,
    ]


async def lives_through(
    relay: Relay, broker: RealBroker, client: redis.asyncio.Redis, pattern: bytes, nth: int
) -> None:
    """A whole life with the nth reply of `pattern` lost comes out as one without."""
    for name in SCRIPTS:
        await client.script_load(script_source(name))
    lost = relay.drop_reply(pattern, nth)
    world = Caller(client)
    async with ScriptedWorker(broker.url) as worker, running_host(relay.url, lease_ms=2_000):
        assert await asyncio.wait_for(whole_life(world, worker), 30) == expected()
        await check_invariants(client)
        async with asyncio.timeout(5):  # a read that blocks is answered only later, if nothing comes
            while not lost.happened:
                await asyncio.sleep(0.01)
        assert set(worker.runs.values()) <= {0, 1}
        assert worker.kinds().count("release") >= 4
        assert json.loads((await world.state())["rejected_total"]) == {}
        assert len(await world.answers()) == len({answer["command_id"] for answer in await world.answers()})


@pytest.mark.parametrize(
    ("script", "nth"),
    [(script, nth) for script, most in SCRIPTS.items() for nth in sorted({1, most})],
    ids=str,
)
async def test_the_lost_reply_of_a_script_changes_nothing(
    relay: Relay, broker: RealBroker, real: redis.asyncio.Redis, script: str, nth: int
) -> None:
    digest = hashlib.sha1(script_source(script).encode(), usedforsecurity=False).hexdigest()
    await lives_through(relay, broker, real, digest.encode(), nth)


@pytest.mark.parametrize(
    ("command", "nth"),
    [(command, nth) for command, most in COMMANDS.items() for nth in sorted({2, most})],
    ids=str,
)
async def test_the_lost_reply_of_a_plain_command_changes_nothing(
    relay: Relay, broker: RealBroker, real: redis.asyncio.Redis, command: str, nth: int
) -> None:
    await lives_through(relay, broker, real, f"\r\n{command}\r\n".encode(), nth)


async def test_connections_that_are_cut_again_and_again_change_nothing(
    relay: Relay, broker: RealBroker, real: redis.asyncio.Redis
) -> None:
    async def cut() -> None:
        while True:
            await asyncio.sleep(0.15)
            await asyncio.to_thread(relay.sever)

    world = Caller(real)
    async with ScriptedWorker(broker.url) as worker, running_host(relay.url, lease_ms=5_000):
        cutting = asyncio.create_task(cut())
        try:
            assert await asyncio.wait_for(whole_life(world, worker), 60) == expected()
        finally:
            cutting.cancel()
            await asyncio.wait([cutting])
        await check_invariants(real)
        assert set(worker.runs.values()) <= {0, 1}
