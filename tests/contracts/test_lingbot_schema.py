"""Camera keys and trajectories: what is read, and what is refused."""

from typing import Any

import pytest

from contracts.errors import InvalidArgumentError
from contracts.events import ARDiffusionControlInput
from contracts.lingbot import (
    CAMERA_ACTIONS_SCHEMA,
    CAMERA_KEYS,
    CAMERA_TRACK,
    CAMERA_TRAJECTORY_SCHEMA,
    MAX_SCRIPT_FRAMES,
    ScriptActions,
    StateActions,
    actions_control,
    camera_control,
    parse_action_frames,
    parse_action_script,
    parse_actions,
    parse_keys,
    parse_trajectory,
)

IDENTITY = [[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
INTRINSICS = [500.0, 500.0, 416.0, 240.0]


def test_track_schemas_and_keys_are_those_of_the_contract() -> None:
    assert CAMERA_TRACK == "camera"
    assert CAMERA_ACTIONS_SCHEMA == "lingbot.camera_actions.v1"
    assert CAMERA_TRAJECTORY_SCHEMA == "lingbot.camera_trajectory.v1"
    assert "".join(CAMERA_KEYS) == "wasdijkl"


def test_keys_are_read_in_any_case_once_each_and_in_canonical_order() -> None:
    assert parse_keys(["L", "w", "W", "d", "a", "w"]) == ("w", "a", "d", "l")
    assert parse_keys(list("LKJIDSAW")) == CAMERA_KEYS
    assert parse_keys([]) == ()


@pytest.mark.parametrize("value", [["x"], ["w", "space"], [""], ["wa"], [1], [None], [["w"]], ["İ"]])
def test_any_other_key_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="W/A/S/D/I/J/K/L"):
        parse_keys(value)


@pytest.mark.parametrize("value", ["w", b"w", None, {"w": 1}, 7])
def test_keys_come_in_a_list(value: Any) -> None:
    with pytest.raises(ValueError, match="must be a list"):
        parse_keys(value)


def test_a_state_event_lists_what_was_held_after_each_transition() -> None:
    data = {
        "mode": "state",
        "transitions": [
            {"actions": ["W"], "client_ts_ms": 0},
            {"actions": ["w", "d"]},
            {"actions": [], "client_ts_ms": 0},
            {"actions": ["d"], "client_ts_ms": 9},
        ],
    }

    assert parse_actions(data) == StateActions((("w",), ("w", "d"), (), ("d",)))


@pytest.mark.parametrize("value", [-1, True, 1.0, "5", None, 2**53])
def test_a_client_time_is_a_whole_number_and_no_bool(value: Any) -> None:
    with pytest.raises(ValueError, match="client_ts_ms"):
        parse_actions({"mode": "state", "transitions": [{"actions": [], "client_ts_ms": value}]})


def test_client_times_never_decrease_inside_one_event() -> None:
    transitions = [{"actions": [], "client_ts_ms": 5}, {"actions": []}, {"actions": [], "client_ts_ms": 4}]

    with pytest.raises(InvalidArgumentError, match="must not decrease") as refused:
        parse_actions({"mode": "state", "transitions": transitions})
    assert refused.value.field == "transitions[2].client_ts_ms"


@pytest.mark.parametrize(
    "value", [[], None, "w", {}, [1], [[]], [{}], [{"actions": "w"}], [{"actions": [], "x": 1}]]
)
def test_transitions_are_a_list_of_held_keys_that_is_not_empty(value: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        parse_actions({"mode": "state", "transitions": value})


def test_a_script_event_lists_the_keys_of_coming_frames() -> None:
    assert parse_actions({"mode": "script", "frames": [["W"], [], ["l", "a"]]}) == ScriptActions(
        (("w",), (), ("a", "l"))
    )


@pytest.mark.parametrize("value", [[], None, "w", {}, ["w"], [["x"]], [1], [[]] * (MAX_SCRIPT_FRAMES + 1)])
def test_a_script_that_is_empty_too_long_or_no_list_of_keys_is_refused(value: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        parse_actions({"mode": "script", "frames": value})


@pytest.mark.parametrize("mode", ["frames", "STATE", "", None, 1, True, ["state"]])
def test_an_event_has_mode_state_or_script(mode: Any) -> None:
    with pytest.raises(ValueError, match='"state" or "script"') as refused:
        parse_actions({"mode": mode, "frames": [["w"]], "transitions": [{"actions": []}]})
    assert refused.value.field == "mode"


@pytest.mark.parametrize(
    "data",
    [
        {"mode": "state", "transitions": [{"actions": []}], "frames": [["w"]]},
        {"mode": "script", "frames": [["w"]], "speed": 2},
    ],
)
def test_an_unknown_field_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="unknown field"):
        parse_actions(data)


def test_the_control_of_a_tick_has_one_list_a_latent_frame() -> None:
    control = actions_control([("w",), (), ("a", "l")])

    assert control.to_dict() == {
        "track": "camera",
        "schema": "lingbot.camera_actions.v1",
        "data": {"mode": "frames", "frames": [["w"], [], ["a", "l"]]},
    }
    assert parse_action_frames(control.data) == (("w",), (), ("a", "l"))


@pytest.mark.parametrize("mode", ["state", "script", None, 3])
def test_frames_of_a_tick_must_say_so(mode: Any) -> None:
    with pytest.raises(ValueError, match="mode='frames'"):
        parse_action_frames({"mode": mode, "frames": [[], [], []]})


@pytest.mark.parametrize(("frames", "expected"), [([[]] * 2, 3), ([[]] * 4, 3), ([], 3), ([[]] * 3, 33)])
def test_there_must_be_as_many_action_lists_as_expected(frames: list[Any], expected: int) -> None:
    with pytest.raises(ValueError, match="exactly one action list"):
        parse_action_frames({"mode": "frames", "frames": frames}, expected)


def test_any_number_of_frames_may_be_expected() -> None:
    assert parse_action_frames({"mode": "frames", "frames": [["W"]]}, 1) == (("w",),)


def test_a_whole_script_is_read_chunk_by_chunk() -> None:
    assert parse_action_script([[["W"], [], []], [["d"], ["d"], ["d"]]]) == (
        (("w",), (), ()),
        (("d",), ("d",), ("d",)),
    )


@pytest.mark.parametrize("chunk", [[], [["w"]], [["w"], [], [], []]])
def test_each_chunk_of_a_script_is_three_frames_wide(chunk: Any) -> None:
    with pytest.raises(ValueError, match="exactly 3 per-latent-frame"):
        parse_action_script([[[], [], []], chunk])


@pytest.mark.parametrize("script", [[], None, "w", [None], ["w"]])
def test_an_empty_script_or_one_that_is_no_list_is_refused(script: Any) -> None:
    with pytest.raises(ValueError, match="camera_action_script"):
        parse_action_script(script)


def test_a_trajectory_has_finite_poses_and_intrinsics_of_equal_length() -> None:
    trajectory = parse_trajectory({"poses": [IDENTITY, IDENTITY], "intrinsics": [INTRINSICS, [1, 2, 3, 4]]})

    assert len(trajectory.poses) == len(trajectory.intrinsics) == 2
    assert trajectory.poses[0] == tuple(map(tuple, IDENTITY))
    assert trajectory.intrinsics[1] == (1.0, 2.0, 3.0, 4.0)


@pytest.mark.parametrize(
    ("poses", "intrinsics"), [([], []), ([IDENTITY], []), ([], [INTRINSICS]), ([IDENTITY], [INTRINSICS] * 2)]
)
def test_unequal_or_empty_trajectories_are_refused(poses: Any, intrinsics: Any) -> None:
    with pytest.raises(ValueError, match="equal, positive length"):
        parse_trajectory({"poses": poses, "intrinsics": intrinsics})


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf"), 10**400])
def test_a_trajectory_must_be_finite(number: Any) -> None:
    for data in (
        {"poses": [[[number, 0, 0, 0], *IDENTITY[1:]]], "intrinsics": [INTRINSICS]},
        {"poses": [IDENTITY], "intrinsics": [[number, 1, 1, 1]]},
    ):
        with pytest.raises(ValueError, match="finite"):
            parse_trajectory(data)


@pytest.mark.parametrize("number", [True, None, "1", [1]])
def test_a_trajectory_must_be_numeric(number: Any) -> None:
    with pytest.raises(ValueError, match="numbers only"):
        parse_trajectory({"poses": [IDENTITY], "intrinsics": [[number, 1, 1, 1]]})


@pytest.mark.parametrize(
    "data",
    [
        {"poses": [IDENTITY[:3]], "intrinsics": [INTRINSICS]},
        {"poses": [[[1, 0, 0]] * 4], "intrinsics": [INTRINSICS]},
        {"poses": [IDENTITY], "intrinsics": [INTRINSICS[:3]]},
        {"poses": IDENTITY, "intrinsics": [INTRINSICS] * 4},
        {"poses": "x", "intrinsics": [INTRINSICS]},
        {"poses": [IDENTITY]},
        {"intrinsics": [INTRINSICS]},
        {"poses": [IDENTITY], "intrinsics": [INTRINSICS], "scale": 1},
        {},
    ],
)
def test_a_trajectory_of_another_shape_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        parse_trajectory(data)


def test_a_tick_has_exactly_one_camera_control() -> None:
    camera = actions_control([(), (), ()])
    other = ARDiffusionControlInput("action", "v1", {})

    assert camera_control((other, camera)) is camera
    for controls in ((), (other,), (camera, camera)):
        with pytest.raises(ValueError, match="exactly one camera control"):
            camera_control(controls)


def test_the_camera_track_takes_its_two_schemas_only() -> None:
    with pytest.raises(InvalidArgumentError, match=r"lingbot\.camera_actions\.v1") as refused:
        camera_control((ARDiffusionControlInput("camera", "other.v1", {}),))
    assert refused.value.field == "schema"
