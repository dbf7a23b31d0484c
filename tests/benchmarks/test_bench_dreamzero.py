"""The benchmark of a DreamZero observation runs and reports what it promises; how fast things are is no test's business."""

import json
import runpy
import subprocess
import sys

import pytest

from support.broker import require_real_broker
from support.tree import REPOSITORY

BENCHMARKS = REPOSITORY / "benchmarks"


@pytest.mark.processes
def test_the_smallest_run_reports_parts_ratios_and_a_negative_branch_that_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    require_real_broker()

    done = subprocess.run(
        [sys.executable, BENCHMARKS / "bench_dreamzero.py", "--smoke", "--json"],
        capture_output=True,
        text=True,
        timeout=110,
    )

    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert all(figures["median_us"] > 0 for figures in report["times"].values())
    assert set(report["ratios"]) == set(report["targets"])
    shares = report["shares of a tick"]
    assert sum(shares.values()) == pytest.approx(1)
    assert set(report["ms of an observation"]) == set(shares)
    work = report["work of a chunk"]
    assert 0 < work.pop("steps without a forward, step cache") < 1
    assert work.pop("pages of the positive branch, without guidance") in {1, 3, 5, 7}
    assert work == {
        "forwards, guided": 2 * (16 + 1),
        "forwards, without guidance": 16 + 1,
        "pages of the negative branch, without guidance": 0,
        "text and image caches of the negative branch, without guidance": 0,
        "steps of the sampler": 16,
    }

    monkeypatch.syspath_prepend(str(BENCHMARKS))
    runpy.run_path(str(BENCHMARKS / "tables.py"))["show"](json.loads(done.stdout))
    printed = capsys.readouterr().out
    assert "ms of an observation" in printed
    assert "pages of the negative branch, without guidance" in printed
