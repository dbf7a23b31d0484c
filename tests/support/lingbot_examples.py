"""Real trajectories, where a machine has them: `WORLDLINE_TEST_DATA`, or `shared/data` beside the repository."""

import os
from pathlib import Path

import pytest

from support.tree import REPOSITORY


def examples_root() -> Path:
    """The folder that holds one folder an example; skips the test where there is none."""
    named = os.environ.get("WORLDLINE_TEST_DATA")
    root = Path(named) if named else REPOSITORY.parent / "shared" / "data" / "lingbot_examples"
    if not (root / "00" / "poses.npy").exists():
        pytest.skip("no real trajectories here; WORLDLINE_TEST_DATA names the folder that holds 00/poses.npy")
    return root
