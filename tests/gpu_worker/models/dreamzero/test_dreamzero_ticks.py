"""Ticks against a dense recomputation in float64 that caches nothing: across inference resets, with guidance and without."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu_worker.models.dreamzero.config import DreamZeroTopology
from gpu_worker.models.dreamzero.pictures import stitch
from support.dreamzero_checkpoint import statistics, write_checkpoint
from support.dreamzero_memory import Memory
from support.dreamzero_model import TINY
from support.dreamzero_worlds import (
    LANGUAGE,
    OTHER_LANGUAGE,
    Robots,
    arm,
    cameras,
    observed,
    sentence,
    shared_checkpoint,
    tiny_pipeline,
    with_prompt,
)

STATE, ACTION = (statistics()["oxe_droid"]["statistics"][kind] for kind in ("state", "action"))
PARTS = ("joint_position", "gripper_position")


def quantiles(kind: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    low, high = (np.concatenate([kind[part][q] for part in PARTS]) for q in ("q01", "q99"))
    return low, high


def felt(number: int) -> tuple[np.ndarray, np.ndarray]:
    """The raw state of an observation, and the normalised one."""
    raw = np.concatenate([arm(number)[part] for part in PARTS])
    low, high = quantiles(STATE)
    scaled = np.zeros(TINY.head.max_state_dim)
    scaled[: len(raw)] = np.clip(2 * (raw - low) / (high - low) - 1, -1, 1)
    return raw, scaled


def restored(actions: np.ndarray, raw: np.ndarray) -> np.ndarray:
    low, high = quantiles(ACTION)
    out = (actions[:, : len(low)] + 1) / 2 * (high - low) + low
    out[:, :7] += raw[:7]
    return out


class Pair:
    """The pipeline on a runner, and the memory beside it."""

    def __init__(
        self,
        *,
        scale: float,
        steps: int,
        checkpoint: Path | None = None,
        topology: DreamZeroTopology = TINY,
        **memory: Any,
    ) -> None:
        folder = shared_checkpoint() if checkpoint is None else checkpoint
        self.pipeline = tiny_pipeline(folder, cfg_scale=scale, num_inference_steps=steps)
        self.robots = Robots(self.pipeline)
        self.policy = self.pipeline._policy
        self.memory = Memory(
            folder,
            self.policy._encoder._vae,
            topology,
            negative=list(self.policy._text.token_ids("rain and night")),
            scale=scale,
            steps=steps,
            **memory,
        )

    def check(self, number: int, *, language: str = LANGUAGE) -> int:
        """Both see observation `number`; returns the frames of the rollout."""
        found = self.robots.act(number, control=observed(number, language=language), output_type="latent")
        picture = stitch(cameras(number), self.policy.robot)
        raw, scaled = felt(number)
        ids = list(self.policy._text.token_ids(sentence(language)))
        actions, video = self.memory.act(picture, scaled, ids)

        latents = found.payload["latents"][0].double().numpy()
        assert latents.shape == video.shape
        np.testing.assert_allclose(latents, video, atol=1e-5 * np.abs(video).max(), rtol=1e-5)
        np.testing.assert_allclose(found.payload["actions"], restored(actions, raw), atol=1e-5, rtol=1e-5)
        return self.memory.start


@pytest.mark.parametrize("scale", [5.0, 1.0])
def test_a_session_of_nine_observations_is_what_a_dense_recomputation_says(scale: float) -> None:
    pair = Pair(scale=scale, steps=3)

    assert [pair.check(number) for number in range(9)] == [3, 5, 7, 9, 3, 5, 7, 9, 3]


def test_all_sixteen_steps() -> None:
    pair = Pair(scale=5.0, steps=16)

    assert [pair.check(number) for number in range(2)] == [3, 5]


def test_a_video_that_stays_noisy_beside_clean_actions(tmp_path: Path) -> None:
    checkpoint = with_prompt(
        write_checkpoint(tmp_path, decouple_inference_noise=True, video_inference_final_noise=0.7)
    )
    pair = Pair(scale=2.0, steps=3, checkpoint=checkpoint, final_noise=0.7)

    assert [pair.check(number) for number in range(2)] == [3, 5]


def test_another_task_begins_from_nothing() -> None:
    pair = Pair(scale=5.0, steps=2)
    for number in range(2):
        pair.check(number)
    pair.memory.forget()

    assert [pair.check(number, language=OTHER_LANGUAGE) for number in range(2, 5)] == [3, 5, 7]


def test_a_rollout_without_a_limit_goes_on_past_window_and_condition(tmp_path: Path) -> None:
    head = replace(TINY.head, transformer=replace(TINY.head.transformer, max_chunk_size=-1))
    endless = replace(TINY, head=head)
    pair = Pair(
        scale=1.0,
        steps=1,
        checkpoint=with_prompt(write_checkpoint(tmp_path, endless), endless),
        topology=endless,
    )

    assert [pair.check(number) for number in range(13)] == list(range(3, 28, 2))
    assert pair.robots.runner.spec.window_frames == 21
    assert pair.pipeline._states["robot"].video.shape[1] == 9  # type: ignore[union-attr]
