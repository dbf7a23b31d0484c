"""A session whose worker drives an Omni engine, through a real broker."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio

from gpu_worker.omni_engine import OmniSetup, OmniTickEngine
from support.broker import RealBroker
from support.hosting import Caller, running_host
from support.omni_doubles import AsyncOmni, omni_over_runner, output_of
from support.worker_runner import WorkerRunner


@pytest.fixture
async def start_worker(broker: RealBroker) -> AsyncIterator[WorkerRunner]:
    runner = WorkerRunner(broker.url)
    yield runner
    await runner.end()


def engine_over(omni: AsyncOmni) -> OmniTickEngine:
    return OmniTickEngine("noop", lambda: OmniSetup(omni, omni.default_sampling_params_list, 0), capacity=1)


async def test_chunks_are_committed_and_the_close_reaches_the_engines_worker(
    broker: RealBroker, real: redis.asyncio.Redis, start_worker: WorkerRunner
) -> None:
    omni, worker = omni_over_runner()
    await start_worker(engine=engine_over(omni))  # type: ignore[arg-type]
    async with running_host(broker.url):
        caller = Caller(real)
        await caller.ok("create", model="noop", seed=7, prompt="a lake")
        await caller.event(1, prompt="a storm")
        chunks = [await caller.ok("next_chunk") for _ in range(2)]
        assert [chunk["applied_event_ids"] for chunk in chunks] == [[1], []]
        assert worker.model_runner.session_ids == ("world-1",)
        await caller.ok("close")
    assert worker.model_runner.session_ids == ()
    assert [call["prompt"] for call in omni.generated] == [{"prompt": "a storm"}] * 2


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"metadata": {}}, "multimodal_output.metadata"),
        ({"metadata": {"ar_diffusion": {"session_id": "world-1"}}}, "malformed chunk metadata"),
    ],
    ids=["missing", "malformed"],
)
async def test_malformed_metadata_fails_the_session_and_commits_nothing(
    broker: RealBroker,
    real: redis.asyncio.Redis,
    start_worker: WorkerRunner,
    metadata: dict[str, Any],
    message: str,
) -> None:
    omni = AsyncOmni(lambda tick, params: [output_of(tick, multimodal_output=metadata)])
    await start_worker(engine=engine_over(omni))  # type: ignore[arg-type]
    async with running_host(broker.url):
        caller = Caller(real)
        await caller.ok("create", model="noop")
        await caller.event(1, prompt="a storm")
        error = await caller.refused("next_chunk")
        state = await caller.until("FAILED")
    assert (error["code"], state["failure_code"]) == ("metadata_mismatch", "metadata_mismatch")
    assert message in error["message"]
    assert (state["chunk_index"], await caller.chunks()) == ("0", [])
    assert omni.called[0]["method"] == "close_ar_diffusion_session"
