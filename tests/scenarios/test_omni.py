"""Sessions whose worker drives an AsyncOmni engine, here a double in the published shapes: host and worker on a real
broker, and the worker's process by its command."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from gpu_worker.omni_engine import OmniTickEngine
from support.broker import RealBroker
from support.hosting import Caller, running_host
from support.omni_doubles import STAGE, AsyncOmniDouble, envelope, output_for, setup_for
from support.processes import Process, Processes
from support.worker_runner import WorkerRunner

TESTS = str(Path(__file__).resolve().parents[1])


@pytest.fixture
def omni() -> AsyncOmniDouble:
    return AsyncOmniDouble()


@pytest.fixture
async def world(
    broker: RealBroker, real: redis.asyncio.Redis, omni: AsyncOmniDouble
) -> AsyncIterator[Caller]:
    """A session on a host and a worker over the double; an event waits."""
    engine = OmniTickEngine(omni.model, lambda: setup_for(omni), capacity=2)
    workers = WorkerRunner(broker.url)
    async with running_host(broker.url):
        await workers(engine=engine, model=omni.model)  # type: ignore[arg-type]
        caller = Caller(real)
        await caller.ok("create", model=omni.model, prompt="a quiet valley")
        await caller.accept(7, "a storm")
        yield caller
        await workers.end()
    engine.stop()


async def released(omni: AsyncOmniDouble, session_id: str = "world-1") -> None:
    async with asyncio.timeout(5):
        while ("close", session_id) not in omni.runner.calls:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "changed",
    [{"applied_event_ids": [8, 7]}, {"request_id": "another"}],
    ids=lambda changed: next(iter(changed)),
)
async def test_malformed_metadata_fails_the_session_and_commits_nothing(
    world: Caller, omni: AsyncOmniDouble, changed: dict[str, Any]
) -> None:
    # Given a session whose model answers with metadata that is none of the tick
    omni.answers = lambda tick: [output_for(tick, multimodal_output=envelope(tick, **changed))]
    before = await world.state()

    # When a chunk is asked for
    error = await world.refused("next_chunk")

    # Then the session is FAILED, nothing is committed, the event still waits, and the engine let go of it
    after = await world.until("FAILED")
    assert error["code"] == after["failure_code"] == "metadata_mismatch"
    for name in ("chunk_index", "event_floor", "prompt", "controls", "last_request_id"):
        assert after.get(name) == before.get(name), name
    assert await world.chunks() == []
    assert await world.pending() == 1
    await released(omni)
    assert (await world.refused("next_chunk"))["code"] == "invalid_state"
    assert len(omni.generated) == 1


async def test_a_failed_session_begins_anew_after_a_reset(world: Caller, omni: AsyncOmniDouble) -> None:
    good = omni.answers
    omni.answers = lambda tick: [output_for(tick, multimodal_output=None)]
    await world.refused("next_chunk")
    await world.until("FAILED")
    omni.answers = good

    await world.ok("reset")
    await world.accept(8, "sunshine")
    chunk = await world.ok("next_chunk")

    assert (chunk["chunk_index"], chunk["applied_event_ids"]) == (0, [8])
    assert omni.sent()["prompt"] == "sunshine"


async def test_chunks_are_committed_and_a_close_reaches_the_engines_workers(
    world: Caller, omni: AsyncOmniDouble
) -> None:
    first = await world.ok("next_chunk")
    second = await world.ok("next_chunk")
    await world.ok("close")

    assert [first["chunk_index"], second["chunk_index"]] == [0, 1]
    assert [first["applied_event_ids"], second["applied_event_ids"]] == [[7], []]
    assert first["sha256"] != second["sha256"]
    assert [call["request_id"] for call in omni.generated] == [
        omni.sent(0)["request_id"],
        omni.sent(1)["request_id"],
    ]
    assert omni.runner.calls == [("close", "world-1")]
    assert [rpc["stage_ids"] for rpc in omni.rpcs] == [[STAGE]]


# --- the process
def start(processes: Processes, broker: RealBroker, folder: Path, package: str, **env: str) -> Process:
    (folder / "vllm_omni.py").write_text(package)
    paths = f"{folder}:{TESTS}"
    return processes.module(
        "gpu_worker",
        *("--engine", "vllm-omni", "--model", "omni-world", "--session-capacity", "3"),
        env={"REDIS_URL": broker.url, "PYTHONPATH": paths} | env,
    )


def test_the_command_serves_the_named_engine(
    processes: Processes, broker: RealBroker, tmp_path: Path
) -> None:
    worker = start(
        processes,
        broker,
        tmp_path,
        "from support.omni_doubles import AsyncOmniDouble as AsyncOmni\n",
        WORLDLINE_OMNI_SETUP="support.omni_doubles:setup",
    )
    assert worker.wait_for_line("^ready .*").group() == "ready worker=gpu-0 model=omni-world capacity=3"
    assert worker.stop() == 0


def test_without_the_package_the_command_ends_with_78(
    processes: Processes, broker: RealBroker, tmp_path: Path
) -> None:
    worker = start(processes, broker, tmp_path, "raise ImportError('not installed')\n")
    assert worker.wait() == 78
    assert "worldline[vllm-omni] [engine]" in worker.stderr
    assert "Traceback" not in worker.stderr
