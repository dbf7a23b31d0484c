"""What a session keeps between observations: the ring of pictures, and when what is let go of."""

from typing import Any

import numpy as np
import pytest

from contracts.errors import InvalidArgumentError
from gpu_worker.models.dreamzero.world import PolicyState, Reset, accumulate_frames, reset_reason

TASK, OTHER_TASK = (5, 6, 1), (5, 7, 1)


def frame(value: int) -> np.ndarray:
    return np.full((2, 3, 3), value, np.uint8)


def values(seen: np.ndarray) -> list[int]:
    return [int(picture[0, 0, 0]) for picture in seen]


# ---------------------------------------------------------------------------------------------------- ring


def test_the_first_call_is_one_picture_and_every_later_one_four() -> None:
    ring: tuple[np.ndarray, ...] = ()
    found = []
    for number in range(7):
        ring, seen = accumulate_frames(ring, frame(number))
        found.append(values(seen))

    assert found == [
        [0],
        [0, 0, 0, 1],
        [0, 0, 1, 2],
        [0, 1, 2, 3],
        [1, 2, 3, 4],
        [2, 3, 4, 5],
        [3, 4, 5, 6],
    ]
    assert len(ring) == 4


def test_several_pictures_may_come_at_once() -> None:
    ring, first = accumulate_frames((), np.stack([frame(1), frame(2)]))
    assert values(first) == [2]

    ring, seen = accumulate_frames(ring, np.stack([frame(3), frame(4), frame(5)]))
    assert values(seen) == [2, 3, 4, 5]

    _, seen = accumulate_frames(ring, np.stack([frame(number) for number in range(6, 12)]))
    assert values(seen) == [8, 9, 10, 11]


@pytest.mark.parametrize(
    "frames",
    [
        np.zeros((3,), np.uint8),
        np.zeros((2, 3), np.uint8),
        np.zeros((1, 1, 2, 3, 3), np.uint8),
        np.zeros((0, 2, 3, 3), np.uint8),
        [[1]],
        None,
    ],
)
def test_other_than_three_or_four_dimensions_is_refused(frames: Any) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        accumulate_frames((), frames)
    assert caught.value.field == "frames"


# ---------------------------------------------------------------------------------------------------- reasons


def reason(
    state: PolicyState, *, language: tuple[int, ...] = TASK, frames: int = 4, limit: int = 9
) -> Reset | None:
    return reset_reason(state, language=language, num_frames=frames, local_attention_frames=limit)


def test_a_session_without_a_task_begins() -> None:
    assert reason(PolicyState(), frames=1) is Reset.SESSION


def test_another_task_is_another_session() -> None:
    assert reason(PolicyState(language=TASK, calls=3, start=5), language=OTHER_TASK) is Reset.SESSION


def test_a_single_picture_after_the_first_call_is_another_session() -> None:
    assert reason(PolicyState(language=TASK, calls=2, start=5), frames=1) is Reset.SESSION
    assert reason(PolicyState(language=TASK, calls=1, start=5), frames=1) is None


@pytest.mark.parametrize(
    ("start", "limit", "expected"),
    [(7, 9, None), (9, 9, Reset.INFERENCE), (11, 9, Reset.INFERENCE), (99, -1, None)],
)
def test_a_rollout_that_attention_does_not_reach_begins_anew(
    start: int, limit: int, expected: Reset | None
) -> None:
    assert reason(PolicyState(language=TASK, calls=5, start=start), limit=limit) is expected


def test_another_task_counts_more_than_a_long_rollout() -> None:
    assert reason(PolicyState(language=TASK, calls=5, start=9), language=OTHER_TASK) is Reset.SESSION


# ---------------------------------------------------------------------------------------------------- resets


def full() -> PolicyState:
    state: dict[str, Any] = {
        "next_chunk": 6,
        "language": TASK,
        "ring": (frame(1), frame(2)),
        "calls": 6,
        "start": 9,
        "condition": "condition",
        "stream": "stream",
        "video": "video",
    }
    return PolicyState(**state)


def test_a_session_reset_forgets_everything_but_its_place_in_the_session() -> None:
    assert vars_of(full().after(Reset.SESSION)) == vars_of(PolicyState(next_chunk=6))


def test_an_inference_reset_keeps_task_stream_and_video() -> None:
    found = vars_of(full().after(Reset.INFERENCE))
    kept = {name: getattr(full(), name) for name in ("next_chunk", "language", "stream", "video")}

    assert found == vars_of(PolicyState()) | kept


def test_no_reset_changes_nothing() -> None:
    state = full()
    assert state.after(None) is state


def vars_of(state: PolicyState) -> dict[str, Any]:
    return {name: getattr(state, name) for name in PolicyState.__dataclass_fields__}
