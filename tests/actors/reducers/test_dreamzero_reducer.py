"""The latest observation counts; what could not be acted on is stopped at the door."""

from typing import Any

import pytest

from actors.reducers.dreamzero import DreamZeroObservationReducer
from actors.reducers.registry import make_reducer
from contracts.dreamzero import OBSERVATION_TRACK, observation_control
from contracts.errors import InvalidArgumentError
from contracts.events import ARDiffusionControlInput, ARDiffusionSessionEvent

LIGHT = ARDiffusionControlInput("light", "some.light.v1", {"on": True})


def seen(number: int, language: str = "open the drawer") -> ARDiffusionControlInput:
    return observation_control({"wrist": f"redis:frame-{number}"}, {"arm": [float(number)]}, language)


def event(
    event_id: int, *controls: ARDiffusionControlInput, prompt: str | None = None
) -> ARDiffusionSessionEvent:
    return ARDiffusionSessionEvent(event_id, prompt, controls)


def test_it_is_installed_under_its_name() -> None:
    assert isinstance(make_reducer("dreamzero-observation"), DreamZeroObservationReducer)


def test_of_several_observations_the_newest_is_acted_on() -> None:
    reducer = DreamZeroObservationReducer()

    prepared = reducer.prepare((), (event(1, seen(1)), event(2, seen(2), LIGHT), event(3, seen(3))), 0)

    assert prepared.controls == (LIGHT, seen(3))
    assert prepared.private_state is None


def test_a_tick_without_a_new_observation_acts_on_the_latest_again() -> None:
    reducer = DreamZeroObservationReducer()
    first = reducer.prepare((), (event(1, seen(1)),), 0)
    reducer.commit(first)

    assert reducer.prepare(first.controls, (), 1).controls == (seen(1),)


def test_before_the_first_observation_there_is_none() -> None:
    assert DreamZeroObservationReducer().prepare((), (), 0).controls == ()


def test_after_a_reset_there_is_none_either() -> None:
    reducer = DreamZeroObservationReducer()
    reducer.commit(reducer.prepare((), (event(1, seen(1)),), 0))
    reducer.reset()

    assert reducer.prepare((), (), 0).controls == ()


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("language", {"language": " "}),
        ("state.arm", {"state": {"arm": [None]}}),
        ("state.arm", {"state": {"arm": [True]}}),
        ("images.wrist", {"images": {"wrist": "frame.png"}}),
        ("images", {"images": {}}),
        ("colour", {"colour": 1}),
    ],
)
def test_an_observation_that_can_not_be_understood_is_refused_at_the_door(
    field: str, changes: dict[str, Any]
) -> None:
    good = seen(1)
    bad = ARDiffusionControlInput(OBSERVATION_TRACK, good.schema, {**good.to_dict()["data"], **changes})
    with pytest.raises(InvalidArgumentError) as caught:
        DreamZeroObservationReducer().check(event(1, LIGHT, bad))
    assert caught.value.field == field


def test_controls_of_other_tracks_pass() -> None:
    DreamZeroObservationReducer().check(event(1, LIGHT, seen(1)))


def test_a_prompt_must_say_what_the_observation_says() -> None:
    reducer = DreamZeroObservationReducer()
    reducer.check(event(1, seen(1), prompt=" open the  drawer"))
    for wrong in (event(2, seen(1), prompt="close it"), event(3, prompt="open the drawer")):
        with pytest.raises(InvalidArgumentError, match="language") as caught:
            reducer.check(wrong)
        assert caught.value.field == "prompt"
