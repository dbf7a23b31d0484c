"""Observations of DreamZero worlds: what is read, and what is refused by name."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from contracts.dreamzero import (
    OBSERVATION_SCHEMA,
    OBSERVATION_TRACK,
    Observation,
    ObservationMissingError,
    observation_control,
    observation_of,
    parse_observation,
    same_text,
)
from contracts.errors import InvalidArgumentError
from contracts.events import ARDiffusionControlInput
from contracts.make_schemas import FOLDER

IMAGES = {"wrist": "redis:a", "left": "file:///frames/1.png"}
STATE = {"joint_position": [0, 0.5, -1.25], "gripper_position": [1]}
DATA = {"images": IMAGES, "state": STATE, "language": "open the drawer"}


def test_track_and_schema_are_those_of_the_contract() -> None:
    assert OBSERVATION_TRACK == "observation"
    assert OBSERVATION_SCHEMA == "dreamzero.observation.v1"


def test_an_observation_is_read() -> None:
    assert parse_observation(DATA) == Observation(
        images=IMAGES,
        state={"joint_position": (0.0, 0.5, -1.25), "gripper_position": (1.0,)},
        language="open the drawer",
    )
    assert parse_observation(DATA).views == ("left", "wrist")


def test_what_a_producer_builds_is_what_a_tick_is_read_from() -> None:
    control = observation_control(IMAGES, STATE, "open the drawer")

    assert control.to_dict() == {"track": OBSERVATION_TRACK, "schema": OBSERVATION_SCHEMA, "data": DATA}
    other = ARDiffusionControlInput("camera", "some.schema.v1", {})
    assert observation_of((other, control)) == parse_observation(DATA)


@pytest.mark.parametrize("controls", [(), (ARDiffusionControlInput("camera", "x.v1", {}),)])
def test_a_tick_without_an_observation_is_an_error_that_plain_code_catches_as_a_missing_key(
    controls: tuple[ARDiffusionControlInput, ...],
) -> None:
    with pytest.raises(KeyError) as caught:
        observation_of(controls)
    assert isinstance(caught.value, ObservationMissingError)
    assert (caught.value.field, caught.value.code) == ("observation", "invalid_argument")
    assert "none has come" in str(caught.value)


@pytest.mark.parametrize("name", ["images", "state", "language"])
def test_a_missing_field_is_named(name: str) -> None:
    refused(name, **{name: ...})


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("images", {"images": {}}),
        ("images", {"images": ["redis:a"]}),
        ("images", {"images": "redis:a"}),
        ("images", {"images": {" ": "redis:a"}}),
        ("images", {"images": {"x" * 81: "redis:a"}}),
        ("images.wrist", {"images": {"wrist": "frame.png"}}),
        ("images.wrist", {"images": {"wrist": ""}}),
        ("images.wrist", {"images": {"wrist": "redis:"}}),
        ("images.wrist", {"images": {"wrist": "redis:a b"}}),
        ("images.wrist", {"images": {"wrist": "redis:a\n"}}),
        ("images.wrist", {"images": {"wrist": ["redis:a"]}}),
        ("images.wrist", {"images": {"wrist": 7}}),
        ("state", {"state": {}}),
        ("state", {"state": [1.0, 2.0]}),
        ("state", {"state": None}),
        ("state.arm", {"state": {"arm": []}}),
        ("state.arm", {"state": {"arm": 1.0}}),
        ("state.arm", {"state": {"arm": "12"}}),
        ("state.arm", {"state": {"arm": [True]}}),
        ("state.arm", {"state": {"arm": [None]}}),
        ("state.arm", {"state": {"arm": ["1"]}}),
        ("state.arm", {"state": {"arm": [float("nan")]}}),
        ("state.arm", {"state": {"arm": [0.0, float("-inf")]}}),
        ("state.arm", {"state": {"arm": [10**400]}}),
        ("language", {"language": None}),
        ("language", {"language": " \n"}),
        ("language", {"language": ["open"]}),
        ("colour", {"colour": "red"}),
    ],
)
def test_what_is_wrong_is_named(field: str, changes: dict[str, Any]) -> None:
    refused(field, **changes)


def refused(field: str, **changes: Any) -> None:
    data = {name: value for name, value in (DATA | changes).items() if value is not ...}
    with pytest.raises(InvalidArgumentError) as caught:
        parse_observation(data)
    assert caught.value.field == field
    assert field in str(caught.value)


def test_another_schema_on_the_track_is_refused() -> None:
    control = ARDiffusionControlInput(OBSERVATION_TRACK, "dreamzero.observation.v2", DATA)
    with pytest.raises(InvalidArgumentError, match="v1") as caught:
        observation_of([control])
    assert caught.value.field == "schema"


def test_texts_are_the_same_whatever_their_white_space() -> None:
    assert same_text(" open  the\ndrawer", "open the drawer ")
    assert not same_text("open the drawer", "Open the drawer")


NAMES = st.sampled_from(["wrist", "left", " ", "", "\u2028", "x" * 81])
NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-9, 9) | st.booleans() | st.none()
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "images": st.dictionaries(NAMES, st.sampled_from(["redis:a", "file:///a", "redis:", "a b", "", "1:a", 7]))
    | st.sampled_from([[], None, "redis:a"]),
    "state": st.dictionaries(NAMES, st.lists(NUMBERS, max_size=3) | st.sampled_from(["1", None, {}, 1]))
    | st.sampled_from([[], None]),
    "language": st.text(max_size=3) | st.sampled_from(["open", " ", None, 7]),
}


@given(st.fixed_dictionaries({}, optional=FIELDS | {"colour": st.just(1)}))
@example(DATA)
@settings(max_examples=150, deadline=None)
def test_whatever_comes_is_read_or_refused_by_name_and_the_schema_says_the_same(data: dict[str, Any]) -> None:
    schema = Draft202012Validator(
        json.loads((FOLDER / "dreamzero_observation.json").read_text(encoding="utf-8"))
    )
    field = refusal_of(data)
    assert schema.is_valid(data) == (field is None)
    assert field is None or field.split(".")[0] in {"images", "state", "language", "colour"}


def refusal_of(data: dict[str, Any]) -> str | None:
    """The field that is refused, if one is."""
    try:
        parse_observation(data)
    except InvalidArgumentError as refusal:
        return refusal.field or "a refusal that names nothing"
    return None
