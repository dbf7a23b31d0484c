"""A worker of two ranks, started by torchrun, beside a worker of one: the same chunks, and what happens when a rank dies."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis.asyncio
from PIL import Image

from contracts.lingbot import CAMERA_ACTIONS_SCHEMA, CAMERA_TRACK
from contracts.payloads import PayloadStore, decode_frames, decode_payload
from gpu_worker.config import WorkerSettings
from gpu_worker.worker import Worker
from support.broker import RealBroker
from support.hosting import Caller, running_host
from support.lingbot_engine import MODEL, make
from support.lingbot_worlds import shared_checkpoint
from support.processes import Process, Processes
from support.worker_runner import QUICK

TESTS = str(Path(__file__).resolve().parents[1])
LOST_AFTER_S = 15
PATIENCE_S = 2 * LOST_AFTER_S
LOST = {"worker_lost", "worker_restarted"}
KEYS = {"mode": "state", "transitions": [{"actions": ["w", "l"]}]}


def start_group(processes: Processes, broker: RealBroker, *options: str) -> Process:
    """Two ranks over the tiny checkpoint, as `gpu-0`; torchrun starts them a second time if one dies."""
    env = {
        "REDIS_URL": broker.url,
        "PYTHONPATH": TESTS,
        "WORLDLINE_MODEL": MODEL,
        "WORLDLINE_CHECKPOINT": str(shared_checkpoint()),
        "WORLDLINE_AR_DIFFUSION_HEIGHT": "32",
        "WORLDLINE_AR_DIFFUSION_WIDTH": "48",
        "WORLDLINE_DEVICE": "cpu",
        "WORLDLINE_WORKER_LOST_AFTER_MS": str(1000 * LOST_AFTER_S),
    }
    launcher = str(Path(sys.executable).parent / "torchrun")
    command = (launcher, "--nproc-per-node", "2", *options, "-m", "gpu_worker")
    return processes.start(*command, "--engine", "support.lingbot_engine:make", env=env)


def pid_of_rank(group: Process, rank: int) -> int:
    for pid in group.children():
        if f"RANK={rank}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes().replace(b"GROUP_RANK", b""):
            return pid
    pytest.fail(f"rank {rank} does not run\n{group.report()}")


async def ready(group: Process, times: int = 1) -> None:
    async with asyncio.timeout(60):
        while group.stdout.count("ready worker=gpu-0") < times:
            assert group.running, group.report()
            await asyncio.sleep(0.05)


@pytest.fixture
async def solo(broker: RealBroker) -> AsyncIterator[Worker]:
    """A worker of one process, `gpu-1`, in the loop of the test."""
    values = QUICK | {"model": MODEL, "redis_url": broker.url, "checkpoint": str(shared_checkpoint())}
    size = {"ar_diffusion_height": 32, "ar_diffusion_width": 48}
    settings = WorkerSettings(**(values | size | {"worker_id": "gpu-1"}))
    engine = make(settings)
    started = asyncio.Event()
    worker = Worker(settings, lambda: engine, on_ready=lambda _: started.set())
    task = asyncio.create_task(worker.run())
    await asyncio.wait_for(started.wait(), 20)
    yield worker
    worker.stop()
    await asyncio.wait_for(task, 20)


class World(Caller):
    """One session and what it has made."""

    def __init__(self, client: redis.asyncio.Redis, session_id: str) -> None:
        super().__init__(client, session_id)
        self.store = PayloadStore(client)

    async def create(self) -> str:
        """Begins it; returns the worker that it was placed on."""
        params = {"images": ["redis:picture"]}
        create: dict[str, Any] = {"model": MODEL, "reducer": "lingbot-camera", "seed": 7, "params": params}
        await self.ok("create", **create, prompt="rain over the valley")
        await self.walk(1)
        return (await self.state())["worker"]

    async def walk(self, event_id: int, prompt: str | None = None) -> None:
        await self.accept(
            event_id, prompt, {"track": CAMERA_TRACK, "schema": CAMERA_ACTIONS_SCHEMA, "data": KEYS}
        )

    async def chunk(self) -> tuple[np.ndarray, np.ndarray]:
        """Latents and pictures of the next chunk."""
        await self.ok("next_chunk")
        entry = (await self.chunks())[-1]
        latents = decode_payload(await self.store.read(entry["payload"]))["latents"]
        return latents, decode_frames(await self.store.read(entry["frames"]))


@pytest.mark.timeout(240)
async def test_two_ranks_make_the_chunks_of_one_and_a_rank_that_dies_takes_its_own_worker_s_sessions_alone(
    processes: Processes, broker: RealBroker, real: redis.asyncio.Redis, solo: Worker, tmp_path: Path
) -> None:
    group = start_group(processes, broker, "--max-restarts", "1")
    Image.new("RGB", (64, 40), "teal").save(tmp_path / "picture.png")
    await real.set("picture", (tmp_path / "picture.png").read_bytes())
    async with running_host(broker.url):
        await ready(group)
        placed: dict[str, list[World]] = {"gpu-0": [], "gpu-1": []}
        for number in range(4):
            world = World(real, f"world-{number}")
            placed[await world.create()].append(world)
        (shared, idle), (alone, _) = placed["gpu-0"], placed["gpu-1"]

        # Given the same session on both, and another prompt in its third chunk.
        first = None
        for index in range(4):
            if index == 2:
                for world in (shared, alone):
                    await world.walk(2, "snow falls over the river")
            (latents, pictures), (expected, drawn) = await shared.chunk(), await alone.chunk()
            assert np.linalg.norm(latents - expected) <= 1e-5 * np.linalg.norm(expected)
            assert np.abs(pictures.astype(int) - drawn).max() <= 1
            first = latents if first is None else first
        await idle.chunk()

        # When a rank dies with a tick in hand.
        tick = await shared.send("next_chunk")
        await asyncio.sleep(0.05)
        os.kill(pid_of_rank(group, 1), signal.SIGKILL)

        # Then both sessions of that worker say so, with a code, and the other worker goes on.
        answer = await shared.answer_to(tick, PATIENCE_S)
        assert answer["ok"] or answer["error"]["code"] in LOST
        assert (await idle.until("FAILED", PATIENCE_S))["failure_code"] == "worker_lost"
        failed = await shared.until("FAILED", PATIENCE_S)
        assert failed["failure_code"] in LOST
        await alone.chunk()
        assert (await alone.state())["status"] == "ACTIVE"

        # And the group that was started again serves them.
        await ready(group, times=2)
        assert (await shared.ok("reset"))["chunk_index"] == 0
        await shared.walk(3, "rain over the valley")
        assert (await shared.state())["worker"] == "gpu-0"
        latents, _ = await shared.chunk()
        assert np.array_equal(latents, first)

        # An orderly end finishes what is in hand.
        tick = await shared.send("next_chunk")
        await asyncio.sleep(0.05)
        ranks = [pid_of_rank(group, rank) for rank in (0, 1)]
        group.send(signal.SIGTERM)
        assert (await shared.answer_to(tick))["ok"]
        await asyncio.to_thread(group.wait)
        assert not any(os.path.exists(f"/proc/{pid}") for pid in ranks)  # noqa: ASYNC240 - of no disk
        assert "gone" not in group.stderr.rpartition("death signal")[2]
