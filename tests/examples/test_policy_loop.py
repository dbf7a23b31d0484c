"""The policy loop: one command, twenty ticks through real processes, a picture of what the joints did."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gpu_worker.models.dreamzero.spec import kv_spec
from support.broker import require_real_broker
from support.processes import base_env
from support.tree import REPOSITORY

EXAMPLE = REPOSITORY / "examples" / "policy_loop"


def test_its_files_are_short() -> None:
    lengths = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in EXAMPLE.glob("*.py")}
    assert set(lengths) == {"arm.py", "policy_loop.py", "tiny_checkpoint.py"}
    assert max(lengths.values()) <= 100


@pytest.mark.processes
@pytest.mark.timeout(200)
@pytest.mark.real_broker
def test_twenty_ticks_move_the_arm_and_its_picture_is_written(tmp_path: Path) -> None:
    require_real_broker()
    picture = tmp_path / "joints.png"
    command = [sys.executable, str(EXAMPLE / "policy_loop.py"), "--out", str(picture)]

    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=base_env(), cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert "the weights are random" in done.stdout
    ticks = re.findall(r"^tick +(\d+)  8 actions in \d+ ms  \[([^\]]+)\]$", done.stdout, re.MULTILINE)
    assert [int(number) for number, _ in ticks] == list(range(20))
    assert len({angles for _, angles in ticks}) > 10, "the arm moves"
    assert "160 actions applied" in done.stdout
    with Image.open(picture) as image:
        assert image.size == (720, 360)
        colours = {tuple(pixel) for pixel in np.asarray(image.convert("RGB")).reshape(-1, 3).tolist()}
    assert {(0xD1, 0x49, 0x5B), (0x00, 0x79, 0x8C), (0xED, 0xAE, 0x49), (0x30, 0x63, 0x8E)} <= colours


def test_the_checkpoint_can_be_written_alone_and_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tiny_checkpoint.py", str(tmp_path / "tiny")])
    runpy.run_path(str(EXAMPLE / "tiny_checkpoint.py"), run_name="__main__")

    assert "random weights" in capsys.readouterr().out
    spec = kv_spec({"checkpoint": str(tmp_path / "tiny")})
    assert (spec.tokens_per_frame, spec.num_layers) == (8, 2)
