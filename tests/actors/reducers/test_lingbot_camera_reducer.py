"""The LingBot camera reducer, chunk by chunk."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.reducers.base import PreparedControls, check_prepared
from actors.reducers.lingbot_camera import LingBotCameraControlReducer
from contracts.errors import InvalidArgumentError, InvalidTypeError
from contracts.events import MAX_EVENT_BYTES, ARDiffusionControlInput, ARDiffusionSessionEvent
from contracts.lingbot import MAX_SCRIPT_FRAMES

IDENTITY = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
LENS = [500, 500, 416, 240]


def trajectory(poses: int = 9, lens: Any = LENS, pose: Any = IDENTITY) -> ARDiffusionControlInput:
    """Eight still poses with good lenses, and then one that may be neither."""
    last = {"poses": [IDENTITY] * (poses - 1) + [pose], "intrinsics": [LENS] * (poses - 1) + [lens]}
    return ARDiffusionControlInput("camera", "lingbot.camera_trajectory.v1", last)


TRAJECTORY = trajectory()
NEUTRAL: list[list[str]] = [[], [], []]


def actions(**data: Any) -> ARDiffusionControlInput:
    return ARDiffusionControlInput("camera", "lingbot.camera_actions.v1", data)


def event(
    event_id: int, *controls: ARDiffusionControlInput, prompt: str | None = None
) -> ARDiffusionSessionEvent:
    return ARDiffusionSessionEvent(event_id, prompt, controls)


def hold(event_id: int, *transitions: str) -> ARDiffusionSessionEvent:
    """Each transition as letters: "wd" holds both, "" releases all."""
    return event(
        event_id, actions(mode="state", transitions=[{"actions": list(keys)} for keys in transitions])
    )


def script(event_id: int, *frames: str) -> ARDiffusionSessionEvent:
    return event(event_id, actions(mode="script", frames=[list(keys) for keys in frames]))


class World:
    """A reducer and the controls of its session, committed chunk by chunk."""

    def __init__(self) -> None:
        self.reducer = LingBotCameraControlReducer()
        self.controls: tuple[ARDiffusionControlInput, ...] = ()
        self.chunk = 0

    def step(self, *events: ARDiffusionSessionEvent) -> Any:
        """Commits one chunk and returns its camera frames, or None without a camera control."""
        for item in events:
            self.reducer.check(item)
        prepared = check_prepared(self.reducer.prepare(self.controls, events, self.chunk))
        self.reducer.commit(prepared)
        self.controls, self.chunk = prepared.controls, self.chunk + 1
        return self.camera()

    def camera(self) -> Any:
        found = [control for control in self.controls if control.track == "camera"]
        return found[0].to_dict()["data"].get("frames") if found else None


@pytest.fixture
def world() -> World:
    return World()


def test_without_any_action_there_is_no_camera_control(world: World) -> None:
    assert world.step() is None
    assert world.step(event(1, prompt="a hall")) is None
    assert world.controls == ()


def test_held_keys_fill_every_frame_of_every_chunk_until_they_change(world: World) -> None:
    assert world.step(hold(1, "W")) == [["w"], ["w"], ["w"]]
    assert world.step() == [["w"], ["w"], ["w"]]
    assert world.step(event(2, prompt="rain")) == [["w"], ["w"], ["w"]]
    assert world.step(hold(3, "dA")) == [["a", "d"], ["a", "d"], ["a", "d"]]
    assert world.step(hold(4, "")) == NEUTRAL
    assert world.step() == NEUTRAL


def test_the_emitted_control_has_mode_frames_and_one_list_a_latent_frame(world: World) -> None:
    world.step(hold(1, "w"))

    assert world.controls[0].to_dict() == {
        "track": "camera",
        "schema": "lingbot.camera_actions.v1",
        "data": {"mode": "frames", "frames": [["w"], ["w"], ["w"]]},
    }


@pytest.mark.parametrize(
    ("transitions", "frames"),
    [
        (["w", ""], [["w"], ["w"], []]),
        (["w", "wd", "d"], [["w"], ["w", "d"], ["d"]]),
        (["w", "", "d", ""], [["w"], [], ["d"]]),
        (["w", "", "d", "", "l"], [["w"], ["d"], ["l"]]),
        (["w", "", "a", "", "d", ""], [["w"], ["a"], ["d"]]),
        (["w", "a", "s", "d", "i", "j", "k", "l", ""], [["w", "a", "s"], ["d", "i", "j"], ["k", "l"]]),
    ],
)
def test_transitions_since_the_last_tick_are_spread_over_its_frames(
    world: World, transitions: list[str], frames: list[list[str]]
) -> None:
    assert world.step(hold(1, *transitions)) == frames
    assert world.step() == [list(transitions[-1])] * 3


def test_transitions_of_several_events_are_one_sequence(world: World) -> None:
    assert world.step(hold(1, "w"), hold(2, "d", "l")) == [["w"], ["d"], ["l"]]


def test_a_tap_between_two_ticks_is_never_lost(world: World) -> None:
    world.step(hold(1, "w"))

    frames = world.step(hold(2, "w", "wl", "w", "w", "w", "wi", "w"))

    assert frames == [["w", "l"], ["w"], ["w", "i"]]
    assert world.step() == [["w"], ["w"], ["w"]]


def test_a_script_is_used_frame_by_frame_then_neutral_for_ever(world: World) -> None:
    assert world.step(script(1, "w", "d", "l", "i")) == [["w"], ["d"], ["l"]]
    assert world.step() == [["i"], [], []]
    assert world.step() == NEUTRAL
    assert world.step() == NEUTRAL


def test_pieces_of_a_script_append(world: World) -> None:
    assert world.step(script(1, "w"), script(2, "a", "s", "d")) == [["w"], ["a"], ["s"]]
    assert world.step(script(3, "i")) == [["d"], ["i"], []]


def test_a_state_event_replaces_what_is_left_of_a_script(world: World) -> None:
    world.step(script(1, "w", "w", "w", "d", "d"))

    assert world.step(hold(2, "l")) == [["l"], ["l"], ["l"]]
    assert world.step() == [["l"], ["l"], ["l"]]


def test_a_script_replaces_held_keys(world: World) -> None:
    world.step(hold(1, "w"))

    assert world.step(script(2, "d")) == [["d"], [], []]
    assert world.step() == NEUTRAL


def test_of_both_kinds_in_one_tick_the_later_id_holds(world: World) -> None:
    assert world.step(hold(1, "w", "a"), script(2, "d")) == [["d"], [], []]
    assert world.step(script(3, "d", "d"), hold(4, "l")) == [["l"], ["l"], ["l"]]


def test_a_trajectory_passes_through_and_clears_the_actions(world: World) -> None:
    world.step(hold(1, "w"))

    world.step(event(2, TRAJECTORY))
    assert world.controls == (TRAJECTORY,)
    world.step()
    assert world.controls == (TRAJECTORY,)
    assert world.step(script(3, "d")) == [["d"], [], []]


def test_actions_after_a_trajectory_in_one_tick_replace_it_and_start_from_nothing(world: World) -> None:
    world.step(script(1, "w", "w", "w", "w"))

    assert world.step(event(2, TRAJECTORY), script(3, "d")) == [["d"], [], []]


def test_other_tracks_keep_their_latest_value(world: World) -> None:
    first, second = (ARDiffusionControlInput("action", "v1", {"x": x}) for x in (1, 2))

    world.step(event(1, first), event(2, second), hold(3, "w"))
    assert [control.track for control in world.controls] == ["action", "camera"]
    assert world.controls[0] == second
    world.step(hold(4, ""))
    assert world.controls[0] == second


def test_prepare_without_commit_consumes_nothing(world: World) -> None:
    world.step(script(1, "w", "a", "s", "d"))
    events = (hold(2, "l", ""),)

    first = world.reducer.prepare(world.controls, events, 1)
    second = world.reducer.prepare(world.controls, events, 1)

    assert first == second
    assert world.step() == [["d"], [], []]


def test_prompt_and_actions_of_one_event_are_in_the_same_tick(world: World) -> None:
    both = event(1, actions(mode="state", transitions=[{"actions": ["w"]}]), prompt="rain")

    assert world.step(both) == [["w"], ["w"], ["w"]]
    assert both.prompt == "rain"


def test_reset_clears_held_keys_and_scripts(world: World) -> None:
    for item in (hold(1, "w"), script(2, "w", "w", "w", "w")):
        world.step(item)
        world.reducer.reset()
        world.controls = ()
        assert world.step() is None


def test_the_private_state_is_plain_json_that_another_process_goes_on_from(world: World) -> None:
    other = LingBotCameraControlReducer()
    for events in (
        [hold(1, "w", "wl")],
        [script(2, "w", "", "sd", "i", "", "jl")],
        [event(3, TRAJECTORY)],
        [],
    ):
        prepared = world.reducer.prepare(world.controls, tuple(events), 0)
        world.step(*events)

        other.load_state(json.loads(json.dumps(prepared.private_state)))

        assert other.prepare(world.controls, (), 1) == world.reducer.prepare(world.controls, (), 1)


def test_none_is_the_initial_state(world: World) -> None:
    world.step(hold(1, "w"))
    world.reducer.load_state(None)
    world.controls = ()

    assert world.step() is None


GOOD_STATE = {"mode": "script", "held": "", "script": "w;;ad;", "last_event_id": 3}


@pytest.mark.parametrize(
    "state",
    [
        7,
        "w",
        [],
        {},
        {**GOOD_STATE, "more": 1},
        {**GOOD_STATE, "mode": "dance"},
        {**GOOD_STATE, "mode": []},
        {**GOOD_STATE, "held": "x"},
        {**GOOD_STATE, "held": None},
        {**GOOD_STATE, "script": "w;;ad"},
        {**GOOD_STATE, "script": "w;;da;"},
        {**GOOD_STATE, "script": ["w"]},
        {**GOOD_STATE, "last_event_id": -2},
        {**GOOD_STATE, "last_event_id": True},
        {**GOOD_STATE, "last_event_id": "3"},
        {"mode": None, "held": "", "script": "", "last_event_id": -1},
    ],
    ids=str,
)
def test_a_foreign_private_state_is_a_type_error_and_changes_nothing(world: World, state: Any) -> None:
    world.step(hold(1, "w"))

    with pytest.raises(TypeError) as refused:
        world.reducer.commit(PreparedControls((), state))
    with pytest.raises(InvalidTypeError):
        world.reducer.load_state(state)

    assert isinstance(refused.value, InvalidTypeError)
    assert refused.value.field == "private_state"
    assert world.step() == [["w"], ["w"], ["w"]]


@pytest.mark.parametrize("prepared", [None, {}, "x", (), GOOD_STATE])
def test_commit_takes_what_prepare_returned(world: World, prepared: Any) -> None:
    with pytest.raises(TypeError):
        world.reducer.commit(prepared)


@pytest.mark.parametrize(
    ("control", "words"),
    [
        (actions(mode="dance"), '"state" or "script"'),
        (actions(mode="frames", frames=[[], [], []]), '"state" or "script"'),
        (actions(mode="state", transitions=[]), "empty"),
        (actions(mode="state", transitions=[{"actions": ["x"]}]), "W/A/S/D/I/J/K/L"),
        (actions(mode="script", frames=[]), "1 to 4096"),
        (ARDiffusionControlInput("camera", "other.v1", {}), "lingbot.camera_actions.v1"),
        (ARDiffusionControlInput("camera", "lingbot.camera_trajectory.v1", {}), "poses"),
        (trajectory(8), "at least 9 poses a chunk, got 8"),
        (trajectory(lens=[0, 500, 416, 240]), r"intrinsics\[8\]: fx and fy"),
        (trajectory(lens=[500, 0.0, 416, 240]), r"intrinsics\[8\]: fx and fy"),
        (trajectory(lens=[500, 500, 1e39, 240]), r"intrinsics\[8\] must hold finite float32"),
        (trajectory(pose=[*IDENTITY[:3], [0, 0, -1e39, 1]]), r"poses\[8\] must hold finite float32"),
    ],
)
def test_check_stops_what_prepare_would_not_understand(
    world: World, control: ARDiffusionControlInput, words: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        world.reducer.check(event(1, control))
    assert world.step() is None


def test_check_leaves_other_tracks_and_prompts_alone(world: World) -> None:
    world.reducer.check(event(1, ARDiffusionControlInput("action", "any.v9", {"mode": "dance"}), prompt="p"))


def frames_of(count: int) -> list[str]:
    return [""] * count


def test_a_script_of_the_full_length_fits_and_keeps_the_state_small(world: World) -> None:
    full = script(1, *["w"] * MAX_SCRIPT_FRAMES)
    world.step(full)

    state = world.reducer.prepare(world.controls, (), 1).private_state

    assert len(json.dumps(state)) < MAX_EVENT_BYTES


def test_check_refuses_a_script_that_has_no_room_beside_what_is_left(world: World) -> None:
    world.step(script(1, *frames_of(MAX_SCRIPT_FRAMES)))
    world.reducer.check(script(2, *frames_of(3)))

    with pytest.raises(InvalidArgumentError, match=str(MAX_SCRIPT_FRAMES)):
        world.reducer.check(script(3, "w"))


def test_check_counts_scripts_that_wait_for_the_same_tick(world: World) -> None:
    half = frames_of(MAX_SCRIPT_FRAMES // 2)
    first, second = script(1, *half), script(2, *half)
    for item in (first, second, first):
        world.reducer.check(item)

    with pytest.raises(InvalidArgumentError, match="would wait"):
        world.reducer.check(script(3, "w"))

    world.step(first, second)
    for number in range(3):
        world.reducer.check(script(4 + number, "w"))


def test_reset_forgets_scripts_that_waited(world: World) -> None:
    world.reducer.check(script(1, *frames_of(MAX_SCRIPT_FRAMES)))
    world.reducer.reset()

    world.reducer.check(script(2, *frames_of(MAX_SCRIPT_FRAMES)))


def test_prepare_refuses_a_script_that_nobody_checked_rather_than_grow(world: World) -> None:
    half = frames_of(MAX_SCRIPT_FRAMES // 2 + 1)

    with pytest.raises(InvalidArgumentError, match="would wait"):
        world.reducer.prepare((), (script(1, *half), script(2, *half)), 0)


KEYS = st.text(alphabet="wasdijkl", max_size=4)
EVENTS = st.one_of(
    st.tuples(st.just("hold"), st.lists(KEYS, min_size=1, max_size=5)),
    st.tuples(st.just("script"), st.lists(KEYS, min_size=1, max_size=5)),
    st.tuples(st.just("trajectory"), st.just([])),
)


@given(st.lists(st.lists(EVENTS, max_size=3), max_size=5))
@settings(
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
def test_a_world_that_is_handed_over_before_every_chunk_sees_the_same_controls(
    chunks: list[list[tuple[str, list[str]]]],
) -> None:
    world, passed_on, last_id = World(), World(), 0
    state: Any = None
    for chunk in chunks:
        events = []
        for kind, keys in chunk:
            last_id += 1
            make = {"hold": hold, "script": script}.get(kind)
            events.append(make(last_id, *keys) if make else event(last_id, TRAJECTORY))
        passed_on.reducer = LingBotCameraControlReducer()
        passed_on.reducer.load_state(json.loads(json.dumps(state)))
        state = passed_on.reducer.prepare(passed_on.controls, tuple(events), 0).private_state

        assert world.step(*events) == passed_on.step(*events)
        assert world.controls == passed_on.controls
