"""A worker that says nothing, or something about another request: it is asked again, or not listened to."""

import asyncio
import json
from collections.abc import Callable

import pytest
import redis.asyncio

from support.broker import RealBroker
from support.hosting import Caller, running_host
from support.invariants import check_invariants
from support.scripted_worker import SILENCE, ScriptedWorker, output_of


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


@pytest.mark.parametrize("wrong", ["request_id", "fence"])
async def test_a_reply_that_differs_in_request_id_or_fence_does_not_count(
    world: Caller, worker: ScriptedWorker, wrong: str
) -> None:
    # Given a tick in flight
    worker.on_request = lambda _: SILENCE
    command = await world.send("next_chunk")
    request = await worker.arrived(1)

    # When a failure comes under another request id, or another fence
    change = {"request_id": request["request_id"][:-1] + "x", "fence": int(request["fence"]) - 1}[wrong]
    late = {"code": "model_error", "message": "late", "field": None, "retryable": False}
    await worker.send(request, **{wrong: change, "error": late})
    async with asyncio.timeout(5):
        while any(b"reply" in fields for _, fields in await world.client.xrange(world.inbox)):
            await asyncio.sleep(0.005)

    # Then nothing comes of it, and the right one counts
    assert (await world.state())["status"] == "ACTIVE"
    await worker.send(request, output=output_of(json.loads(request["tick"])))
    assert (await world.answer_to(command))["ok"]


@pytest.mark.parametrize("op", ["next_chunk", "reset", "close"])
async def test_what_is_in_flight_is_sent_again_after_a_reconnect(
    new_broker: Callable[..., RealBroker], op: str
) -> None:
    server = new_broker()
    async with ScriptedWorker(server.url) as worker, running_host(server.url):
        # Given a request that the worker took and forgot, long before any limit is over
        world = Caller(worker.client)
        await world.ok("create", model="scripted")
        await world.ok("next_chunk")
        worker.on_request = lambda _: SILENCE
        command = await world.send(op)
        await worker.arrived(2)
        await worker.stop()
        worker._records.clear()
        worker.on_request = None

        # When the broker is away for a moment
        server.restart()
        await worker.client.connection_pool.disconnect()
        worker.start()

        # Then it comes once more, and its answer counts
        assert (await world.answer_to(command))["ok"]
        _, first, second, *_ = worker.requests
        assert second["request_id"] == first["request_id"]
        assert int(second["fence"]) > int(first["fence"])
        await check_invariants(worker.client)
