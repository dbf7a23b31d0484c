"""A close that failed is tried again until the worker releases, with nobody watching."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
import redis.asyncio

from actors.close_retry import close_command_id
from support.broker import RealBroker
from support.hosting import Caller, running_host
from support.invariants import check_invariants
from support.janitors import PERIOD_MS, Start, eventually, ready, releases, tombstone
from support.processes import Processes
from support.scripted_worker import ScriptedWorker


async def test_a_release_that_fails_three_times_is_retried_until_it_works(
    world: Caller, worker: ScriptedWorker, janitor: Start
) -> None:
    await ready(janitor())
    await tombstone(world, worker, failures=3)

    state = await world.until("CLOSED", 30)

    assert state["close_attempts"] == "3"
    assert releases(worker) == 4
    assert worker.runs.total() == len(worker.requests), "no request was carried out twice"
    moves = [entry["reason"] for entry in await history(world) if entry["trigger"] == "close_requested"]
    assert moves == ["close", *(f"retry {attempt} by the janitor" for attempt in (1, 2, 3))]
    await check_invariants(world.client)


async def test_each_retry_is_a_command_named_after_session_life_and_attempt(
    world: Caller, worker: ScriptedWorker, janitor: Start
) -> None:
    await ready(janitor())
    await tombstone(world, worker, failures=2)
    life = (await world.state())["life"]
    await world.until("CLOSED", 30)

    sent = [a["command_id"] for a in await world.answers() if a["command_id"].startswith("close-")]

    assert sent == [close_command_id(world.session_id, life, attempt) for attempt in (1, 2)]


async def test_two_janitors_at_once_do_what_one_does(
    world: Caller, worker: ScriptedWorker, janitor: Start
) -> None:
    await asyncio.gather(ready(janitor("--janitor-id", "a")), ready(janitor("--janitor-id", "b")))
    await tombstone(world, worker, failures=3)

    await world.until("CLOSED", 30)

    succeeded = [entry for entry in await history(world) if entry["trigger"] == "cleanup_succeeded"]
    assert len(succeeded) == 1
    assert releases(worker) == 4
    await check_invariants(world.client)


async def test_a_janitor_and_a_person_at_once_release_it_once(
    world: Caller, worker: ScriptedWorker, janitor: Start, processes: Processes, broker: RealBroker
) -> None:
    await ready(janitor())
    await tombstone(world, worker, failures=2)
    env = {"REDIS_URL": broker.url}
    people = [
        processes.script("worldline", "tombstones", "retry", "--all", env=env, name=f"person-{number}")
        for number in range(2)
    ]

    await world.until("CLOSED", 30)
    for person in people:
        assert await asyncio.to_thread(person.wait) in (0, 1)

    succeeded = [entry for entry in await history(world) if entry["trigger"] == "cleanup_succeeded"]
    assert len(succeeded) == 1
    assert releases(worker) == 3, "two that failed and the one that worked"
    await check_invariants(world.client)


async def test_a_broker_that_is_started_anew_under_it_is_taken_up_again(
    new_broker: Callable[..., RealBroker], janitor: Start
) -> None:
    own = new_broker()
    process = await ready(janitor(REDIS_URL=own.url))
    own.restart(kill=True)
    async with (
        ScriptedWorker(own.url) as worker,
        running_host(own.url, close_retry_first_ms=50, close_retry_longest_ms=200),
        redis.asyncio.Redis.from_url(own.url) as client,
    ):
        world = Caller(client)
        await tombstone(world, worker, failures=2)
        await world.until("CLOSED", 30)
        assert await asyncio.to_thread(process.stop) == 0


async def test_without_a_scheduler_the_doctor_says_so_and_closes_are_retried_all_the_same(
    world: Caller, worker: ScriptedWorker, janitor: Start, processes: Processes, broker: RealBroker
) -> None:
    env = {"REDIS_URL": broker.url}
    alone = await ready(janitor("--no-scheduler"))
    doctor = processes.script("worldline", "doctor", env=env)
    assert await asyncio.to_thread(doctor.wait) == 1
    assert "fail scheduler" in doctor.stdout
    assert "ok   janitors" in doctor.stdout

    await tombstone(world, worker, failures=3)
    await world.until("CLOSED", 30)
    assert alone.running

    await ready(janitor())
    await eventually(lambda: scheduled(processes, env), "a scheduler", 30)


async def test_after_the_limit_of_attempts_it_is_quiet_and_stays_visible(
    world: Caller, worker: ScriptedWorker, janitor: Start
) -> None:
    await ready(janitor(WORLDLINE_CLOSE_ATTEMPTS_LIMIT="3"))
    await tombstone(world, worker, failures=100)
    await eventually(lambda: failed_closes(world, 3), "three failures")
    await asyncio.sleep(4 * PERIOD_MS / 1000)

    state = await world.until("CLEANUP_FAILED")

    assert state["close_attempts"] == "3"
    assert releases(worker) == 3
    assert await world.client.zscore("wl:tombstones", world.session_id) is not None


async def test_a_retry_means_one_life_and_leaves_another_alone(
    world: Caller, worker: ScriptedWorker, janitor: Start
) -> None:
    await tombstone(world, worker, failures=1)
    await world.ok("close")
    await world.ok("create", model=worker.model)
    await world.client.zadd("wl:tombstones", {world.session_id: 1})

    await ready(janitor())
    await eventually(lambda: gone(world, "wl:tombstones"), "the entry of the old life")

    assert (await world.state())["status"] == "ACTIVE"


async def test_jobs_that_the_queue_lost_are_made_again(
    world: Caller, worker: ScriptedWorker, janitor: Start, new_broker: Callable[..., RealBroker]
) -> None:
    jobs = new_broker()
    await ready(janitor(WORLDLINE_JOBS_URL=jobs.url))
    await tombstone(world, worker, failures=100)
    with jobs.client() as queue:
        await eventually(lambda: queue.keys("rq:job:close-*"), "a job")
        queue.flushdb()
    worker.on_request = None

    await world.until("CLOSED", 30)


async def test_without_a_queue_the_close_is_sent_at_once(
    world: Caller, worker: ScriptedWorker, janitor: Start
) -> None:
    await ready(janitor(WORLDLINE_JOBS_URL="redis://127.0.0.1:1/0"))
    await tombstone(world, worker, failures=3)

    await world.until("CLOSED", 30)

    assert releases(worker) == 4


async def test_a_janitor_killed_in_the_middle_of_a_job_leaves_nothing_undone(
    world: Caller, worker: ScriptedWorker, janitor: Start, new_broker: Callable[..., RealBroker]
) -> None:
    jobs = new_broker()
    first = await ready(janitor(WORLDLINE_JOBS_URL=jobs.url))
    await tombstone(world, worker, failures=1)
    with jobs.client() as queue:
        # The job reads, then waits with its write for the broker: there it is killed.
        await world.client.execute_command("CLIENT", "PAUSE", "3000", "WRITE")
        await eventually(lambda: b"started" in statuses(queue), "a job in hand")
        first.kill()
        await world.client.execute_command("CLIENT", "UNPAUSE")
        assert b"started" in statuses(queue), "the queue still believes that somebody does it"
    assert (await world.state())["status"] == "CLEANUP_FAILED"

    await ready(janitor(WORLDLINE_JOBS_URL=jobs.url))
    await world.until("CLOSED", 30)

    assert releases(worker) == 2
    await check_invariants(world.client)


async def test_a_command_that_was_answered_without_a_release_does_not_block_the_retries(
    world: Caller, worker: ScriptedWorker, janitor: Start
) -> None:
    await tombstone(world, worker, failures=1)
    life = (await world.state())["life"]
    answer = '{"command_id":"x","ok":false,"error":{"code":"command_poisoned","message":"","field":null}}'
    await world.client.hset(f"{world.base}:answered", close_command_id(world.session_id, life, 1), answer)

    await ready(janitor())

    await world.until("CLOSED", 30)


async def test_while_no_host_lives_nothing_piles_up(
    broker: RealBroker, real, worker: ScriptedWorker, janitor: Start
) -> None:
    world = Caller(real)
    async with running_host(broker.url, close_retry_first_ms=50, close_retry_longest_ms=50, lease_ms=1_000):
        await tombstone(world, worker, failures=1)
    process = await ready(janitor())
    await asyncio.sleep(4 * PERIOD_MS / 1000)

    assert await real.xlen(world.inbox) == 0

    async with running_host(broker.url):
        await world.until("CLOSED", 30)
    assert await asyncio.to_thread(process.stop) == 0


async def test_the_janitor_ends_in_order_and_says_who_it_was(
    world: Caller, janitor: Start, broker: RealBroker
) -> None:
    process = await ready(janitor("--janitor-id", "night-shift"))
    assert await world.client.zscore("wl:janitors", "night-shift") is not None

    status = await asyncio.to_thread(process.stop)

    assert status == 0
    assert await world.client.zscore("wl:janitors", "night-shift") is None
    assert process.children() == []


async def test_the_janitor_runs_no_child_process_and_never_loads_torch(
    world: Caller, worker: ScriptedWorker, janitor: Start
) -> None:
    process = await ready(janitor())
    await tombstone(world, worker, failures=1)
    await world.until("CLOSED", 30)

    assert process.children() == []
    maps = await asyncio.to_thread(Path(f"/proc/{process.pid}/maps").read_text)
    assert "torch" not in maps


def test_a_broker_that_is_not_there_is_told_at_the_start(processes: Processes) -> None:
    process = processes.script("worldline", "janitor", env={"REDIS_URL": "redis://127.0.0.1:1/0"})

    assert process.wait() == 69
    assert "broker" in process.stderr


@pytest.mark.parametrize(
    ("variable", "value"), [("WORLDLINE_JANITOR_ID", "a b"), ("WORLDLINE_CLOSE_ATTEMPTS_LIMIT", "0")]
)
def test_a_bad_setting_is_named(processes: Processes, variable: str, value: str) -> None:
    process = processes.script("worldline", "janitor", env={variable: value})

    assert process.wait() == 78
    assert variable in process.stderr


# --- helpers
async def history(world: Caller) -> list[dict[str, str]]:
    entries = await world.client.xrange(f"{world.base}:history")
    return [{k.decode(): v.decode() for k, v in fields.items()} for _, fields in entries]


async def failed_closes(world: Caller, count: int) -> bool:
    return (await world.state()).get("close_attempts") == str(count)


async def gone(world: Caller, index: str) -> bool:
    return await world.client.zscore(index, world.session_id) is None


def statuses(queue: redis.Redis) -> list[bytes | None]:
    return [queue.hget(key, "status") for key in queue.keys("rq:job:*")]


async def scheduled(processes: Processes, env: dict[str, str]) -> bool:
    doctor = processes.script("worldline", "doctor", env=env)
    await asyncio.to_thread(doctor.wait)
    return "ok   scheduler" in doctor.stdout
