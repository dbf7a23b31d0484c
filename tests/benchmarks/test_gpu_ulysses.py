"""The benchmark of several devices says why it skips, and runs tiny over gloo."""

import json
import subprocess
import sys

import pytest
import torch

from support.processes import base_env
from support.tree import REPOSITORY

SCRIPT = str(REPOSITORY / "benchmarks" / "gpu_ulysses.py")


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=base_env())


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are two devices")
def test_it_says_why_it_measures_nothing() -> None:
    done = bench()

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("skipped: ")
    assert "2 are needed" in done.stdout


def test_two_processes_on_the_cpu_make_what_one_makes() -> None:
    done = bench("--tiny", "--eager-only", "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)

    assert figures["finite"] is True
    assert len(figures["relative_l2"]) == 3
    assert max(figures["relative_l2"]) <= 1e-5
    assert figures["several"]["collectives_a_chunk"] == {"all_to_all": 5 * 4 * 2, "all_gather": 5}
    assert figures["several"]["planned_session_bytes"] < figures["one"]["planned_session_bytes"]
    assert set(figures["speed_up"]) == {"eager"}
