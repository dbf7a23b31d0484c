"""The tick: its extra-args form, what it refuses, and that it can't change."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from contracts.errors import ChunkMetadataError, InvalidArgumentError
from contracts.events import ARDiffusionControlInput
from contracts.tick import (
    EXTRA_ARGS_KEY,
    METADATA_KEY,
    ARDiffusionChunkMetadata,
    ARDiffusionTickRequest,
    metadata_from_envelope,
)

POSE = [[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
CAMERA = ARDiffusionControlInput(
    "camera", "lingbot.camera_trajectory.v1", {"poses": [POSE], "intrinsics": [[500.0, 500.0, 416.0, 240.0]]}
)


def tick(**changes: Any) -> ARDiffusionTickRequest:
    values: dict[str, Any] = {
        "session_id": "world-1",
        "request_id": "chunk-request-7",
        "chunk_index": 7,
        "applied_event_ids": (10, 11),
        "prompt": "turn left",
        "controls": (CAMERA,),
    }
    return ARDiffusionTickRequest(**{**values, **changes})


def extra_args(**changes: Any) -> dict[str, Any]:
    return {EXTRA_ARGS_KEY: {**tick().to_dict(), **changes}}


def test_the_key_is_spelled_out_and_holds_exactly_eight_fields() -> None:
    form = tick().to_extra_args()

    assert form == {
        "ar_diffusion_tick": {
            "session_id": "world-1",
            "request_id": "chunk-request-7",
            "chunk_index": 7,
            "applied_event_ids": [10, 11],
            "prompt": "turn left",
            "controls": [CAMERA.to_dict()],
            "reset": False,
            "close_session": False,
        }
    }
    assert type(form["ar_diffusion_tick"]["applied_event_ids"]) is list
    assert type(form["ar_diffusion_tick"]["controls"]) is list


@pytest.mark.parametrize("extra", [None, {}, {"seed": 1}])
def test_a_request_without_the_key_carries_no_tick(extra: dict[str, Any] | None) -> None:
    assert ARDiffusionTickRequest.from_extra_args(extra) is None


@pytest.mark.parametrize("value", [None, "tick", 7, [], [("session_id", "s")]])
def test_a_value_that_is_no_mapping_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="must be a mapping"):
        ARDiffusionTickRequest.from_extra_args({EXTRA_ARGS_KEY: value})


@pytest.mark.parametrize("name", ["applied_event_ids", "controls"])
@pytest.mark.parametrize("value", ["12", b"12", bytearray(b"12"), 12, None, {1: 2}, {1, 2}])
def test_ids_and_controls_must_be_sequences(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a sequence"):
        ARDiffusionTickRequest.from_extra_args(extra_args(**{name: value}))


@pytest.mark.parametrize("control", [None, "camera", ["camera"], 1])
def test_a_control_that_is_no_mapping_is_refused(control: Any) -> None:
    with pytest.raises(ValueError, match="must be a mapping"):
        ARDiffusionTickRequest.from_extra_args(extra_args(controls=[control]))


def test_an_unknown_or_missing_field_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgumentError, match="colour") as unknown:
        ARDiffusionTickRequest.from_extra_args(extra_args(colour=1))
    assert unknown.value.field == "colour"

    missing = extra_args()
    del missing[EXTRA_ARGS_KEY]["reset"]
    with pytest.raises(InvalidArgumentError, match="reset"):
        ARDiffusionTickRequest.from_extra_args(missing)


def test_a_round_trip_is_equal_also_through_json() -> None:
    assert ARDiffusionTickRequest.from_extra_args(tick().to_extra_args()) == tick()
    assert ARDiffusionTickRequest.from_extra_args(json.loads(json.dumps(tick().to_extra_args()))) == tick()


@pytest.mark.parametrize("name", ["session_id", "request_id"])
@pytest.mark.parametrize("value", ["", "  ", "\t\n", None, 7, b"id", ["id"]])
def test_ids_must_be_text_that_is_not_blank(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name) as refused:
        tick(**{name: value})
    assert refused.value.field == name


@pytest.mark.parametrize("name", ["track", "schema"])
@pytest.mark.parametrize("value", ["", " ", None, 7, b"camera"])
def test_track_and_schema_must_be_text_that_is_not_blank(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name) as refused:
        ARDiffusionControlInput(**{"track": "camera", "schema": "v1", "data": {}, name: value})
    assert refused.value.field == name


@pytest.mark.parametrize("value", [-1, True, False, 1.0, "1", None, 2**53])
def test_a_chunk_index_must_be_a_whole_number_and_no_bool(value: Any) -> None:
    with pytest.raises(ValueError, match="chunk_index"):
        tick(chunk_index=value)


@pytest.mark.parametrize("value", [-1, True, False, 1.0, "1", None, 2**53])
def test_every_event_id_must_be_a_whole_number_and_no_bool(value: Any) -> None:
    with pytest.raises(ValueError, match="applied_event_ids"):
        tick(applied_event_ids=(value,))


@pytest.mark.parametrize("ids", [(2, 1), (1, 1), (1, 3, 2)])
def test_event_ids_must_be_strictly_increasing(ids: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="strictly increasing"):
        tick(applied_event_ids=ids)


def test_the_text_of_a_refusal_stays_short_whatever_came_in() -> None:
    with pytest.raises(ValueError, match="strictly increasing") as refused:
        tick(applied_event_ids=tuple(range(100_000, 0, -1)))
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("prompt", [1, b"text", ["text"], True])
def test_a_prompt_is_text_or_none(prompt: Any) -> None:
    with pytest.raises(ValueError, match="prompt"):
        tick(prompt=prompt)
    assert tick(prompt=None).prompt is None


@pytest.mark.parametrize("name", ["reset", "close_session"])
@pytest.mark.parametrize("value", [1, 0, None, "true"])
def test_flags_must_be_real_bools(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a bool"):
        tick(**{name: value})


@pytest.mark.parametrize("controls", [[{"track": "camera", "schema": "s", "data": {}}], [None], ["camera"]])
def test_controls_must_be_control_objects(controls: Any) -> None:
    with pytest.raises(ValueError, match="ARDiffusionControlInput"):
        tick(controls=controls)


def test_lists_become_tuples_and_no_field_can_be_assigned() -> None:
    made = tick(applied_event_ids=[10, 11], controls=[CAMERA])

    assert made.applied_event_ids == (10, 11)
    assert made.controls == (CAMERA,)
    for field in dataclasses.fields(made):
        with pytest.raises(AttributeError):
            setattr(made, field.name, None)


@pytest.mark.parametrize("data", [None, [], "data", 1, [("a", 1)]])
def test_control_data_must_be_a_mapping(data: Any) -> None:
    with pytest.raises(ValueError, match="transport-safe"):
        ARDiffusionControlInput("camera", "v1", data)


@pytest.mark.parametrize(
    "value",
    [
        {1},
        b"x",
        bytearray(b"x"),
        memoryview(b"x"),
        object(),
        np.zeros(2),
        np.int64(1),
        1j,
        print,
        frozenset(),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize(
    "wrap", [lambda v: v, lambda v: [v], lambda v: {"x": [v]}], ids=["bare", "list", "dict"]
)
def test_a_nested_value_that_json_does_not_carry_is_refused(value: Any, wrap: Any) -> None:
    with pytest.raises(ValueError, match="transport-safe"):
        ARDiffusionControlInput("camera", "v1", {"a": wrap(value)})


@pytest.mark.parametrize("key", [1, None, True, ("a",), b"a"])
def test_a_key_that_is_no_text_is_refused(key: Any) -> None:
    with pytest.raises(ValueError, match="transport-safe"):
        ARDiffusionControlInput("camera", "v1", {"a": {key: 1}})


def test_every_json_kind_of_value_is_taken() -> None:
    data = {
        "none": None,
        "text": "x",
        "bool": True,
        "int": 1,
        "float": 1.5,
        "map": {"a": [1, (2, 3)]},
        "list": [],
    }

    control = ARDiffusionControlInput("camera", "v1", data)

    assert control.to_dict()["data"] == {**data, "map": {"a": [1, [2, 3]]}}
    assert control.data["bool"] is True


def test_control_data_is_a_deep_copy_that_nobody_can_change() -> None:
    frames = [["w"], ["a"]]
    data: dict[str, Any] = {"frames": frames, "inner": {"x": 1}}
    control = ARDiffusionControlInput("camera", "v1", data)

    frames[0].append("d")
    frames.append([])
    data["inner"]["x"] = 2
    data["new"] = 1

    assert control.data == {"frames": (("w",), ("a",)), "inner": {"x": 1}}
    for target in (control.data, control.data["inner"]):
        with pytest.raises(TypeError):
            target["x"] = 3  # type: ignore[index]
    assert isinstance(control.data["frames"], tuple)
    assert isinstance(control.data["frames"][0], tuple)


def test_the_plain_form_of_a_control_is_detached() -> None:
    control = ARDiffusionControlInput("camera", "v1", {"frames": [["w"]], "inner": {"x": 1}})

    plain = control.to_dict()
    json.dumps(plain)
    plain["data"]["frames"][0].append("s")
    plain["data"]["inner"]["x"] = 9

    assert control.to_dict()["data"] == {"frames": [["w"]], "inner": {"x": 1}}
    assert type(plain["data"]) is dict
    assert type(plain["data"]["frames"]) is list


def test_metadata_of_a_tick_has_exactly_four_fields_and_equals_it() -> None:
    metadata = ARDiffusionChunkMetadata.from_tick(tick())

    assert metadata.to_dict() == {
        "session_id": "world-1",
        "request_id": "chunk-request-7",
        "chunk_index": 7,
        "applied_event_ids": [10, 11],
    }
    assert ARDiffusionChunkMetadata.from_dict(metadata.to_dict()) == metadata
    metadata.check_equals(tick())


@pytest.mark.parametrize(
    ("name", "value"),
    [("session_id", "world-2"), ("request_id", "other"), ("chunk_index", 8), ("applied_event_ids", [10])],
)
def test_metadata_with_any_one_field_changed_does_not_match(name: str, value: Any) -> None:
    changed = ARDiffusionChunkMetadata.from_dict(
        {**ARDiffusionChunkMetadata.from_tick(tick()).to_dict(), name: value}
    )

    with pytest.raises(ChunkMetadataError, match="does not match") as refused:
        changed.check_equals(tick())
    assert refused.value.field == name


@pytest.mark.parametrize(
    "envelope",
    [
        None,
        {},
        {METADATA_KEY: None},
        {METADATA_KEY: {}},
        {METADATA_KEY: {**ARDiffusionChunkMetadata.from_tick(tick()).to_dict(), "extra": 1}},
        {METADATA_KEY: {**ARDiffusionChunkMetadata.from_tick(tick()).to_dict(), "chunk_index": True}},
        {METADATA_KEY: {**ARDiffusionChunkMetadata.from_tick(tick()).to_dict(), "chunk_index": 7.0}},
        {
            METADATA_KEY: {
                **ARDiffusionChunkMetadata.from_tick(tick()).to_dict(),
                "applied_event_ids": [11, 10],
            }
        },
        {METADATA_KEY: {**ARDiffusionChunkMetadata.from_tick(tick()).to_dict(), "applied_event_ids": "1"}},
    ],
)
def test_a_malformed_envelope_is_a_metadata_error(envelope: Any) -> None:
    with pytest.raises(ChunkMetadataError):
        metadata_from_envelope(envelope)


def test_an_envelope_with_more_keys_of_the_model_is_fine() -> None:
    metadata = ARDiffusionChunkMetadata.from_tick(tick())

    assert metadata_from_envelope({METADATA_KEY: metadata.to_dict(), "timings": {}}) == metadata
