"""What the page on LingBot World shows runs, on a tiny checkpoint: its commands, its program, its figures."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis.asyncio
from PIL import Image

from gpu_worker.config import WorkerSettings
from support.broker import RealBroker
from support.hosting import Caller
from support.lingbot_hosting import lingbot_stack
from support.tree import REPOSITORY

PAGE = (REPOSITORY / "docs" / "lingbot_world.md").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent


def commands(*, beginning: str) -> list[str]:
    """The lines of the page's consoles that begin so."""
    lines = [line[2:] for block in consoles() for line in block if line.startswith(f"$ {beginning}")]
    assert lines, f"the page shows no {beginning}"
    return lines


def consoles() -> list[list[str]]:
    return [block.splitlines() for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)]


def shown_output(command: str) -> list[str]:
    (block,) = (block for block in consoles() if f"$ {command}" in block)
    return block[block.index(f"$ {command}") + 1 :]


async def run(command: list[str] | str, folder: Path, **variables: str) -> str:
    """What a command prints; it must succeed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WORLDLINE_")}
    paths = {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "COLUMNS": "200",
    }
    argv = ["bash", "-c", command] if isinstance(command, str) else command
    done = await asyncio.to_thread(
        subprocess.run,
        argv,
        cwd=folder,
        env=kept | paths | variables,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return str(done.stdout)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a reader of the page would be: an image and a recorded walk."""
    Image.effect_noise((64, 40), 80).convert("RGB").save(tmp_path / "image.jpg")
    poses = np.tile(np.eye(4, dtype=np.float32), (18, 1, 1))
    poses[:, 2, 3] = np.linspace(0, 1, 18)
    np.save(tmp_path / "poses.npy", poses)
    np.save(tmp_path / "intrinsics.npy", np.tile(np.float32([500, 500, 416, 240]), (18, 1)))
    return tmp_path


@pytest.fixture
async def url(broker: RealBroker, folder: Path) -> AsyncIterator[str]:
    """A broker with a host, and the page's worker over a tiny checkpoint."""
    async with lingbot_stack(broker.url, lingbot_action_root=str(folder)):
        yield broker.url


async def test_the_commands_drive_a_world_with_a_prompt_switch_and_a_script(
    url: str, real: redis.asyncio.Redis, folder: Path
) -> None:
    (store,) = commands(beginning="redis-cli")
    stored = re.fullmatch(r"redis-cli -x SET (\S+) < (\S+)", store)
    assert stored is not None
    await real.set(stored[1], (folder / stored[2]).read_bytes())
    chunks: list[dict[str, Any]] = []
    for command in commands(beginning="worldline sessions"):
        printed = await run(command, folder, REDIS_URL=url)
        if command.endswith("--json"):
            chunks = json.loads(printed)

    assert [chunk["chunk_index"] for chunk in chunks] == [2, 3]
    assert [chunk["applied_event_ids"] for chunk in chunks] == [[2, 3], []]
    states = [await Caller(real, name).state() for name in ("my-world", "other-world")]
    assert [state["status"] for state in states] == ["CLOSED", "CLOSED"]


async def test_the_program_walks_along_a_trajectory_and_saves_pictures(url: str, folder: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)

    await run([sys.executable, "-c", program], folder, REDIS_URL=url)

    names = sorted(name for name in os.listdir(folder) if name.endswith(".png"))
    assert names == [f"000-{n:02}.png" for n in range(9)] + [f"001-{n:02}.png" for n in range(12)]
    with Image.open(folder / names[-1]) as picture:
        assert picture.size == (48, 32)


async def test_the_plan_and_the_size_are_as_printed(folder: Path) -> None:
    for command in [*commands(beginning="worldline plan"), *commands(beginning="python")]:
        printed = await run(command, folder)
        assert [line.rstrip() for line in printed.splitlines()] == shown_output(command)


async def test_the_table_of_bytes_is_the_plans(folder: Path) -> None:
    rows = re.findall(r"^\| (\d+) x (\d+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 3
    for height, width, *counts in rows:
        argv = "worldline plan --model lingbot-world --memory 500GB --fraction 0.9 --json"
        size = f" --param ar_diffusion_height={height} --param ar_diffusion_width={width}"
        plan = json.loads(await run(argv + size, folder))
        required = plan["required_bytes"]
        assert [int(count.replace(",", "")) for count in counts] == [
            plan["page_bytes"],
            required["1"],
            required["2"],
        ]


async def test_the_worker_knows_the_options_that_are_shown(folder: Path) -> None:
    (command,) = commands(beginning="worldline-worker")
    known = await run("worldline-worker --help", folder)

    assert set(re.findall(r"--[a-z-]+", command)) <= set(re.findall(r"--[a-z-]+", known))
    fields = {f"WORLDLINE_{name.upper()}" for name in WorkerSettings.model_fields}
    assert set(re.findall(r"WORLDLINE_[A-Z_]+[A-Z]", PAGE)) <= fields
