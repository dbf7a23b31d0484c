"""These tests need a CUDA device; without one they are skipped, and say so."""

import pytest
import torch


@pytest.fixture(scope="session")
def cuda() -> torch.device:
    """The first CUDA device."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda", 0)
