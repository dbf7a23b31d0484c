"""The end of a session: CLOSING, CLOSED, and the tombstone that a failed release leaves until a close succeeds."""

import asyncio
from typing import Any

import pytest
import redis.asyncio

from support.broker import RealBroker
from support.hosting import Caller, running_host
from support.invariants import check_invariants
from support.scripted_worker import SILENCE, ScriptedWorker, failing

ENDINGS = pytest.mark.parametrize("op", ["close", "disconnect"])


async def is_tombstone(caller: Caller) -> bool:
    return await caller.client.zscore("wl:tombstones", caller.session_id) is not None


async def no_tombstone(caller: Caller) -> None:
    """The index follows the state, so it may be a moment behind the answer."""
    async with asyncio.timeout(5):
        while await is_tombstone(caller):
            await asyncio.sleep(0.005)


async def cleanup_failed(world: Caller, worker: ScriptedWorker, op: str = "close") -> dict[str, object]:
    """Makes the session a tombstone; returns the error of the close."""
    worker.on_request = failing("kv_state", "can't free", kind="release", times=1)
    return await world.refused(op)


@ENDINGS
async def test_a_close_releases_the_life_and_reports_what_was_pending(
    world: Caller, worker: ScriptedWorker, op: str
) -> None:
    await world.ok("next_chunk")
    life = (await world.state())["life"]
    await world.accept(5, "never applied")

    answer = await world.ok(op)

    assert answer == {"status": "CLOSED"}
    assert worker.kinds() == ["tick", "release"]
    assert worker.requests[-1]["life"] == life
    assert [(e["event_id"], e["reason"]) for e in await world.rejected()] == [("5", "closed")]
    await no_tombstone(world)


@ENDINGS
async def test_closing_a_closed_session_succeeds_and_asks_no_worker(
    world: Caller, worker: ScriptedWorker, op: str
) -> None:
    await world.ok("close")

    assert await world.ok(op) == {"status": "CLOSED"}
    assert worker.kinds() == ["release"]


async def test_a_session_that_never_was_can_not_be_closed(stranger: Caller) -> None:
    for op in ("next_chunk", "reset", "close", "disconnect", "run", "pause", "sweep"):
        error = await stranger.refused(op)
        assert (error["code"], error["field"]) == ("not_found", "session_id")
        assert "does not exist" in error["message"]


@ENDINGS
async def test_a_release_that_fails_leaves_a_tombstone_and_a_second_close_frees_the_id(
    world: Caller, worker: ScriptedWorker, op: str
) -> None:
    # Given a worker whose release fails once
    await world.ok("next_chunk")
    error = await cleanup_failed(world, worker, op)

    # Then the error says so, and the session is a tombstone with a next retry
    state = await world.until("CLEANUP_FAILED")
    assert error["retryable"]
    assert "can't free" in str(error["message"])
    assert "can't free" in state["cleanup_error"]
    assert state["close_attempts"] == "1"
    assert await is_tombstone(world)
    assert await world.client.hexists("wl:{w:w0}:sessions", "world-1")

    # When it is closed again, Then exactly two releases were asked for, and the id is free
    assert await world.ok(op) == {"status": "CLOSED"}
    assert worker.kinds().count("release") == 2
    await no_tombstone(world)
    await world.ok("create", model="scripted")
    assert (await world.ok("next_chunk"))["chunk_index"] == 0


async def test_a_tombstone_blocks_create_reset_ticks_and_events(
    world: Caller, worker: ScriptedWorker
) -> None:
    await cleanup_failed(world, worker)

    for op in ("reset", "next_chunk", "run", "pause"):
        error = await world.refused(op)
        assert error["code"] == "invalid_state"
        assert "cleanup_failed" in error["message"]
    error = await world.refused("create", model="scripted")
    assert error["code"] == "already_exists"
    assert "already exists" in error["message"]
    assert "cleanup_failed" in error["message"]
    with pytest.raises(RuntimeError, match="cleanup_failed"):
        await world.accept(1, "p")
    await world.event(2, prompt="bare")
    await world.ok("sweep")
    assert [(e["event_id"], e["reason"]) for e in await world.rejected()] == [("2", "not_active")]
    assert worker.kinds() == ["release"]


async def test_a_session_that_exists_can_not_be_created_again(world: Caller) -> None:
    life = (await world.state())["life"]

    error = await world.refused("create", model="scripted")

    assert error["code"] == "already_exists"
    assert "already exists" in error["message"]
    assert (await world.state())["life"] == life


async def test_a_session_created_after_a_close_starts_at_chunk_0_with_ids_of_its_own(
    world: Caller, worker: ScriptedWorker
) -> None:
    await world.accept(7, "p")
    await world.ok("next_chunk")
    first = (await world.state())["life"]
    await world.ok("close")

    answer = await world.ok("create", model="scripted")

    assert (answer["chunk_index"], answer["event_floor"]) == (0, -1)
    assert answer["life"] != first
    assert await world.chunks() == []
    assert (await world.accept(0, "p")).status == "ACCEPTED"
    assert (await world.ok("next_chunk"))["applied_event_ids"] == [0]
    fences = [int(request["fence"]) for request in worker.requests]
    assert fences == sorted(set(fences))


async def test_closes_at_once_lead_to_one_release_and_an_answer_each(
    world: Caller, worker: ScriptedWorker
) -> None:
    worker.gate.clear()
    commands = [await world.send("close" if i % 2 else "disconnect") for i in range(20)]
    await worker.arrived(1)
    await asyncio.sleep(0.05)
    worker.gate.set()

    answers = [await world.answer_to(command) for command in commands]
    assert {answer["result"]["status"] for answer in answers} == {"CLOSED"}
    assert worker.kinds() == ["release"]


async def test_closes_at_once_whose_release_fails_are_all_told(world: Caller, worker: ScriptedWorker) -> None:
    worker.gate.clear()
    worker.on_request = failing(kind="release", times=1)
    commands = [await world.send("close") for _ in range(5)]
    await worker.arrived(1)
    await asyncio.sleep(0.05)
    worker.gate.set()

    answers = [await world.answer_to(command) for command in commands]
    assert {answer["error"]["code"] for answer in answers} == {"model_error"}
    assert worker.kinds() == ["release"]
    await world.ok("close")


async def test_a_close_waits_for_the_tick_in_flight(world: Caller, worker: ScriptedWorker) -> None:
    worker.gate.clear()
    tick, close = await world.send("next_chunk"), await world.send("close")
    await worker.arrived(1)
    await asyncio.sleep(0.05)
    assert worker.kinds() == ["tick"]
    worker.gate.set()

    assert (await world.answer_to(tick))["ok"]
    assert (await world.answer_to(close))["result"] == {"status": "CLOSED"}
    assert worker.kinds() == ["tick", "release"]


async def test_a_close_waits_for_a_running_reset_and_releases_the_new_life(
    world: Caller, worker: ScriptedWorker
) -> None:
    worker.gate.clear()
    reset, close = await world.send("reset"), await world.send("close")
    await worker.arrived(1)
    worker.gate.set()

    life = (await world.answer_to(reset))["result"]["life"]
    assert (await world.answer_to(close))["ok"]
    assert worker.requests[-1]["life"] == life


async def test_commands_while_closing_are_refused_naming_the_state(
    world: Caller, worker: ScriptedWorker
) -> None:
    worker.gate.clear()
    close = await world.send("close")
    await worker.arrived(1)

    for op in ("next_chunk", "reset", "run", "pause"):
        error = await world.refused(op)
        assert (error["code"], "closing" in error["message"]) == ("invalid_state", True)
    assert (await world.refused("create", model="scripted"))["code"] == "already_exists"
    with pytest.raises(RuntimeError, match="closing"):
        await world.accept(1, "p")
    worker.gate.set()
    assert (await world.answer_to(close))["ok"]


async def test_a_failed_session_closes_also_while_its_release_is_out(
    world: Caller, worker: ScriptedWorker
) -> None:
    # Given a failure whose release nobody answers
    worker.on_request = lambda request: (
        {"silence": True} if request["kind"] == "release" else failing()(request)
    )
    await world.refused("next_chunk")
    await worker.arrived(2)
    worker.on_request = None

    # When it is closed
    assert await world.ok("close") == {"status": "CLOSED"}

    # Then the close sent a release of its own, and a late answer to the first changes nothing
    await worker.send(worker.requests[1])
    assert await world.ok("close") == {"status": "CLOSED"}
    assert worker.kinds() == ["tick", "release", "release"]


async def test_a_close_that_means_another_life_leaves_this_one_alone(world: Caller) -> None:
    error = await world.refused("close", life="ar-world-1-create-00")

    assert (error["code"], error["field"]) == ("invalid_state", "life")
    assert (await world.state())["status"] == "ACTIVE"
    life = (await world.state())["life"]
    assert await world.ok("close", life=life) == {"status": "CLOSED"}


async def test_an_old_close_sent_again_does_not_touch_the_next_life(
    world: Caller, worker: ScriptedWorker
) -> None:
    # Given a session that was closed by one command and created again
    await world.answer_to(await world.send("close", "the-close"))
    await world.ok("create", model="scripted")

    # When that very command comes once more
    answer = await world.answer_to(await world.send("close", "the-close"))
    await world.ok("next_chunk")

    # Then it is answered as before and nothing else happens
    assert answer["result"] == {"status": "CLOSED"}
    assert (await world.state())["status"] == "ACTIVE"
    await no_tombstone(world)


async def test_the_history_says_who_and_why(world: Caller) -> None:
    await world.ok("close", reason="end of the day")

    entries = await world.client.xrange(f"{world.base}:history")
    moves = [(f[b"trigger"].decode(), f[b"reason"].decode()) for _, f in entries]
    assert moves == [("created", ""), ("close_requested", "end of the day"), ("cleanup_succeeded", "")]
    assert all(fields[b"by"].startswith(b"host ") for _, fields in entries)


async def test_a_worker_that_is_gone_for_good_counts_as_released(
    world: Caller, worker: ScriptedWorker, host: object
) -> None:
    # Given a session whose worker was forgotten, and a host that has been connected for long
    await worker.vanish()
    await world.client.zrem("wl:workers", "w0")
    host._connected_ms -= 3_600_000  # type: ignore[attr-defined]

    # Then a close needs nobody
    assert await world.ok("close") == {"status": "CLOSED"}
    assert worker.kinds() == []


async def test_a_close_that_lost_what_it_had_in_flight_begins_anew(
    broker: RealBroker, real: redis.asyncio.Redis, worker: ScriptedWorker
) -> None:
    # Given a session that somebody else has left CLOSING with nothing in flight
    world = Caller(real)
    async with running_host(broker.url):
        await world.ok("create", model="scripted")
        await world.ok("next_chunk")
        worker.on_request = lambda _: SILENCE
        first = await world.send("close")
        await worker.arrived(2)
    await real.hdel("wl:{world-1}:state", "inflight")
    worker.on_request = None

    # Then a close releases it, whoever waits for one is answered, and it is CLOSED once
    async with running_host(broker.url):
        assert await world.ok("close") == {"status": "CLOSED"}
        assert (await world.answer_to(first))["result"] == {"status": "CLOSED"}
        assert worker.kinds() == ["tick", "release", "release"]
        await check_invariants(real)


async def test_each_failure_makes_the_next_retry_due_later(
    broker: RealBroker, real: redis.asyncio.Redis, worker: ScriptedWorker
) -> None:
    # Given a first pause of 10 s and a longest of 40 s, each off by up to a quarter within these bounds
    world = Caller(real)
    async with running_host(broker.url, close_retry_first_ms=10_000, close_retry_longest_ms=40_000) as host:
        scripts, seen = host.services.scripts, []
        fail_close = scripts.fail_close

        async def look(*args: Any) -> Any:
            seen.append(await real.zscore("wl:tombstones", "world-1"))
            return await fail_close(*args)

        scripts.fail_close = look  # type: ignore[method-assign]
        await world.ok("create", model="scripted")
        worker.on_request = failing("kv_state", "can't free", kind="release", times=4)
        for shortest, longest in ((10_000, 12_500), (15_000, 25_000), (30_000, 40_000), (30_000, 40_000)):
            await world.refused("close")
            failed_ms = int((await world.state())["updated_at_ms"])

            # Then the tombstone index says when it is due, and has said so before the session was one
            due_ms = await real.zscore("wl:tombstones", "world-1")
            assert due_ms == seen[-1]
            assert shortest - 1_000 <= due_ms - failed_ms <= longest
        assert await world.ok("close") == {"status": "CLOSED"}
