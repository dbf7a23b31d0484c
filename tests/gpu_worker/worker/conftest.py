"""A worker in the loop of the test, on the real server, and somebody who plays its host."""

from collections.abc import AsyncIterator

import pytest
import redis.asyncio

from support.broker import RealBroker
from support.fake_host import FakeHost
from support.worker_runner import WorkerRunner


@pytest.fixture
async def start_worker(broker: RealBroker) -> AsyncIterator[WorkerRunner]:
    """`running = await start_worker(capacity=2)`; ended after the test."""
    runner = WorkerRunner(broker.url)
    yield runner
    await runner.end()


@pytest.fixture
async def host(real: redis.asyncio.Redis) -> FakeHost:
    """The host of that worker."""
    return FakeHost(real)
