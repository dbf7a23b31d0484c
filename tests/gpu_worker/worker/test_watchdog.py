"""The watchdog: when it ends a worker, what it answers, and when it holds still."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from contracts.keys import Keys
from contracts.watchdog_scripts import InHand, TimeOut, WatchdogScripts
from gpu_worker.config import WorkerSettings
from gpu_worker.guard import assignment_of
from gpu_worker.watchdog import Assignment, Patience, Watchdog
from support.broker import RealBroker, wait_until
from support.fake_host import FakeHost
from support.hosting import Caller, running_host
from support.invariants import check_invariants
from support.processes import REPOSITORY, Process, Processes

TESTS = str(REPOSITORY / "tests")
ASSIGNMENT = Assignment("redis://x", "wl", "gpu-0", "start-1", 100, 50, 10, "info", "console")
BUSY = InHand(now_ms=1_000, holder="start-1", entry_id="5-0", busy_since_ms=1_000)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def patience(clock: Clock) -> Patience:
    return Patience(ASSIGNMENT, clock)


# ------------------------------------------------------------------------------------------------ judging
@pytest.mark.parametrize(("now_ms", "overdue"), [(1_100, False), (1_101, True)])
def test_the_limit_counts_from_the_mark_by_the_brokers_clock(
    patience: Patience, now_ms: int, overdue: bool
) -> None:
    assert patience.overdue(replace(BUSY, now_ms=now_ms)) is overdue


def test_an_idle_worker_is_left_alone(patience: Patience) -> None:
    patience.overdue(BUSY)
    assert not patience.overdue(InHand(99_000, "start-1"))
    assert not patience.overdue(InHand(99_000, "start-1", "6-0"))


@pytest.mark.parametrize("holder", ["", "start-1", "start-2"])
def test_a_mark_that_ran_out_with_the_heartbeat_is_remembered_for_its_request(
    patience: Patience, holder: str
) -> None:
    patience.overdue(BUSY)
    late = InHand(1_101, holder, "5-0")

    assert patience.overdue(late)
    assert not patience.overdue(replace(late, entry_id="6-0"))


def test_the_mark_of_another_start_says_nothing(patience: Patience) -> None:
    assert not patience.overdue(replace(BUSY, holder="start-2", now_ms=9_000))


@pytest.mark.parametrize("how", ["no answer", "a late answer"])
def test_after_an_outage_the_worker_has_time_to_send_what_it_finished(
    patience: Patience, clock: Clock, how: str
) -> None:
    patience.overdue(BUSY)
    late = replace(BUSY, now_ms=9_000)
    if how == "no answer":
        patience.blind()
    else:
        clock.now_s += 5
    assert not patience.overdue(late)

    clock.now_s += 0.06
    assert patience.overdue(late)


def test_it_looks_often_enough_for_short_limits_and_seldom_enough_for_long_ones() -> None:
    polls = [
        assignment_of(WorkerSettings(execution_limit_ms=limit), "i").poll_ms for limit in (100, 4_000, 30_000)
    ]
    assert polls == [50, 200, 1_000]
    assert Assignment.from_json(ASSIGNMENT.to_json()) == ASSIGNMENT


# ------------------------------------------------------------------------------------------------ scripts
@pytest.fixture
async def scripts(broker_client: redis.asyncio.Redis) -> WatchdogScripts:
    return WatchdogScripts(broker_client, Keys())


async def in_hand(client: redis.asyncio.Redis, holder: str = "start-1") -> str:
    """A request that was delivered, and a worker that says it is busy; returns the entry."""
    keys = Keys().worker("gpu-0")
    await client.hset(keys.info, mapping={"incarnation": holder, "busy_since": "7"})
    await client.xgroup_create(keys.requests, "worker", id="0", mkstream=True)
    entry = await client.xadd(keys.requests, {"kind": "tick"})
    await client.xreadgroup("worker", "gpu-0", {keys.requests: ">"})
    return entry.decode()


async def test_a_worker_without_stream_or_group_or_request_is_idle(scripts: WatchdogScripts) -> None:
    assert (await scripts.in_hand("gpu-0")).entry_id is None
    await scripts.client.xadd(Keys().worker("gpu-0").requests, {"kind": "tick"})
    seen = await scripts.in_hand("gpu-0")
    assert (seen.entry_id, seen.holder, seen.now_ms > 0) == (None, "", True)


async def test_what_is_in_hand_is_the_oldest_that_was_delivered(scripts: WatchdogScripts) -> None:
    entry = await in_hand(scripts.client)
    await scripts.client.xadd(Keys().worker("gpu-0").requests, {"kind": "tick"})

    seen = await scripts.in_hand("gpu-0")

    assert (seen.entry_id, seen.holder, seen.busy_since_ms) == (entry, "start-1", 7)


@pytest.mark.parametrize("holder", ["start-1", ""])
async def test_a_request_in_hand_is_answered_acknowledged_and_deleted_once(
    scripts: WatchdogScripts, holder: str
) -> None:
    entry, keys = await in_hand(scripts.client, holder or "x"), Keys().worker("gpu-0")
    if not holder:
        await scripts.client.delete(keys.info)
    end = lambda: scripts.time_out("gpu-0", "start-1", entry, ("inbox", "{}"))  # noqa: E731

    assert [await end(), await end()] == [TimeOut.TIMED_OUT, TimeOut.ANSWERED]
    assert [fields for _, fields in await scripts.client.xrange("inbox")] == [{b"reply": b"{}"}]
    assert await scripts.client.xlen(keys.requests) == 0
    assert (await scripts.in_hand("gpu-0")).entry_id is None
    assert not await scripts.client.hexists(keys.info, "busy_since")


async def test_without_an_answer_the_request_stays_for_the_next_start(scripts: WatchdogScripts) -> None:
    entry = await in_hand(scripts.client)

    assert await scripts.time_out("gpu-0", "start-1", entry, None) is TimeOut.TIMED_OUT
    assert (await scripts.in_hand("gpu-0")).entry_id == entry


async def test_the_request_of_another_start_is_not_touched(scripts: WatchdogScripts) -> None:
    entry = await in_hand(scripts.client, "start-2")

    assert await scripts.time_out("gpu-0", "start-1", entry, ("inbox", "{}")) is TimeOut.TAKEN
    assert await scripts.client.exists("inbox") == 0
    assert (await scripts.in_hand("gpu-0")).entry_id == entry


async def test_a_request_that_is_answered_in_the_very_moment_costs_no_life(
    host: FakeHost, broker: RealBroker
) -> None:
    entry = await in_hand(host.client)
    killed: list[bool] = []
    dog = Watchdog(replace(ASSIGNMENT, url=broker.url, grace_ms=0), lambda: killed.append(True))
    look = dog._scripts.entry

    async def finished_meanwhile(*args: str) -> dict[bytes, bytes]:
        fields = await look(*args)
        await host.client.xack(host.worker.requests, "worker", entry)
        await host.client.xdel(host.worker.requests, entry)
        return fields

    dog._scripts.entry = finished_meanwhile  # type: ignore[method-assign]
    assert not await dog._look()
    assert killed == []
    await dog._client.aclose()


# ------------------------------------------------------------------------------------------------ the process
def environment(url: str, **more: str) -> dict[str, str]:
    quick = {
        "WORLDLINE_HEARTBEAT_MS": "200",
        "WORLDLINE_WORKER_LOST_AFTER_MS": "60000",
        "WORLDLINE_BLOCK_MS": "300",
        "WORLDLINE_EXECUTION_LIMIT_MS": "2000",
    }
    return {"REDIS_URL": url, "PYTHONPATH": TESTS} | quick | more


def start(processes: Processes, url: str, **more: str) -> Process:
    engine = ("--engine", "support.noop_engine:make", "--model", "noop")
    worker = processes.module("gpu_worker", *engine, env=environment(url, **more))
    worker.wait_for_line("^ready worker=")
    return worker


def watchdog_of(worker: Process) -> int:
    return wait_until(
        lambda: next((pid for pid in worker.children() if b"watchdog" in _line(pid)), None), what="a watchdog"
    )


def _line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def gone(pid: int) -> bool:
    return _line(pid) == b""


def ignores_signals(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    ignored = int(re.search(r"^SigIgn:\s*(\w+)$", status, re.MULTILINE)[1], 16)
    return bool(ignored >> (signal.SIGTERM - 1) & 1)


HANGS = {
    "in a blocking call": ({"hang_at": 1}, {}),
    "and lets nothing else run": ({"hold_at": 1}, {}),
    "before the model is called": ({}, {"WORLDLINE_FAILPOINTS": "worker.run.before=hang@3"}),
}


@pytest.mark.parametrize(("params", "env"), HANGS.values(), ids=HANGS.keys())
async def test_a_pipeline_that_hangs_costs_its_tick_the_others_their_memory_and_resets_bring_all_back(
    processes: Processes,
    broker: RealBroker,
    real: redis.asyncio.Redis,
    params: dict[str, Any],
    env: dict[str, str],
) -> None:
    # Given two sessions beyond chunk 0, one at chunk 0
    worker = await asyncio.to_thread(start, processes, broker.url, **env)
    hung, other, fresh = (Caller(real, name) for name in ("hung", "other", "fresh"))
    async with running_host(broker.url, worker_lost_after_ms=60_000):
        await hung.ok("create", model="noop", params=params)
        await other.ok("create", model="noop")
        await fresh.ok("create", model="noop")
        await other.ok("next_chunk")
        await hung.ok("next_chunk")

        # When a call never comes back
        error = (await hung.answer_to(await hung.send("next_chunk"), 60))["error"]

        # Then the worker is killed, the tick answered by its watchdog, and a new worker finds the rest lost
        assert error["code"] == "execution_timeout"
        assert await asyncio.to_thread(worker.wait) == -signal.SIGKILL
        await asyncio.to_thread(start, processes, broker.url)
        for caller, code in ((hung, "execution_timeout"), (other, "worker_lost")):
            state = await caller.until("FAILED")
            assert (state["failure_code"], state["chunk_index"]) == (code, "1")
        assert (await fresh.ok("next_chunk"))["chunk_index"] == 0

        for caller in (hung, other):
            await caller.ok("reset")
            assert (await caller.ok("next_chunk"))["chunk_index"] == 0
        for caller in (hung, other, fresh):
            await caller.ok("close")
        await check_invariants(real)


async def test_a_release_that_hangs_is_left_to_the_next_start_which_has_released(
    processes: Processes, broker: RealBroker, real: redis.asyncio.Redis
) -> None:
    env = {"WORLDLINE_FAILPOINTS": "worker.release.before=hang"}
    worker = await asyncio.to_thread(start, processes, broker.url, **env)
    world = Caller(real)
    async with running_host(broker.url, worker_lost_after_ms=60_000):
        await world.ok("create", model="noop")
        await world.ok("next_chunk")
        command = await world.send("close")
        assert await asyncio.to_thread(worker.wait) == -signal.SIGKILL

        await asyncio.to_thread(start, processes, broker.url)
        assert (await world.answer_to(command, 30))["ok"]
        await check_invariants(real)


async def test_long_ticks_within_the_limit_run_undisturbed_one_after_the_other(
    processes: Processes, broker: RealBroker, host: FakeHost
) -> None:
    worker = await asyncio.to_thread(start, processes, broker.url)
    watchdog_of(worker)
    world = await host.create("world-1", sleep_ms=600)
    for _ in range(4):
        assert (await host.chunk(world)).output is not None
    assert worker.running


async def test_what_was_finished_during_an_outage_is_sent_after_it(
    processes: Processes, new_broker: Any, tmp_path: Path
) -> None:
    broker = new_broker()
    worker = await asyncio.to_thread(start, processes, broker.url)
    await asyncio.to_thread(watchdog_of, worker)
    client = redis.asyncio.Redis.from_url(broker.url)
    host = FakeHost(client)
    world = await host.create("world-1", sleep_ms=800)
    await host.send(world.tick())
    await asyncio.sleep(0.3)
    broker.stop()
    await asyncio.sleep(2.5)
    broker.start()
    await client.connection_pool.disconnect()

    assert (await host.reply(15)).output is not None
    await host.until(host.stream_is_empty)
    assert worker.running
    await client.aclose()


async def test_a_watchdog_ends_with_its_worker_however_that_ends_and_is_replaced_if_it_dies(
    processes: Processes, broker: RealBroker
) -> None:
    worker = await asyncio.to_thread(start, processes, broker.url)
    first = await asyncio.to_thread(watchdog_of, worker)
    await asyncio.to_thread(wait_until, lambda: ignores_signals(first), what="a watchdog that has begun")
    os.kill(first, signal.SIGTERM)
    os.kill(first, signal.SIGINT)
    await asyncio.sleep(0.5)
    assert not gone(first), "those are meant for the worker"

    os.kill(first, signal.SIGKILL)
    await asyncio.to_thread(wait_until, lambda: gone(first), what="the end of the first")
    second = await asyncio.to_thread(watchdog_of, worker)
    worker.kill()
    await asyncio.to_thread(wait_until, lambda: gone(second), what="the end with a worker that was killed")

    worker = await asyncio.to_thread(start, processes, broker.url)
    third = await asyncio.to_thread(watchdog_of, worker)
    assert await asyncio.to_thread(worker.stop) == 0
    await asyncio.to_thread(wait_until, lambda: gone(third), what="the end with a worker that ended")


def test_there_is_none_where_the_settings_say_so(processes: Processes, broker: RealBroker) -> None:
    worker = start(processes, broker.url, WORLDLINE_WATCHDOG="false")
    assert worker.children() == []


def test_it_brings_no_model_along() -> None:
    program = "import sys, gpu_worker.watchdog; print({'torch', 'numpy', 'rq'} & set(sys.modules))"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)

    assert done.stdout == "set()\n"
