"""Whole observations over pages, with all their steps, against a dense oracle that keeps no K and V."""

import re

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from support.dreamzero_model import (
    SIZES,
    array,
    arrays,
    random_action,
    random_condition,
    random_image,
    random_latents,
    random_state,
    random_text,
)
from support.dreamzero_oracles.rollout import DenseRollout, imagine
from support.dreamzero_ranks import SEEDS, STEPS, Life


class DenseLife:
    """`Life` without pages."""

    def __init__(self, weights: dict[str, np.ndarray], scale: float) -> None:
        self.scale = scale
        seeds = list(SEEDS.values()) if scale != 1 else list(SEEDS.values())[:1]
        self.branches = [
            DenseRollout(weights, SIZES, array(random_text(seed)), array(random_image())) for seed in seeds
        ]

    def run(self) -> list[np.ndarray]:
        made = self._rollout(0, blocks=2)
        for branch in self.branches:
            branch.reset(array(random_image(54)))
        return made + self._rollout(50, blocks=1)

    def _prefill(self, frames: int, latents_seed: int, start: int, seed: int) -> None:
        for branch in self.branches:
            branch.prefill(
                array(random_latents(frames, latents_seed)), array(random_condition(frames, seed + 2)), start
            )

    def _rollout(self, seed: int, blocks: int) -> list[np.ndarray]:
        self._prefill(1, seed, 0, seed)
        made: list[np.ndarray] = []
        for start in range(1, 1 + 2 * blocks, 2):
            if start > 1:
                self._prefill(2, seed + start, start - 2, seed)
            positive, *negative = self.branches
            made += imagine(
                positive,
                negative[0] if negative else None,
                scale=self.scale,
                start=start,
                condition=array(random_condition(2, seed + start + 2)),
                state=array(random_state(seed + start + 9)),
                video=array(random_latents(2, seed + start + 7)),
                action=array(random_action(seed + start + 8)),
                steps=STEPS,
            )
        return made


@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_observations_equal_the_dense_formulas_across_a_reset(scale: float) -> None:
    life = Life("float32", scale, None)

    found = life.run()

    expected = DenseLife(arrays(life.transformer), scale).run()
    assert len(found) == len(expected) == 6
    for got, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(got[0], wanted, atol=1e-5, rtol=1e-5)


# The tracer of the compiler warns about its own use of a deprecated name, not about ours.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_compiled_blocks_share_graphs_and_change_no_result() -> None:
    torch._dynamo.reset()
    expected = Life("float32", 5.0, None).run()
    counter = CompileCounterWithBackend("eager")

    with torch.inference_mode():
        life = Life("float32", 5.0, None)
        life.transformer.compile_blocks(backend=counter, fullgraph=True)
        found = life.run()

    for got, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-5, rtol=1e-5)
    graphs = {re.sub(r"\bs\d+\b", "s", graph.code) for graph in counter.graphs}
    assert len(graphs) == 3  # the first frame, frames that follow, frames with registers
    assert counter.frame_count <= 4  # once in many runs the compiler makes one of them a second time
