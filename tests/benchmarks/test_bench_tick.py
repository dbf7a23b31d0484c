"""The benchmark of a tick runs and reports what it promises; how fast things are is no test's business."""

import json
import subprocess
import sys

import pytest

from support.broker import require_real_broker
from support.tree import REPOSITORY

RATIOS = {
    "tick / bare chain",
    "tick / bare chain over wires",
    "tick / ping-pong",
    "rq simple / tick",
    "rq forking / tick",
    "5 / 1 idle",
}


@pytest.mark.processes
@pytest.mark.parametrize("as_json", [True, False], ids=["json", "table"])
def test_the_smallest_run_reports_times_ratios_and_traffic(as_json: bool) -> None:
    require_real_broker()
    options = ["--smoke", *(["--json"] if as_json else [])]

    done = subprocess.run(
        [sys.executable, REPOSITORY / "benchmarks" / "bench_tick.py", *options],
        capture_output=True,
        text=True,
        timeout=110,
    )

    assert done.returncode == 0, done.stderr
    if not as_json:
        assert "bare four-hop chain" in done.stdout
        return
    report = json.loads(done.stdout)
    assert set(report["ratios"]) == RATIOS
    assert all(figures["median_us"] > 0 for figures in report["times"].values())
    assert {"client", "host", "worker"} == set(report["traffic"]["sent"])
    assert report["traffic"]["sent"]["host"]["EVALSHA commit"] == 1.0
    assert report["machine"]["cpu"]
