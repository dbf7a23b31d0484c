"""A tick that fails half-way, at each stage: nothing of it stays, and no other robot notices."""

from typing import Any

import numpy as np
import pytest

from contracts.errors import ModelError
from gpu_worker.kv.state import ARDiffusionKVState
from gpu_worker.models.dreamzero import pipeline as pipeline_module
from gpu_worker.models.dreamzero.clip import ClipImageTower
from gpu_worker.models.dreamzero.stream import FrameEncoder
from gpu_worker.models.dreamzero.transformer import DreamZeroTransformer
from gpu_worker.models.lingbot_world.decoding import StreamingDecoder
from gpu_worker.models.lingbot_world.text import TextEncoder
from support.dreamzero_worlds import OTHER_LANGUAGE, Robots, observed

STAGES: list[tuple[Any, str, int]] = [
    (FrameEncoder, "_encode", 1),
    (FrameEncoder, "_encode", 5),
    (TextEncoder, "__call__", 2),
    (ClipImageTower, "forward", 1),
    (ARDiffusionKVState, "populate_cross_attention", 1),
    (ARDiffusionKVState, "populate_cross_attention", 4),
    (DreamZeroTransformer, "forward", 1),
    (DreamZeroTransformer, "forward", 2),
    (DreamZeroTransformer, "forward", 3),
    (DreamZeroTransformer, "forward", 6),
    (pipeline_module, "restore_actions", 1),
    (StreamingDecoder, "decode", 1),
]
"""Whose call fails, and which one: another task begins, so that the tick goes through all of them."""


@pytest.fixture(scope="module")
def robots() -> Robots:
    return Robots()


@pytest.mark.parametrize(("owner", "name", "nth"), STAGES)
def test_a_failure_at_any_stage_leaves_nothing_and_no_other_robot_notices(
    robots: Robots, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, nth: int
) -> None:
    states, other = robots.pipeline._states, observed(1, language=OTHER_LANGUAGE)
    for session_id in ("neighbour", "robot"):
        robots.act(0, session_id)
    free = robots.runner.cache.pool.num_free
    known, found, calls = dict(states), [], []
    works = getattr(owner, name)

    def fails(*args: Any, **options: Any) -> Any:
        calls.append(name)
        if len(calls) < nth:
            return works(*args, **options)
        found.append(dict(states))
        raise ModelError("the device is on fire", field="device")

    monkeypatch.setattr(owner, name, fails)
    with pytest.raises(ModelError, match="on fire"):
        robots.act(1, control=other, output_type="pixel")
    monkeypatch.undo()

    assert found == [known], "a tick that has not succeeded has changed no session"
    assert states == {"neighbour": known["neighbour"]}, "and its own session is released"
    assert robots.runner.session_ids == ("neighbour",)
    assert robots.runner.cache.pool.num_free > free
    went_on = robots.act(1, "neighbour").payload["actions"]
    robots.restarts()
    for number in range(2):
        again = robots.act(number).payload["actions"]
    assert np.array_equal(again, went_on)
    for session_id in ("neighbour", "robot"):
        robots.runner.close_session(session_id)
        robots.restarts(session_id)
    assert states == {}


def test_pictures_that_are_not_finite_fail_the_chunk(robots: Robots, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = StreamingDecoder.decode
    monkeypatch.setattr(StreamingDecoder, "decode", lambda *args: decode(*args) * float("nan"))

    with pytest.raises(ModelError, match="pictures are not finite") as caught:
        robots.act(0, output_type="pixel")

    assert caught.value.field == "frames"
    assert robots.pipeline._states == {}
