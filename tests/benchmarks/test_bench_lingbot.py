"""The benchmark of a LingBot World tick runs and reports what it promises; how fast things are is no test's business."""

import json
import runpy
import subprocess
import sys

import pytest

from support.broker import require_real_broker
from support.tree import REPOSITORY

BENCHMARKS = REPOSITORY / "benchmarks"


@pytest.mark.processes
def test_the_smallest_run_reports_shares_ratios_and_work_saved(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    require_real_broker()

    done = subprocess.run(
        [sys.executable, BENCHMARKS / "bench_lingbot.py", "--smoke", "--json"],
        capture_output=True,
        text=True,
        timeout=110,
    )

    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert all(figures["median_us"] > 0 for figures in report["times"].values())
    assert set(report["ratios"]) == set(report["targets"])
    shares = report["shares of a tick"]
    outside = shares.pop("outside the transformer")
    assert sum(shares.values()) == pytest.approx(1)
    assert outside == pytest.approx(1 - shares["transformer: five passes"])
    work = report["work of a chunk"]
    assert work.pop("chunks equal bit by bit in all three worlds") > work.pop(
        "chunks until the encoder rests"
    )
    assert work == {
        "passes of the transformer": 5,
        "modulations of a block, as it is": 1,
        "modulations of a block, for each pass": 5,
        "encoder calls, while the image passes through": 3,
        "encoder calls, at rest": 0,
    }

    monkeypatch.syspath_prepend(str(BENCHMARKS))
    runpy.run_path(str(BENCHMARKS / "tables.py"))["show"](json.loads(done.stdout))
    printed = capsys.readouterr().out
    assert "shares of a tick" in printed
    assert "outside the transformer" in printed
