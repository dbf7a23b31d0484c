"""States to the model's scale, and its actions back to the robot's."""

from typing import Any

import numpy as np
import pytest

from contracts.errors import InvalidArgumentError
from gpu_worker.models.dreamzero.embodiment import Embodiment, Part
from gpu_worker.models.dreamzero.normalisation import normalise_state, raw_state, restore_actions

JOINTS = Part("joint_position", (-1.0, 0.0, 2.0), (1.0, 4.0, 2.0))
GRIPPER = Part("gripper_position", (0.0,), (0.5,))


def robot(*, relative: tuple[str, ...] = (), action: tuple[Part, ...] = (JOINTS, GRIPPER)) -> Embodiment:
    return Embodiment(
        name="arm",
        prompt="{language}",
        view_height=8,
        view_width=8,
        layout=(),
        optional_views=frozenset(),
        state=(JOINTS, GRIPPER),
        action=action,
        relative=frozenset(relative),
    )


def test_a_state_is_put_together_in_the_models_order() -> None:
    parts = {"gripper_position": (0.25,), "joint_position": (1.0, 2.0, 3.0)}
    assert raw_state(parts, robot()).tolist() == [1.0, 2.0, 3.0, 0.25]


@pytest.mark.parametrize(
    ("parts", "field"),
    [
        ({"joint_position": (1, 2, 3)}, "state.gripper_position"),
        ({"joint_position": (1, 2), "gripper_position": (0,)}, "state.joint_position"),
        ({"joint_position": (1, 2, 3, 4), "gripper_position": (0,)}, "state.joint_position"),
        ({"joint_position": (1, 2, 3), "gripper_position": (0,), "torso": (1,)}, "state.torso"),
        ({"joint_position": (1, -1e300, 3), "gripper_position": (0,)}, "state.joint_position"),
    ],
)
def test_a_part_that_is_missing_unknown_too_large_or_of_the_wrong_length_is_named(
    parts: Any, field: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        raw_state(parts, robot())
    assert caught.value.field == field


def test_quantiles_become_minus_one_and_one_and_what_lies_beyond_is_limited() -> None:
    parts = (JOINTS, GRIPPER)

    low = normalise_state(np.array([-1.0, 0.0, 0.5, 0.0]), parts, 6)
    high = normalise_state(np.array([1.0, 4.0, -0.5, 0.5]), parts, 6)
    beyond = normalise_state(np.array([-9.0, 9.0, 7.0, 0.25]), parts, 6)

    assert low.tolist() == [-1, -1, 0.5, -1, 0, 0], "without a range a value stays"
    assert high.tolist() == [1, 1, -0.5, 1, 0, 0]
    assert beyond.tolist() == [-1, 1, 1, 0, 0, 0], "and is limited all the same"


def test_actions_come_back_in_the_robots_units_and_only_its_own_dimensions() -> None:
    actions = np.array([[-1.0, 1.0, 0.3, 0.0, 99.0], [0.0, 0.0, -0.3, 1.0, 99.0]])

    found = restore_actions(actions, np.array([10.0, 20.0, 30.0, 40.0]), robot())

    assert found.tolist() == [[-1.0, 4.0, 2.0, 0.25], [0.0, 2.0, 2.0, 0.5]]


def test_relative_parts_start_from_the_raw_state() -> None:
    actions = np.zeros((2, 4))

    found = restore_actions(actions, np.array([10.0, 20.0, 30.0, 40.0]), robot(relative=("joint_position",)))

    assert found.tolist() == [[10.0, 22.0, 32.0, 0.25]] * 2


def test_a_relative_part_finds_its_state_wherever_it_stands() -> None:
    swapped = robot(relative=("gripper_position",), action=(GRIPPER, JOINTS))

    found = restore_actions(np.zeros((1, 4)), np.array([10.0, 20.0, 30.0, 40.0]), swapped)

    assert found.tolist() == [[40.25, 0.0, 2.0, 2.0]]


def test_to_the_models_scale_and_back_is_where_one_was() -> None:
    rng = np.random.default_rng(1)
    part = Part("joint_position", tuple(rng.uniform(-3, -1, 5)), tuple(rng.uniform(1, 3, 5)))
    same = Embodiment("arm", "{language}", 8, 8, (), frozenset(), (part,), (part,), frozenset())
    state = rng.uniform(-1, 1, 5)

    scaled = normalise_state(state, (part,), 5)

    assert np.allclose(restore_actions(scaled[None], state, same)[0], state, atol=1e-12)
