"""Messages between processes: each survives its wire form, and a bad one is refused by field."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.commands import Answer, Command, Op
from contracts.creation import MAX_PENDING_EVENTS, CreateArgs, recording_limit
from contracts.errors import EventStaleError, InvalidArgumentError, ModelError, WorldlineError
from contracts.events import MAX_EVENT_BYTES, ARDiffusionControlInput
from contracts.identity import MAX_INTEGER
from contracts.messages import ChunkOutput, InFlight, Kind, Notice, NoticeKind, WorkerReply, WorkerRequest
from contracts.tick import ARDiffusionTickRequest

INDEX = st.integers(0, MAX_INTEGER)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
TEXT_ID = TEXT.filter(lambda text: bool(text.strip()))
SESSION_ID = st.from_regex(r"[A-Za-z0-9._:-]{1,20}", fullmatch=True)
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-MAX_INTEGER, MAX_INTEGER)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
OBJECTS = st.dictionaries(TEXT, PLAIN, max_size=3)
EVENT_IDS = st.sets(INDEX, max_size=4).map(lambda ids: tuple(sorted(ids)))
CONTROLS = st.lists(st.builds(ARDiffusionControlInput, TEXT_ID, TEXT_ID, OBJECTS), max_size=2).map(tuple)
TICKS = st.builds(
    ARDiffusionTickRequest,
    SESSION_ID,
    TEXT_ID,
    INDEX,
    EVENT_IDS,
    st.none() | TEXT,
    CONTROLS,
    st.booleans(),
    st.booleans(),
)


def optional(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


def flat(entry: dict[str, str]) -> dict[bytes, bytes]:
    return {name.encode(): value.encode() for name, value in entry.items()}


CREATES = st.builds(
    CreateArgs,
    model=TEXT_ID,
    reducer=TEXT_ID,
    seed=optional(INDEX),
    prompt=optional(TEXT),
    params=OBJECTS,
    recording=st.sampled_from(["off", "all", "last 1", "last 1000"]),
    max_pending_events=st.integers(1, MAX_PENDING_EVENTS),
    pace_ms=optional(INDEX),
    presence_ms=optional(INDEX),
    idle_ms=optional(INDEX),
)


@given(CREATES)
def test_creation_parameters_survive_the_command(args: CreateArgs) -> None:
    command = Command.from_json(Command(Op.CREATE, "world-1", args=args.to_dict()).to_json().encode())

    assert CreateArgs.from_dict(command.args) == args


@given(
    st.sampled_from([Op.CLOSE, Op.DISCONNECT]),
    SESSION_ID,
    TEXT_ID,
    st.fixed_dictionaries({}, optional={"life": TEXT_ID, "reason": TEXT_ID}),
)
def test_a_command_survives_its_wire_form(
    op: Op, session_id: str, command_id: str, args: dict[str, str]
) -> None:
    command = Command(op, session_id, command_id, args)

    assert Command.from_json(command.to_json().encode()) == command


@pytest.mark.parametrize("op", [op for op in Op if op is not Op.CREATE])
def test_a_command_without_args_is_enough_for_every_op_but_create(op: Op) -> None:
    for args in ({}, {"args": None}, {"args": {}}):
        text = json.dumps({"op": op, "session_id": "s", "command_id": "c", **args}).encode()
        assert Command.from_json(text) == Command(op, "s", "c")


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("op", {"op": "dance"}),
        ("op", {"op": None}),
        ("op", {"op": []}),
        ("op", {"op": "CREATE"}),
        ("session_id", {"session_id": None}),
        ("session_id", {"session_id": "a b"}),
        ("command_id", {"command_id": None}),
        ("command_id", {"command_id": " "}),
        ("command_id", {"command_id": "x" * 201}),
        ("command_id", {"command_id": 7}),
        ("args", {"args": []}),
        ("args", {"args": "x"}),
        ("more", {"more": 1}),
        ("model", {"args": {}}),
        ("model", {"args": {"model": None}}),
        ("model", {"args": {"model": " "}}),
        ("colour", {"args": {"model": "m", "colour": 1}}),
        ("seed", {"args": {"model": "m", "seed": -1}}),
        ("seed", {"args": {"model": "m", "seed": True}}),
        ("seed", {"args": {"model": "m", "seed": 2**64}}),
        ("prompt", {"args": {"model": "m", "prompt": 7}}),
        ("prompt", {"args": {"model": "m", "prompt": "x" * (MAX_EVENT_BYTES + 1)}}),
        ("params", {"args": {"model": "m", "params": []}}),
        ("params.x", {"args": {"model": "m", "params": {"x": 2**53}}}),
        ("params", {"args": {"model": "m", "params": {"x": "x" * MAX_EVENT_BYTES}}}),
        ("recording", {"args": {"model": "m", "recording": "some"}}),
        ("max_pending_events", {"args": {"model": "m", "max_pending_events": 0}}),
        ("max_pending_events", {"args": {"model": "m", "max_pending_events": True}}),
        ("max_pending_events", {"args": {"model": "m", "max_pending_events": MAX_PENDING_EVENTS + 1}}),
        ("idle_ms", {"args": {"model": "m", "idle_ms": -1}}),
        ("pace_ms", {"op": "run", "args": {"pace_ms": 1.5}}),
        ("life", {"op": "close", "args": {"life": ""}}),
        ("reason", {"op": "disconnect", "args": {"reason": 7}}),
        ("pace_ms", {"op": "next_chunk", "args": {"pace_ms": 1}}),
        ("count", {"op": "sweep", "args": {"count": 1}}),
    ],
)
def test_a_bad_command_is_refused_by_field(field: str, changes: dict[str, Any]) -> None:
    plain = {"op": "create", "session_id": "world-1", "command_id": "c", "args": {"model": "m"}, **changes}

    with pytest.raises(InvalidArgumentError) as refused:
        Command.from_json(json.dumps(plain).encode())
    assert refused.value.field == field


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b'"x"', b"\xff", b'{"op":NaN}', b"[" * 100_000])
def test_a_command_that_is_no_json_object_is_refused(text: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="command"):
        Command.from_json(text)


def test_unset_creation_parameters_take_their_defaults() -> None:
    args = CreateArgs.from_dict({"model": "m", "seed": None, "reducer": None})

    assert (args.reducer, args.seed, args.recording, args.max_pending_events) == (
        "latest",
        None,
        "last 1000",
        256,
    )
    assert "seed" not in args.to_dict()
    assert CreateArgs.from_dict({"model": "m", "seed": 0, "pace_ms": 0}).to_dict()["seed"] == 0


def test_creation_parameters_can_not_be_changed_afterwards() -> None:
    params = {"sizes": [1]}
    args = CreateArgs("m", params=params)
    params["sizes"].append(2)

    assert args.to_dict()["params"] == {"sizes": [1]}


@pytest.mark.parametrize(
    ("text", "limit"), [("off", 0), ("all", None), ("last 1", 1), ("last 0", 0), ("last 1000", 1000)]
)
def test_recording_says_how_many_ticks_are_kept(text: str, limit: int | None) -> None:
    assert recording_limit(text) == limit


@pytest.mark.parametrize(
    "text", ["", "last", "last ", "last -1", "last 1.5", "last 07", "last ٣", "ALL", None, 5, "last 1\n"]
)
def test_any_other_recording_is_refused(text: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="recording"):
        recording_limit(text)


@given(TEXT_ID, OBJECTS)
def test_a_result_survives_the_answer(command_id: str, result: dict[str, Any]) -> None:
    answer = Answer(command_id, result=result)

    assert Answer.from_json(answer.to_json()) == answer
    assert answer.unwrap() == result


def test_an_error_survives_the_answer_and_is_raised_by_its_reader() -> None:
    text = Answer("c", error=EventStaleError("the event floor is 3", field="event_id")).to_json()

    assert json.loads(text)["ok"] is False
    with pytest.raises(EventStaleError, match="the event floor is 3") as raised:
        Answer.from_json(text).unwrap()
    assert raised.value.field == "event_id"


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        '{"command_id":"c"}',
        '{"command_id":"c","ok":true}',
        '{"command_id":"c","ok":false,"error":1}',
    ],
)
def test_a_malformed_answer_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError):
        Answer.from_json(text)


TICK_REQUESTS = st.builds(
    lambda tick, **rest: WorkerRequest(
        Kind.TICK, tick.session_id, tick.request_id, reply_to="wl:{p0}:inbox", model="m", tick=tick, **rest
    ),
    TICKS,
    life=TEXT_ID,
    parent_request_id=TEXT_ID,
    fence=INDEX,
    params=OBJECTS,
    seed=optional(INDEX),
)


@given(TICK_REQUESTS)
def test_a_tick_survives_the_request_stream(request: WorkerRequest) -> None:
    entry = flat(request.to_entry())

    assert WorkerRequest.from_entry(entry) == request
    assert WorkerRequest.from_entry({**entry, b"expires_at_ms": b"5"}).expires_at_ms == 5


@pytest.mark.parametrize("kind", [Kind.RESET, Kind.RELEASE])
def test_a_reset_or_release_carries_its_session_and_no_tick(kind: Kind) -> None:
    request = WorkerRequest(kind, "world-1", "r", "l", "l", 3, "wl:{p0}:inbox", "m", {"size": 96}, 7)

    entry = request.to_entry()

    assert entry["session_id"] == "world-1"
    assert "tick" not in entry
    assert WorkerRequest.from_entry(flat(entry)) == request


RELEASE = WorkerRequest(Kind.RELEASE, "world-1", "r", "l", "l", 3, "wl:{p0}:inbox", "m").to_entry()


@pytest.mark.parametrize("name", list(RELEASE))
def test_a_request_without_one_of_its_fields_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        WorkerRequest.from_entry({key: value for key, value in flat(RELEASE).items() if key != name.encode()})
    assert refused.value.field == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kind", b"dance"),
        ("kind", b"tick"),
        ("fence", b"-1"),
        ("fence", b"1.5"),
        ("fence", b"x"),
        ("seed", b"true"),
        ("expires_at_ms", b"never"),
        ("params", b"[]"),
        ("params", b"{"),
        ("session_id", b"a b"),
        ("life", b""),
        ("parent_request_id", b" "),
        ("model", b""),
        ("more", b"1"),
        ("life", b"\xff"),
    ],
)
def test_a_bad_request_is_a_typed_refusal(name: str, value: bytes) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        WorkerRequest.from_entry({**flat(RELEASE), name.encode(): value})
    assert refused.value.field


OUTPUTS = st.builds(ChunkOutput, OBJECTS, TEXT_ID, TEXT_ID, TEXT_ID, INDEX, optional(TEXT_ID))


REPLIES = st.builds(
    WorkerReply,
    SESSION_ID,
    TEXT_ID,
    INDEX,
    TEXT_ID,
    TEXT_ID,
    optional(OUTPUTS),
    queued_ms=INDEX,
    executed_ms=INDEX,
)


@given(REPLIES)
def test_a_reply_survives_the_inbox(reply: WorkerReply) -> None:
    assert WorkerReply.from_json(reply.to_json()) == reply


def test_an_error_survives_the_reply() -> None:
    reply = WorkerReply.from_json(
        WorkerReply("s", "r", 1, "l", "i", error=ModelError("NaN in layer 3")).to_json()
    )

    assert isinstance(reply.error, ModelError)
    assert str(reply.error) == "NaN in layer 3"
    assert reply.output is None


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("session_id", {"session_id": "a b"}),
        ("request_id", {"request_id": ""}),
        ("fence", {"fence": True}),
        ("fence", {"fence": "1"}),
        ("life", {"life": None}),
        ("incarnation", {"incarnation": 7}),
        ("queued_ms", {"queued_ms": -1}),
        ("executed_ms", {"executed_ms": 1.5}),
        ("output", {"output": []}),
        ("metadata", {"output": {}}),
        (
            "bytes",
            {"output": {"metadata": {}, "payload": "p", "content_type": "c", "sha256": "0", "bytes": -1}},
        ),
        ("error", {"error": "no"}),
    ],
)
def test_a_bad_reply_is_refused_by_field(field: str, changes: dict[str, Any]) -> None:
    plain = {**json.loads(WorkerReply("s", "r", 1, "l", "i").to_json()), **changes}

    with pytest.raises(InvalidArgumentError) as refused:
        WorkerReply.from_json(json.dumps(plain))
    assert refused.value.field == field


@given(st.builds(Notice, st.sampled_from(NoticeKind), SESSION_ID, TEXT_ID, TEXT_ID, TEXT_ID, TEXT))
def test_a_notice_survives_the_inbox(notice: Notice) -> None:
    assert Notice.from_json(notice.to_json()) == notice


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("kind", {"kind": "gone"}),
        ("session_id", {"session_id": ""}),
        ("life", {"life": None}),
        ("more", {"more": 1}),
    ],
)
def test_a_bad_notice_is_refused_by_field(field: str, changes: dict[str, Any]) -> None:
    plain = {**json.loads(Notice(NoticeKind.EVICTED, "s", "w", "l", "i").to_json()), **changes}

    with pytest.raises(InvalidArgumentError) as refused:
        Notice.from_json(json.dumps(plain))
    assert refused.value.field == field


RECORDS = st.builds(
    InFlight,
    TEXT_ID,
    st.sampled_from(Kind),
    INDEX,
    TEXT_ID,
    command_id=optional(TEXT_ID),
    chunk_index=optional(INDEX),
    event_ids=EVENT_IDS,
    entries=st.lists(INDEX.map("{}-0".format), max_size=3).map(tuple),
    prompt=optional(TEXT),
    reducer_state=PLAIN.map(json.dumps),
)


@given(RECORDS)
def test_a_record_in_flight_survives_the_state_hash(record: InFlight) -> None:
    assert InFlight.from_json(record.to_json()) == record


@given(
    st.text(max_size=30)
    | st.recursive(st.none() | st.integers() | st.text(max_size=4), st.lists).map(json.dumps)
)
def test_arbitrary_text_never_breaks_a_reader(text: str) -> None:
    for read in (Answer.from_json, WorkerReply.from_json, Notice.from_json, InFlight.from_json):
        with pytest.raises(WorldlineError):
            read(text)
