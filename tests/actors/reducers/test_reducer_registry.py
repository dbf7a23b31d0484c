"""Reducers by name."""

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from actors.reducers import registry
from actors.reducers.latest import LatestValueReducer
from actors.reducers.lingbot_camera import LingBotCameraControlReducer
from actors.reducers.registry import make_reducer, reducer_names
from contracts.errors import InvalidArgumentError


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Entry points by name, in place of those that are installed; counts how often they are looked up."""
    points: dict[str, str] = {}
    monkeypatch.setattr(
        registry,
        "entry_points",
        lambda group: [EntryPoint(name, value, group) for name, value in points.items()],
    )
    registry._installed.cache_clear()
    yield points
    registry._installed.cache_clear()


def test_the_names_are_those_of_the_entry_points() -> None:
    assert {"latest", "lingbot-camera"} <= set(reducer_names())
    assert isinstance(make_reducer("latest"), LatestValueReducer)
    assert isinstance(make_reducer("lingbot-camera"), LingBotCameraControlReducer)


def test_each_session_gets_a_reducer_of_its_own() -> None:
    assert make_reducer("lingbot-camera") is not make_reducer("lingbot-camera")


@pytest.mark.parametrize("name", ["nonsense", "", "LATEST", "latest "])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="latest, lingbot-camera") as refused:
        make_reducer(name)
    assert refused.value.field == "reducer"


@pytest.mark.parametrize(
    "value",
    [
        "no_such_module:Reducer",
        "actors.reducers.latest:Nothing",
        "contracts.keys:SessionKeys",
        "builtins:dict",
    ],
)
def test_an_entry_point_that_is_no_reducer_is_refused_by_name(installed: dict[str, str], value: str) -> None:
    installed["broken"] = value

    with pytest.raises(InvalidArgumentError, match="broken") as refused:
        make_reducer("broken")
    assert refused.value.field == "reducer"


def test_entry_points_are_looked_up_once(installed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    installed["mine"] = "actors.reducers.latest:LatestValueReducer"
    make_reducer("mine")

    def again(group: str) -> Any:
        raise AssertionError(group)

    monkeypatch.setattr(registry, "entry_points", again)

    assert isinstance(make_reducer("mine"), LatestValueReducer)
