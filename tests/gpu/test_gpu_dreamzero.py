"""A tiny DreamZero on a CUDA device: observations with all their steps against the CPU, and where the host waits."""

import warnings

import numpy as np
import pytest
import torch

from gpu_worker.models.dreamzero.clip import ClipImageTower
from support.dreamzero_model import TINY, fill, random_weights, shapes_of
from support.dreamzero_ranks import Life, Steps
from support.lingbot_model import seeded

TOLERANCE = 1e-3


@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_observations_on_a_device_are_those_of_the_cpu(cuda: torch.device, scale: float) -> None:
    expected = Life("float32", scale, None).run()

    with torch.inference_mode():
        found = Life("float32", scale, None, cuda).run()

    for got, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, wanted, atol=TOLERANCE, rtol=TOLERANCE)


def test_the_steps_of_an_observation_never_wait_for_the_device(cuda: torch.device) -> None:
    with torch.inference_mode():
        life = Life("bfloat16", 5.0, None, cuda)
        life.run()
        steps = Steps(life)
        steps.run()

        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                steps.run()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    waits = [one for one in caught if "synchronizing CUDA operation" in str(one.message)]
    assert not waits, [f"{one.filename}:{one.lineno}" for one in waits]


def test_the_image_tower_on_a_device_is_that_of_the_cpu(cuda: torch.device) -> None:
    tower = ClipImageTower(TINY.clip)
    fill(tower, random_weights(shapes_of(tower)))
    picture = torch.rand(1, 3, 32, 48, generator=seeded()) * 2 - 1
    expected = tower(picture)

    found = tower.to(cuda)(picture)

    torch.testing.assert_close(found.cpu(), expected, atol=TOLERANCE, rtol=TOLERANCE)
