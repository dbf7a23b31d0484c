"""The JSON Schemas: what the code writes validates, and what its readers refuse does not."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from contracts.commands import Answer, Command, Op
from contracts.creation import CreateArgs
from contracts.dreamzero import parse_observation
from contracts.errors import EventQueueFullError
from contracts.events import ARDiffusionControlInput, ARDiffusionSessionEvent
from contracts.lingbot import actions_control, parse_actions, parse_trajectory
from contracts.make_schemas import FOLDER, schemas
from contracts.messages import ChunkOutput, Kind, Notice, NoticeKind, WorkerReply, WorkerRequest
from contracts.state import CommittedChunk
from contracts.tick import ARDiffusionTickRequest

CONTROL = ARDiffusionControlInput("camera", "v1", {"x": [1, 2.5, None]})
TICK = ARDiffusionTickRequest("world-1", "r", 3, (1, 2), "p", (CONTROL,))
OUTPUT = ChunkOutput({"ar_diffusion": {}}, "redis:k", "application/x-npy", "00", 3, None)
CHUNK = CommittedChunk("l", 3, "r", (1, 2), "redis:k", "application/x-npy", "00", 3, None, 1, 2, None, 4)
FLAT_CHUNK = {
    name: json.dumps(value) if isinstance(value, list) else str(value)
    for name, value in {**CHUNK.to_dict(), "applied_event_ids": [1, 2]}.items()
    if value is not None
}
OBSERVATION = {
    "images": {"wrist": "redis:frame-1", "left": "file:///frames/2.png"},
    "state": {"joint_position": [0, 0.5, -1.25], "gripper_position": [1]},
    "language": "put the cup on the shelf",
}
IDENTITY = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
STATE = {"mode": "state", "transitions": [{"actions": ["W"], "client_ts_ms": 5}, {"actions": []}]}


def request(kind: Kind) -> dict[str, str]:
    tick = TICK if kind is Kind.TICK else None
    return WorkerRequest(
        kind, "world-1", "r", "l", "l", 3, "wl:{p0}:inbox", "m", {"a": 1}, 7, tick
    ).to_entry()


def command(op: Op, **args: Any) -> dict[str, Any]:
    return json.loads(Command(op, "world-1", "c", args).to_json())


GOOD: list[tuple[str, Any]] = [
    ("control", CONTROL.to_dict()),
    ("event_entry", ARDiffusionSessionEvent(0, "p").to_entry()),
    ("event_entry", ARDiffusionSessionEvent(10, "p", (CONTROL,)).to_entry()),
    ("event_entry", ARDiffusionSessionEvent(10, controls=(CONTROL,)).to_entry()),
    ("tick", TICK.to_dict()),
    ("tick", ARDiffusionTickRequest("s", "r", 0).to_dict()),
    ("command", command(Op.CREATE, **CreateArgs("m").to_dict())),
    (
        "command",
        command(
            Op.CREATE,
            **CreateArgs("m", "r", 1, "p", {"a": 1}, "last 5", 10, 0, 1000, 1000).to_dict(),
        ),
    ),
    ("command", command(Op.CREATE, model="m", seed=None, reducer=None, prompt=None)),
    *(("command", command(op)) for op in Op if op is not Op.CREATE),
    ("command", command(Op.RUN, pace_ms=0)),
    ("command", command(Op.CLOSE, life="l", reason="bye")),
    ("command", {"op": "pause", "session_id": "s", "command_id": "c"}),
    ("answer", json.loads(Answer("c", result=CHUNK.to_dict()).to_json())),
    ("answer", json.loads(Answer("c", result={"life": "l", "chunk_index": 0, "event_floor": -1}).to_json())),
    ("answer", json.loads(Answer("c", result={"status": "CLOSED"}).to_json())),
    ("answer", json.loads(Answer("c", error=EventQueueFullError("full", field="event")).to_json())),
    ("chunk", json.loads(json.dumps(CHUNK.to_dict()))),
    ("chunk_entry", FLAT_CHUNK),
    ("chunk_entry", {**FLAT_CHUNK, "frames": "redis:f", "accepted_to_applied_ms": "5"}),
    *(("worker_request", request(kind)) for kind in Kind),
    ("worker_request", {**request(Kind.TICK), "expires_at_ms": "99"}),
    ("worker_reply", json.loads(WorkerReply("s", "r", 1, "l", "i", OUTPUT, None, 1, 2).to_json())),
    (
        "worker_reply",
        json.loads(WorkerReply("s", "r", 1, "l", "i", error=EventQueueFullError("x")).to_json()),
    ),
    ("worker_reply", json.loads(WorkerReply("s", "r", 1, "l", "i").to_json())),
    *(("notice", json.loads(Notice(kind, "s", "w", "l", "i", "m").to_json())) for kind in NoticeKind),
    ("lingbot_camera_actions", STATE),
    ("lingbot_camera_actions", {"mode": "script", "frames": [["w", "D"], []]}),
    ("lingbot_camera_actions", actions_control([("w",), (), ("a", "l")]).to_dict()["data"]),
    ("lingbot_camera_trajectory", {"poses": [IDENTITY] * 9, "intrinsics": [[500, 500.5, 416, 240]] * 9}),
    ("dreamzero_observation", OBSERVATION),
]

REPLY = json.loads(WorkerReply("s", "r", 1, "l", "i", OUTPUT).to_json())
NOTICE = json.loads(Notice(NoticeKind.EVICTED, "s", "w", "l", "i").to_json())
ANSWER = json.loads(Answer("c", result={}).to_json())

BAD: list[tuple[str, Any]] = [
    ("control", {**CONTROL.to_dict(), "more": 1}),
    ("control", {**CONTROL.to_dict(), "track": " "}),
    ("control", {**CONTROL.to_dict(), "data": []}),
    ("event_entry", {"event_id": "1"}),
    ("event_entry", {"prompt": "p"}),
    ("event_entry", {"event_id": 1, "prompt": "p"}),
    ("event_entry", {"event_id": "07", "prompt": "p"}),
    ("event_entry", {"event_id": "-1", "prompt": "p"}),
    ("event_entry", {"event_id": "1.5", "prompt": "p"}),
    ("event_entry", {"event_id": "9" * 17, "prompt": "p"}),
    ("event_entry", {"event_id": "1", "prompt": "p", "colour": "red"}),
    ("event_entry", {"event_id": "1", "prompt": "x" * 65_537}),
    ("event_entry", {"event_id": "1", "controls": [CONTROL.to_dict()]}),
    ("tick", {**TICK.to_dict(), "chunk_index": -1}),
    ("tick", {**TICK.to_dict(), "reset": 1}),
    ("tick", {**TICK.to_dict(), "applied_event_ids": [1, 1]}),
    ("tick", {**TICK.to_dict(), "applied_event_ids": [True]}),
    ("command", {"op": "dance", "session_id": "s", "command_id": "c"}),
    ("command", {"op": "create", "session_id": "s", "command_id": "c", "args": {}}),
    ("command", {"op": "create", "session_id": "s", "command_id": "c"}),
    ("command", {"op": "create", "session_id": "s", "command_id": "c", "args": {"model": "m", "seed": -1}}),
    (
        "command",
        {"op": "create", "session_id": "s", "command_id": "c", "args": {"model": "m", "recording": "some"}},
    ),
    ("command", {"op": "create", "session_id": "s", "command_id": "c", "args": {"model": "m", "colour": 1}}),
    ("command", {"op": "pause", "session_id": "a b", "command_id": "c"}),
    ("command", {"op": "pause", "session_id": "s", "command_id": "x" * 201}),
    ("command", {"op": "pause", "session_id": "s", "command_id": "c", "args": {"pace_ms": 1}}),
    ("command", {"op": "pause", "session_id": "s", "command_id": "c", "more": 1}),
    ("command", {"op": "run", "session_id": "s", "command_id": "c", "args": {"pace_ms": -1}}),
    ("answer", {"command_id": "c", "ok": True}),
    ("answer", {**ANSWER, "ok": False}),
    ("answer", {"command_id": "c", "ok": False, "error": {"code": "stale"}}),
    ("chunk", {**CHUNK.to_dict(), "chunk_index": "3"}),
    ("chunk_entry", {**FLAT_CHUNK, "chunk_index": "x"}),
    ("worker_request", {**request(Kind.RESET), "kind": "tick"}),
    ("worker_request", {**request(Kind.RESET), "fence": "-1"}),
    ("worker_request", {**request(Kind.TICK), "kind": "reset"}),
    ("worker_reply", {**REPLY, "fence": -1}),
    ("worker_reply", {**REPLY, "output": {}}),
    ("notice", {**NOTICE, "kind": "gone"}),
    ("notice", {**NOTICE, "more": 1}),
    ("lingbot_camera_actions", {"mode": "dance"}),
    ("lingbot_camera_actions", {"mode": "state", "transitions": []}),
    ("lingbot_camera_actions", {"mode": "state", "transitions": [{"actions": ["x"]}]}),
    ("lingbot_camera_actions", {"mode": "state", "transitions": [{"actions": ["w"], "client_ts_ms": -1}]}),
    ("lingbot_camera_actions", {"mode": "script", "frames": []}),
    ("lingbot_camera_actions", {"mode": "frames", "frames": [["w"]]}),
    ("lingbot_camera_trajectory", {"poses": [], "intrinsics": []}),
    ("lingbot_camera_trajectory", {"poses": [IDENTITY[:3]] * 9, "intrinsics": [[1, 1, 1, 1]] * 9}),
    ("lingbot_camera_trajectory", {"poses": [IDENTITY] * 8, "intrinsics": [[1, 1, 1, 1]] * 8}),
    *(
        ("dreamzero_observation", {**OBSERVATION, "images": images})
        for images in ({}, {"wrist": "picture"}, {" ": "redis:a"})
    ),
    *(
        ("dreamzero_observation", {**OBSERVATION, "state": state})
        for state in ({}, {"arm": []}, {"arm": [True]}, {"arm": 1})
    ),
    ("dreamzero_observation", {**OBSERVATION, "language": " "}),
    ("dreamzero_observation", {name: OBSERVATION[name] for name in ("images", "state")}),
]


def validator(name: str) -> Draft202012Validator:
    return Draft202012Validator(json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", sorted(schemas()))
def test_each_file_is_a_schema_that_stands_alone_and_says_what_it_is_for(name: str) -> None:
    schema = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))

    Draft202012Validator.check_schema(schema)
    assert schema["title"] == name
    assert schema["description"]
    assert "$ref" not in json.dumps(schema)


@pytest.mark.parametrize(("name", "message"), GOOD)
def test_what_the_code_writes_validates(name: str, message: Any) -> None:
    validator(name).validate(message)
    for text, inner in inner_texts(validator(name).schema, message):
        Draft202012Validator(inner).validate(json.loads(text))


@pytest.mark.parametrize(("name", "message"), BAD)
def test_what_the_code_refuses_does_not_validate(name: str, message: Any) -> None:
    assert not validator(name).is_valid(message)


def test_every_schema_has_good_and_bad_cases() -> None:
    assert {name for name, _ in GOOD} == {name for name, _ in BAD} == set(schemas())


def test_the_parameters_of_creation_are_those_of_the_code() -> None:
    create = next(
        form for form in schemas()["command"]["oneOf"] if form["properties"]["op"] == {"const": "create"}
    )

    assert set(create["properties"]["args"]["properties"]) == set(CreateArgs.__dataclass_fields__)


def test_the_fields_of_a_chunk_are_those_of_the_code() -> None:
    for name in ("chunk", "chunk_entry"):
        assert set(schemas()[name]["properties"]) == set(CommittedChunk.__dataclass_fields__)


@given(st.text(max_size=12) | st.integers(-5, 2**60).map(str), st.none() | st.text(max_size=5))
@settings(max_examples=50)
def test_an_entry_that_the_code_reads_validates(event_id: str, prompt: str | None) -> None:
    entry = {"event_id": event_id} | ({} if prompt is None else {"prompt": prompt})
    try:
        ARDiffusionSessionEvent.from_entry({name.encode(): value.encode() for name, value in entry.items()})
    except ValueError:
        return

    assert validator("event_entry").is_valid(entry)


def test_an_observation_that_validates_is_read() -> None:
    assert parse_observation(OBSERVATION).language == OBSERVATION["language"]


def test_lingbot_data_that_validates_is_read() -> None:
    parse_actions(STATE)
    parse_trajectory({"poses": [IDENTITY], "intrinsics": [[500, 500.5, 416, 240]]})


def inner_texts(schema: Any, message: dict[str, Any]) -> list[tuple[str, Any]]:
    """The JSON texts in a flat entry, each with the schema of what it holds."""
    forms = schema.get("oneOf", [schema])
    form = next(form for form in forms if Draft202012Validator(form).is_valid(message))
    return [
        (message[name], value["contentSchema"])
        for name, value in form["properties"].items()
        if "contentSchema" in value and name in message
    ]
