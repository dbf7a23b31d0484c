"""What is verified of a reducer's result before a tick is made of it."""

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from actors.reducers.base import ChecksEvents, ControlReducer, PreparedControls, check_prepared
from actors.reducers.latest import LatestValueReducer
from actors.reducers.lingbot_camera import LingBotCameraControlReducer
from contracts.errors import InvalidArgumentError, InvalidTypeError
from contracts.events import ARDiffusionControlInput

CAMERA = ARDiffusionControlInput("camera", "v1", {})
ACTION = ARDiffusionControlInput("action", "v1", {})


def test_controls_come_back_in_order_of_track_with_the_state_unchanged() -> None:
    checked = check_prepared(PreparedControls((CAMERA, ACTION), {"held": ["w"]}))

    assert checked == PreparedControls((ACTION, CAMERA), {"held": ["w"]})


@pytest.mark.parametrize("prepared", [None, (), (CAMERA,), {"controls": ()}, "x"])
def test_anything_but_prepared_controls_is_a_type_error(prepared: Any) -> None:
    with pytest.raises(TypeError, match="PreparedControls") as refused:
        check_prepared(prepared)
    assert isinstance(refused.value, InvalidTypeError)


@pytest.mark.parametrize(
    "controls", [("camera",), (None,), ({"track": "camera"},), (CAMERA, 1), None, "x", {CAMERA.track}]
)
def test_elements_that_are_no_controls_are_a_type_error(controls: Any) -> None:
    with pytest.raises(TypeError, match="controls"):
        check_prepared(PreparedControls(controls))


def test_two_values_for_one_track_are_a_value_error() -> None:
    with pytest.raises(ValueError, match="at most one value per track"):
        check_prepared(PreparedControls((CAMERA, ACTION, ARDiffusionControlInput("camera", "v2", {}))))


@pytest.mark.parametrize("state", [object(), {1: 2}, float("nan"), {"x": b"y"}, {"n": 2**60}])
def test_a_private_state_that_json_does_not_carry_is_refused(state: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="private_state"):
        check_prepared(PreparedControls((), state))


def test_prepared_controls_can_not_be_assigned() -> None:
    with pytest.raises(FrozenInstanceError):
        PreparedControls(()).controls = (CAMERA,)  # type: ignore[misc]


def test_both_reducers_of_ours_follow_the_protocol_and_one_checks_events() -> None:
    assert isinstance(LatestValueReducer(), ControlReducer)
    assert isinstance(LingBotCameraControlReducer(), ControlReducer)
    assert isinstance(LingBotCameraControlReducer(), ChecksEvents)
    assert not isinstance(LatestValueReducer(), ChecksEvents)
