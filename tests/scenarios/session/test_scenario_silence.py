"""A worker that has taken a request and says nothing: it is asked again, under a higher fence."""

import pytest
import redis.asyncio

from support.broker import RealBroker
from support.hosting import Caller, running_host
from support.invariants import check_invariants
from support.scripted_worker import SILENCE, ScriptedWorker


@pytest.mark.parametrize("op", ["next_chunk", "reset", "close"])
async def test_a_request_without_an_answer_is_sent_again_after_both_limits(
    broker: RealBroker, real: redis.asyncio.Redis, worker: ScriptedWorker, op: str
) -> None:
    world = Caller(real)
    async with running_host(broker.url, queue_limit_ms=300, execution_limit_ms=100):
        await world.ok("create", model="scripted")
        await world.ok("next_chunk")

        # Given a request that the worker took and forgot
        worker.on_request = lambda _: SILENCE
        command = await world.send(op)
        await worker.arrived(2)
        worker._records.clear()
        worker.on_request = None

        # Then it comes once more, and its answer counts
        assert (await world.answer_to(command))["ok"]
        _, first, second, *_ = worker.requests
        assert second["request_id"] == first["request_id"]
        assert int(second["fence"]) > int(first["fence"])
        await check_invariants(real)
