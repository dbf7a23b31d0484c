"""A DreamZero worker of two ranks, started by torchrun: each runs a branch of the guidance, and a robot can't tell."""

import asyncio
import sys
from pathlib import Path

import numpy as np
import pytest
from redis.asyncio import Redis

from actors.client import SessionClient
from contracts.events import ARDiffusionSessionEvent
from contracts.payloads import decode_payload
from support.broker import RealBroker
from support.dreamzero_worlds import Robots, cameras, observed, png, shared_checkpoint
from support.processes import Processes

OBSERVATIONS = range(5)  # over the end of a rollout


def start(processes: Processes, broker: RealBroker) -> None:
    """A host, and two ranks over the tiny checkpoint."""
    env = {
        "REDIS_URL": broker.url,
        "WORLDLINE_MODEL": "dreamzero",
        "WORLDLINE_CHECKPOINT": str(shared_checkpoint()),
        "WORLDLINE_DEVICE": "cpu",
        "WORLDLINE_DEVICE_MEMORY": "1GiB",
        "WORLDLINE_DTYPE": "float32",
    }
    host = processes.script("worldline", "host", env=env)
    launcher = str(Path(sys.executable).parent / "torchrun")
    group = processes.start(launcher, "--nproc-per-node", "2", "-m", "gpu_worker", env=env)
    host.wait_for_line("^ready")
    group.wait_for_line("ready worker=gpu-0 model=dreamzero", timeout=110)


async def act(session: SessionClient, client: Redis, number: int) -> np.ndarray:
    for view, picture in cameras(number).items():
        await client.set(f"camera:{number}:{view}", png(picture))
    await session.accept_event(ARDiffusionSessionEvent(number, controls=(observed(number),)))
    chunk = await session.next_chunk()
    return decode_payload(await session.read(chunk.payload))["actions"]


@pytest.mark.processes
@pytest.mark.timeout(200)
async def test_two_ranks_answer_what_one_process_answers(broker: RealBroker, processes: Processes) -> None:
    await asyncio.to_thread(start, processes, broker)
    params = {"num_inference_steps": 2}
    client = Redis.from_url(broker.url)
    async with SessionClient("robot", broker.url) as session:
        await session.create(model="dreamzero", reducer="dreamzero-observation", params=params)
        found = [await act(session, client, number) for number in OBSERVATIONS]
        await session.close()
    await client.aclose()

    alone = Robots()
    for number in OBSERVATIONS:
        expected = alone.act(number, **params).payload["actions"]
        np.testing.assert_allclose(found[number], expected, atol=1e-5)
