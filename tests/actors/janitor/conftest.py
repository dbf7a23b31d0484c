"""A host in the test's loop, a scripted worker, and janitors as real processes."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio

from support.broker import RealBroker
from support.hosting import Caller, running_host
from support.janitors import PERIOD_MS, Start
from support.processes import Process, Processes
from support.scripted_worker import ScriptedWorker


@pytest.fixture
async def worker(broker: RealBroker) -> AsyncIterator[ScriptedWorker]:
    async with ScriptedWorker(broker.url, name="gpu-0") as running:
        yield running


@pytest.fixture
async def host(broker: RealBroker, worker: ScriptedWorker) -> AsyncIterator[Any]:
    """Retries are due soon: the pause grows from 50 ms to 200 ms."""
    async with running_host(
        broker.url, close_retry_first_ms=50, close_retry_longest_ms=200, lease_ms=1_000
    ) as running:
        yield running


@pytest.fixture
def world(host: Any, real: redis.asyncio.Redis) -> Caller:
    return Caller(real)


@pytest.fixture
def janitor(broker: RealBroker, processes: Processes) -> Start:
    """Starts a janitor process: `await ready(janitor(WORLDLINE_JOBS_URL=...))`."""

    def start(*options: str, **env: str) -> Process:
        usual = {
            "REDIS_URL": broker.url,
            "WORLDLINE_RECONCILE_MS": str(PERIOD_MS),
            "WORLDLINE_LEASE_MS": "1000",
        }
        return processes.script("worldline", "janitor", *options, env=usual | env)

    return start
