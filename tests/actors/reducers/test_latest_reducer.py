"""The default reducer: the latest value of each track."""

from typing import Any

import pytest

from actors.reducers.base import PreparedControls
from actors.reducers.latest import LatestValueReducer
from contracts.events import ARDiffusionControlInput, ARDiffusionSessionEvent


def control(track: str, value: int) -> ARDiffusionControlInput:
    return ARDiffusionControlInput(track, "test.v1", {"value": value})


def event(event_id: int, *controls: ARDiffusionControlInput) -> ARDiffusionSessionEvent:
    return ARDiffusionSessionEvent(event_id, "p", controls)


def test_the_value_with_the_highest_id_wins_on_each_track() -> None:
    events = (event(1, control("camera", 1), control("action", 1)), event(2, control("camera", 2)))

    prepared = LatestValueReducer().prepare((), events, 0)

    assert prepared.controls == (control("action", 1), control("camera", 2))


def test_controls_are_sorted_by_track() -> None:
    events = (event(1, control("zoom", 1)), event(2, control("action", 1), control("camera", 1)))

    prepared = LatestValueReducer().prepare((), events, 0)

    assert [item.track for item in prepared.controls] == ["action", "camera", "zoom"]


def test_what_no_event_touches_stays() -> None:
    current = (control("camera", 1), control("zoom", 1))

    assert LatestValueReducer().prepare(current, (), 1).controls == current
    assert LatestValueReducer().prepare(current, (event(1, control("zoom", 2)),), 1).controls == (
        control("camera", 1),
        control("zoom", 2),
    )


def test_it_remembers_nothing() -> None:
    reducer = LatestValueReducer()
    prepared = reducer.prepare((), (event(1, control("camera", 1)),), 0)

    reducer.commit(prepared)

    assert prepared.private_state is None
    assert reducer.prepare((), (), 1).controls == ()
    reducer.reset()
    reducer.load_state(None)


@pytest.mark.parametrize("state", [{}, [], 0, False, "", {"held": "w"}])
def test_any_private_state_is_foreign(state: Any) -> None:
    with pytest.raises(TypeError):
        LatestValueReducer().load_state(state)
    with pytest.raises(TypeError):
        LatestValueReducer().commit(PreparedControls((), state))
