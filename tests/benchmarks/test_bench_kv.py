"""The benchmarks of paged KV run and report what they promise; how fast things are is no test's business."""

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from support.tree import REPOSITORY

BENCHMARKS = REPOSITORY / "benchmarks"

ALLOWED = """
import sys

class Refusing:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in {"actors", "redis", "rq", "pydantic", "orjson", "structlog", "rich", "PIL", "transitions"}:
            raise ImportError(f"{name} is not to be imported here")
        return None

sys.meta_path.insert(0, Refusing())
sys.argv = ["gpu_kv.py", "--json"]
import runpy
runpy.run_path(PATH, run_name="__main__")
print([name for name in sys.modules if name.startswith("gpu_worker.") and not name.startswith("gpu_worker.kv")],
      file=sys.stderr)
"""


def run(*arguments: Any) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def smallest(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The report of the smallest run, and its plot."""
    plot = tmp_path_factory.mktemp("bench") / "history.png"
    return json.loads(run(BENCHMARKS / "bench_kv.py", "--smoke", "--json", "--plot", plot).stdout), plot


def test_the_smallest_run_reports_times_ratios_and_history(smallest: tuple[dict[str, Any], Path]) -> None:
    report, plot = smallest
    assert all(figures["median_us"] > 0 for figures in report["times"].values())
    assert set(report["ratios"]) == {
        "paged commit / plain attention",
        "paged denoise pass / plain attention",
        "paged commit / cat and slice",
        "K and V made ready, paged / cat and slice",
        "chunk 30 / chunk 10",
        "book-keeping, 80 layers / 1",
        "book-keeping, chunk 30 / 10",
    }
    assert list(report["recomputed_over_paged_by_chunks"]) == ["2", "12"]
    assert report["allocated_by_100_chunks_of_book_keeping"]["torch_operators"] == 0
    assert report["machine"]["threads"] == 1
    with Image.open(plot) as picture:
        assert picture.size == (640, 360)
        assert len(picture.getcolors(1 << 16) or ()) > 2, "there is something on it"


def test_a_report_is_shown_as_tables(
    smallest: tuple[dict[str, Any], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    runpy.run_path(str(BENCHMARKS / "kv_report.py"))["show"](smallest[0])
    printed = capsys.readouterr().out
    assert "paged: a commit" in printed
    assert "12 chunks  ##" in printed


def test_the_gpu_benchmark_runs_at_tiny_size_on_the_cpu_with_torch_and_numpy_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = str(BENCHMARKS / "gpu_kv.py")
    done = run("-c", ALLOWED.replace("PATH", repr(path)))
    report = json.loads(done.stdout)
    if report["device"] != "cpu":
        pytest.skip("there is a CUDA device: this run was the real one")
    assert done.stderr.strip() == "[]", "of the worker, only its KV was imported"
    assert {"plain", "cat_and_slice", "sdpa commit", "sdpa probe", "gathered probe"} <= set(report["rows"])
    assert set(report["refused"]) == {"flex", "flash_attn"}
    assert report["largest_difference_from_sdpa"] == {"sdpa": 0.0}
    assert all(row["median_ms"] > 0 for row in report["rows"].values())
    assert report["ceilings"].keys() == {"bytes_per_s", "operations_per_s"}

    runpy.run_path(path)["show"](report)
    printed = capsys.readouterr().out
    assert "TFLOP/s" in printed
    assert "flash_attn: not measured" in printed
