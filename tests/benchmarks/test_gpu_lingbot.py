"""The benchmark of the transformer runs without a CUDA device and reports what it promises."""

import json
import runpy
import sys

import pytest
import torch

from support.tree import REPOSITORY

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="at full size it takes minutes; run it by hand"
)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs the script as a command, in this process; returns what it printed."""

    def run(*options: str) -> str:
        torch._dynamo.reset()
        monkeypatch.setattr(sys, "argv", ["gpu_lingbot.py", *options])
        monkeypatch.setattr(sys, "path", list(sys.path))
        runpy.run_path(str(REPOSITORY / "benchmarks" / "gpu_lingbot.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


# The tracer of the compiler warns about its own use of a deprecated name, not about ours.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_a_tiny_model_runs_eagerly_and_compiled(bench) -> None:
    figures = json.loads(bench("--json"))

    assert figures["finite"] is True
    assert set(figures["chunk_ms"]) == {"eager", "compiled"}
    assert len(figures["first_chunks_ms"]) == 7
    assert figures["public_ms"] is None
    assert figures["bytes"]["planned_session"] > figures["bytes"]["planned_without_vae"] > 0


def test_the_table_names_model_and_size(bench) -> None:
    text = bench("--eager-only")

    assert "32 x 48, float32\nsdpa attention" in text
    assert "latents finite: True" in text
    assert "compiled" not in text
