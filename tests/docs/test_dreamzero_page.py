"""What the page on DreamZero shows runs, on a tiny checkpoint: its file, its program, its commands, its figures."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis.asyncio

from contracts.capacity import MemoryModel
from contracts.kv_spec import ARDiffusionKVCacheSpec, resolve_kv_config
from gpu_worker.__main__ import load_installed_model
from gpu_worker.config import WorkerSettings
from gpu_worker.models.dreamzero.config import DreamZeroTopology
from gpu_worker.models.dreamzero.deployment import Deployment
from gpu_worker.models.dreamzero.spec import kv_spec, owned_bytes
from gpu_worker.worker import Worker
from support.broker import RealBroker
from support.dreamzero_checkpoint import published_config, statistics, write_json
from support.dreamzero_worlds import cameras, png, shared_checkpoint
from support.hosting import Caller, running_host
from support.tree import REPOSITORY
from support.worker_runner import QUICK

PAGE = (REPOSITORY / "docs" / "dreamzero.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return str(found)


def commands(beginning: str) -> list[str]:
    """The lines of the page's consoles that begin so."""
    return re.findall(rf"^\$ ({beginning} .*)$", PAGE, re.MULTILINE)


async def run(command: list[str], folder: Path, url: str) -> str:
    """What a command prints; it must succeed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WORLDLINE_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = kept | {"PATH": path, "PYTHONPATH": str(REPOSITORY), "REDIS_URL": url}
    done = await asyncio.to_thread(
        subprocess.run, command, cwd=folder, env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return str(done.stdout)


@pytest.fixture
async def url(broker: RealBroker, tmp_path: Path) -> AsyncIterator[str]:
    """A broker with a host and a worker over a tiny checkpoint of the same robot; its pictures lie in a folder."""
    for view, picture in cameras(0).items():
        (tmp_path / f"{view}.jpg").write_bytes(png(picture))
    settings = WorkerSettings(
        **QUICK | {"model": "dreamzero", "checkpoint": str(shared_checkpoint()), "redis_url": broker.url},
        device_memory="1GiB",
        device="cpu",
        dtype="float32",
    )
    engine = load_installed_model(settings)  # here: its imports would take longer than its heartbeats may
    ready = asyncio.Event()
    worker = Worker(settings, lambda: engine, on_ready=lambda _: ready.set())
    async with running_host(broker.url):
        task = asyncio.create_task(worker.run())
        await asyncio.wait_for(ready.wait(), 20)
        yield broker.url
        worker.stop()
        await asyncio.wait_for(task, 20)


async def test_the_program_prints_actions(url: str, real: redis.asyncio.Redis, tmp_path: Path) -> None:
    assert (await run([sys.executable, "-c", block("python")], tmp_path, url)).split("\n")[0] == "(4, 8)"
    assert (await Caller(real, "arm-7").state())["status"] == "CLOSED"


async def test_the_commands_answer_one_observation(
    url: str, real: redis.asyncio.Redis, tmp_path: Path
) -> None:
    stored = [re.fullmatch(r"redis-cli -x SET (\S+) < (\S+)", line) for line in commands("redis-cli")]
    assert len(stored) == 3
    for found in stored:
        assert found is not None
        await real.set(found[1], (tmp_path / found[2]).read_bytes())
    printed = [await run(["bash", "-c", line], tmp_path, url) for line in commands("worldline sessions")]

    (chunk,) = json.loads(printed[2])
    assert chunk["applied_event_ids"] == [0]
    assert (await Caller(real, "arm-7").state())["status"] == "CLOSED"


def test_the_file_describes_a_robot_of_the_published_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "worldline.json").write_text(block("json"), encoding="utf-8")
    write_json(tmp_path / "config.json", published_config(DreamZeroTopology()))
    write_json(tmp_path / "experiment_cfg" / "metadata.json", statistics())

    found = Deployment.load(tmp_path)

    assert found.topology == DreamZeroTopology()
    assert found.embodiment.views == {"wrist", "left", "right"}
    assert (found.embodiment.state_width, found.embodiment.action_width) == (8, 8)


def test_its_bytes_are_those_of_the_plan() -> None:
    rows = re.findall(r"^\| [^|]+ \| ([\d,]{7,}) \|$", PAGE, re.MULTILINE)
    owned = owned_bytes()
    one, halved = memory(kv_spec({})), memory(kv_spec({"cfg_parallel": 2}))
    published = memory(replace(kv_spec({}), model_owned_state_bytes_per_session=632_291_328))

    assert [int(row.replace(",", "")) for row in rows] == [
        one.page_bytes,
        one.cross_bytes_per_session,
        owned.encoder_history,
        owned.condition + owned.latents,
        one.required_bytes(1),
    ]
    for plan in (halved, published):
        assert f"{plan.required_bytes(1):,}" in PAGE


def memory(spec: ARDiffusionKVCacheSpec) -> MemoryModel:
    return MemoryModel.of(spec, resolve_kv_config(spec), itemsize=2)
