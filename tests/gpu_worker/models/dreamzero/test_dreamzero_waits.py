"""The steps of an observation never wait for the device; the step cache does, once a forward."""

import torch

from gpu_worker.models.dreamzero.step_cache import StepCache
from gpu_worker.models.dreamzero.transformer import Flow
from support.device_reads import DeviceReads
from support.dreamzero_model import random_latents
from support.dreamzero_ranks import Life, Steps

LAYER_NUMBERS = "gpu_worker/kv/layer.py"
"""Reads the numbers of the layers, which are tensors for the compiler's sake and never on a device."""


def test_steps_read_nothing_back() -> None:
    life = Life("float32", 5.0, None)
    life.run()
    steps = Steps(life)

    with DeviceReads(host=[LAYER_NUMBERS]) as reads:
        steps.run()

    assert (reads.found, reads.operators) == ([], [])


def test_a_step_cache_reads_one_number_a_forward() -> None:
    cache = StepCache()
    flows = [Flow(random_latents(2, seed), None) for seed in range(3)]

    with DeviceReads() as reads:
        for flow in flows:
            if cache.reuse() is None:
                cache.keep(flow)

    assert reads.found == ["gpu_worker/models/dreamzero/step_cache.py __float__"] * 2
    assert torch.equal(flows[0].video, random_latents(2, 0))
