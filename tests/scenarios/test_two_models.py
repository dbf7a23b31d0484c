"""Two robots and a reference world share a broker with two workers of different models, all of them real processes."""

import asyncio

import numpy as np
import pytest
from redis.asyncio import Redis

from actors.client import SessionClient
from contracts.errors import NoCapacityError, SessionStateError
from contracts.events import ARDiffusionSessionEvent
from contracts.lifecycle import Status
from contracts.payloads import decode_payload
from support.broker import RealBroker
from support.dreamzero_worlds import cameras, observed, png, shared_checkpoint
from support.processes import Process, Processes

LOST_AFTER_MS = 2_000
ROBOT = {"model": "dreamzero", "reducer": "dreamzero-observation", "params": {"num_inference_steps": 1}}


def start(processes: Processes, broker: RealBroker) -> dict[str, Process]:
    """A host, and a worker of each model; what they are called is the worker's id."""
    env = {
        "REDIS_URL": broker.url,
        "WORLDLINE_WORKER_LOST_AFTER_MS": str(LOST_AFTER_MS),
        "WORLDLINE_DEVICE": "cpu",
    }
    host = processes.script("worldline", "host", env=env)
    options = ("--memory", "1GiB", "--dtype", "float32")
    workers = {
        "arms": ("--model", "dreamzero", "--checkpoint", str(shared_checkpoint())),
        "worlds": ("--model", "reference"),
    }
    running = {
        name: processes.script("worldline-worker", "--id", name, *model, *options, env=env)
        for name, model in workers.items()
    }
    host.wait_for_line("^ready")
    for name, process in running.items():
        assert f"worker={name}" in process.wait_for_line("^ready .*", timeout=90).group()
    return running


async def act(session: SessionClient, client: Redis, number: int) -> np.ndarray:
    """The actions that observation `number` is answered with."""
    for view, picture in cameras(number).items():
        await client.set(f"camera:{number}:{view}", png(picture))
    await session.accept_event(ARDiffusionSessionEvent(number, controls=(observed(number),)))
    chunk = await session.next_chunk()
    actions = decode_payload(await session.read(chunk.payload))["actions"]
    assert actions.shape == (4, 8)
    return actions


async def failed(session: SessionClient) -> str | None:
    async with asyncio.timeout(30):
        while (state := await session.state()).status is not Status.FAILED:
            await asyncio.sleep(0.05)
    return state.failure_code


@pytest.mark.processes
@pytest.mark.timeout(200)
async def test_each_session_lives_on_the_worker_of_its_model_and_dies_with_no_other(
    broker: RealBroker, processes: Processes
) -> None:
    workers = await asyncio.to_thread(start, processes, broker)
    client = Redis.from_url(broker.url)
    async with (
        SessionClient("robot-1", broker.url) as one,
        SessionClient("robot-2", broker.url) as two,
        SessionClient("valley", broker.url) as valley,
    ):
        for robot in (one, two):
            await robot.create(**ROBOT)
        await valley.create(model="reference", prompt="a quiet valley", seed=7)
        first = [await act(robot, client, 0) for robot in (one, two)]
        assert np.array_equal(*first), "the same observation from the same seed"
        assert not np.array_equal(await act(one, client, 1), await act(two, client, 2))
        await valley.next_chunk()

        placed = {session.session_id: (await session.state()).worker for session in (one, two, valley)}
        assert placed == {"robot-1": "arms", "robot-2": "arms", "valley": "worlds"}

        workers["arms"].kill()
        assert [await failed(robot) for robot in (one, two)] == ["worker_lost"] * 2
        for robot in (one, two):
            with pytest.raises(SessionStateError, match="failed"):
                await robot.next_chunk()
        assert [(await valley.next_chunk()).chunk_index for _ in range(2)] == [1, 2]
        assert (await valley.state()).status is Status.ACTIVE

        async with SessionClient("robot-3", broker.url) as late:
            with pytest.raises(NoCapacityError):
                await late.create(**ROBOT)
    await client.aclose()
