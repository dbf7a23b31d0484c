"""The job queue: what a job is called, how often it is there, and what running it does."""

import json

import pytest
import redis.asyncio
from rq import Queue
from rq.job import Job
from rq.serializers import JSONSerializer

from actors.broker_pool import Broker
from actors.config import JanitorSettings
from actors.janitor.closes import CloseJob, run_close
from actors.jobs import JobQueue, close_session
from support.broker import RealBroker
from support.hosting import Caller
from support.janitors import tombstone
from support.scripted_worker import ScriptedWorker

LONGEST = "a:b.c-_" * 18 + "zz"


@pytest.fixture
def settings(broker: RealBroker) -> JanitorSettings:
    return JanitorSettings(REDIS_URL=broker.url)  # type: ignore[call-arg]


@pytest.fixture
def queue(broker: RealBroker, settings: JanitorSettings) -> Queue:
    return Queue(settings.keys.jobs_queue, connection=broker.client(), serializer=JSONSerializer)


@pytest.mark.parametrize("session_id", ["w", LONGEST, ":.:.", "-", "A" * 128, "a" * 128])
async def test_every_legal_session_id_becomes_a_job_once(
    session_id: str, settings: JanitorSettings, queue: Queue
) -> None:
    job, jobs = CloseJob(session_id, "life-1", 1), JobQueue(settings)

    assert await jobs.enqueue(job, 0)
    assert await jobs.enqueue(job, 0)
    assert await jobs.enqueue(CloseJob(session_id, "life-1", 2), 60_000)

    assert queue.job_ids == [job.job_id]
    assert len(queue.scheduled_job_registry.get_job_ids()) == 1
    jobs.close()
    queue.connection.close()


async def test_a_job_is_json_and_nothing_is_unpickled(settings: JanitorSettings, queue: Queue) -> None:
    jobs = JobQueue(settings)
    await jobs.enqueue(CloseJob("world-1", "life-1", 3), 0)

    job = Job.fetch(queue.job_ids[0], connection=queue.connection, serializer=JSONSerializer)

    assert json.loads(job.data)[0] == "actors.jobs.close_session"
    assert (job.func_name, list(job.args)) == ("actors.jobs.close_session", ["world-1", "life-1", 3])
    assert job.func is close_session
    jobs.close()
    queue.connection.close()


async def test_a_queue_that_is_away_is_said_to_be(broker: RealBroker) -> None:
    settings = JanitorSettings(REDIS_URL=broker.url, jobs_url="redis://127.0.0.1:1/0")  # type: ignore[call-arg]
    jobs = JobQueue(settings)

    assert await jobs.enqueue(CloseJob("world-1", "life-1", 1), 0) is False
    jobs.close()


@pytest.mark.parametrize("change", ["attempt", "life", "session"])
async def test_a_job_that_was_overtaken_sends_nothing(
    change: str, world: Caller, worker: ScriptedWorker, settings: JanitorSettings
) -> None:
    await tombstone(world, worker, failures=1)
    life = (await world.state())["life"]
    job = {
        "attempt": CloseJob(world.session_id, life, 7),
        "life": CloseJob(world.session_id, "another", 1),
        "session": CloseJob("nobody", life, 1),
    }[change]

    async with Broker(settings=settings) as broker:
        assert await run_close(broker, job) == "overtaken"
        assert (await world.state())["status"] == "CLEANUP_FAILED"
        assert await run_close(broker, CloseJob(world.session_id, life, 1)) == "sent"
    await world.until("CLOSED")


async def test_a_job_without_a_host_sends_nothing(
    real: redis.asyncio.Redis, settings: JanitorSettings
) -> None:
    await real.hset("wl:config", mapping={"partitions": 8, "schema_version": 1})
    await real.hset(
        "wl:{world-1}:state", mapping={"status": "CLEANUP_FAILED", "life": "l", "close_attempts": 1}
    )

    async with Broker(settings=settings) as broker:
        assert await run_close(broker, CloseJob("world-1", "l", 1)) == "no host"
    assert await real.xlen(Caller(real).inbox) == 0
