"""The example of a package of one's own: installed as a user would, planned, checked, and run by the demo."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.broker import require_real_broker
from support.processes import base_env
from support.tree import REPOSITORY

EXAMPLE = REPOSITORY / "examples" / "write_a_pipeline"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the package was installed into, from a copy, offline."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    package = shutil.copytree(EXAMPLE, source / "package", ignore=shutil.ignore_patterns("__pycache__"))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    options = ["--disable-pip-version-check", "--target", str(target)]
    done = subprocess.run([*pip, *options, str(package)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return target


def run(installed: Path, *command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a command with the package in sight."""
    path = os.pathsep.join(filter(None, (str(installed), os.environ.get("PYTHONPATH"))))
    env = base_env() | {"PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=110, env=env, cwd=cwd
    )


def test_it_is_one_short_file() -> None:
    modules = list(EXAMPLE.glob("*.py"))
    assert [path.name for path in modules] == ["my_world.py"]
    assert len(modules[0].read_text(encoding="utf-8").splitlines()) < 80


def test_it_is_planned_without_torch(installed: Path) -> None:
    code = (
        "import sys; from actors.cli.main import run;"
        "status = run(['plan', '--model', 'mine', '--memory', '1GB', '--param', 'window_frames=9', '--json']);"
        "sys.exit('torch was imported' if 'torch' in sys.modules else status)"
    )
    done = run(installed, "-c", code)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["page_bytes"] == 2 * 144 * 2 * 16 * 4
    assert plan["managed_blocks"] == 16 * (3 + 9) + 3 + 2


def test_it_passes_every_check_of_the_contract(installed: Path) -> None:
    done = run(installed, "-m", "gpu_worker.conformance", "mine", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = {check["name"]: check["outcome"] for check in json.loads(done.stdout)["checks"]}
    assert found.pop("step_execution") == "not applicable"
    assert set(found.values()) == {"passed"}


@pytest.mark.processes
@pytest.mark.real_broker
def test_the_demo_walks_through_it(installed: Path, tmp_path: Path) -> None:
    require_real_broker()
    arguments = ("--model", "mine", "--chunks", "6", "--lockstep", "--out", str(tmp_path / "out"), "--json")
    done = run(installed, "-m", "actors.cli", "demo", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    chunks = json.loads(done.stdout)["chunks"]
    assert [chunk["index"] for chunk in chunks] == list(range(6))
    assert len({chunk["sha256"] for chunk in chunks}) == 6
    assert (tmp_path / "out" / "contact_sheet.png").stat().st_size > 0
