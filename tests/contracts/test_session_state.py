"""Reading the state hash and the chunks stream, whatever they hold."""

import json
from typing import Any

import pytest

from contracts.errors import CorruptDataError
from contracts.events import ARDiffusionControlInput
from contracts.lifecycle import Status
from contracts.messages import InFlight, Kind
from contracts.state import CommittedChunk, SessionState

RECORD = InFlight(
    request_id="ar-world-1-4-00",
    kind=Kind.TICK,
    fence=9,
    life="ar-world-1-create-00",
    command_id="c1",
    chunk_index=4,
    event_ids=(7, 9),
    entries=("1-1", "1-2"),
    prompt="next",
    controls='[{"track":"camera","schema":"v1","data":{"x":1}}]',
    reducer_state='{"held":"w"}',
)

HASH = {
    "status": "ACTIVE",
    "epoch": "1700000000000000",
    "fence": "1700000000000009",
    "life": "ar-world-1-create-00",
    "chunk_index": "4",
    "event_floor": "-1",
    "prompt": "a hall",
    "controls": '[{"track":"camera","schema":"v1","data":{"x":1}}]',
    "reducer": "lingbot-camera",
    "reducer_state": '{"held":"w"}',
    "inflight": RECORD.to_json(),
    "last_request_id": "ar-world-1-3-00",
    "model": "reference",
    "params": '{"size":96}',
    "seed": "0",
    "worker": "gpu-0",
    "worker_incarnation": "ab",
    "recording": "last 10",
    "max_pending_events": "256",
    "pace_ms": "0",
    "presence_ms": "1000",
    "idle_ms": "1000",
    "rejected_total": '{"stale":2}',
    "failure_code": "evicted",
    "failure_message": "gone",
    "cleanup_error": "busy",
    "close_attempts": "1",
    "created_at_ms": "1",
    "updated_at_ms": "2",
    "schema_version": "1",
}


def raw(**changes: str | bytes | None) -> dict[bytes, bytes]:
    fields = {name: value for name, value in {**HASH, **changes}.items() if value is not None}
    return {
        name.encode(): value if isinstance(value, bytes) else value.encode() for name, value in fields.items()
    }


def read(**changes: str | bytes | None) -> SessionState:
    state = SessionState.from_hash("world-1", raw(**changes))
    assert state is not None
    return state


def test_every_field_is_read_with_its_type() -> None:
    state = read()

    assert state.status is Status.ACTIVE
    assert (state.epoch, state.fence, state.chunk_index, state.event_floor) == (
        1_700_000_000_000_000,
        1_700_000_000_000_009,
        4,
        -1,
    )
    assert state.controls == (ARDiffusionControlInput("camera", "v1", {"x": 1}),)
    assert state.reducer_state == {"held": "w"}
    assert state.inflight == RECORD
    assert (state.seed, state.pace_ms) == (0, 0)
    assert state.params == {"size": 96}
    assert state.rejected_total == {"stale": 2}


def test_no_hash_is_no_session_and_an_absent_field_is_none() -> None:
    assert SessionState.from_hash("world-1", {}) is None
    state = SessionState.from_hash("world-1", {b"status": b"CLOSED"})
    assert state is not None
    assert (state.prompt, state.inflight, state.seed, state.worker, state.event_floor) == (
        None,
        None,
        None,
        None,
        -1,
    )


def test_a_field_of_a_later_version_is_left_alone() -> None:
    assert read(novelty="x") == read()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("status", "active"),
        ("status", "RUNNING"),
        ("status", b"\xff"),
        ("epoch", "1.5"),
        ("epoch", "-1"),
        ("fence", ""),
        ("chunk_index", "-1"),
        ("chunk_index", " 4"),
        ("chunk_index", "0x4"),
        ("event_floor", "-2"),
        ("event_floor", "none"),
        ("prompt", b"\xff\xfe"),
        ("controls", "nonsense"),
        ("controls", "{}"),
        ("controls", '[{"track":"camera"}]'),
        ("reducer_state", "{"),
        ("inflight", "{}"),
        ("inflight", "[]"),
        ("inflight", "nonsense"),
        ("params", "[]"),
        ("params", "nonsense"),
        ("seed", "true"),
        ("max_pending_events", "many"),
        ("pace_ms", "-5"),
        ("rejected_total", "[]"),
        ("rejected_total", '{"stale":-1}'),
        ("rejected_total", '{"stale":true}'),
        ("close_attempts", "1e3"),
        ("created_at_ms", "9" * 17),
    ],
)
def test_a_field_that_nobody_of_ours_wrote_is_named(name: str, value: str | bytes) -> None:
    with pytest.raises(CorruptDataError, match=f"world-1.*{name}") as refused:
        read(**{name: value})
    assert refused.value.field == name


def test_a_hash_without_a_status_is_corrupt() -> None:
    with pytest.raises(CorruptDataError, match="status"):
        read(status=None)


@pytest.mark.parametrize(
    "changes",
    [
        {"request_id": None},
        {"request_id": 7},
        {"kind": "dance"},
        {"kind": None},
        {"fence": -1},
        {"fence": True},
        {"life": ""},
        {"command_id": 7},
        {"chunk_index": "4"},
        {"event_ids": [2, 1]},
        {"event_ids": None},
        {"entries": "1-1"},
        {"entries": [1]},
        {"prompt": 7},
        {"controls": []},
        {"reducer_state": {}},
        {"more": 1},
    ],
    ids=str,
)
def test_a_record_in_flight_that_nobody_of_ours_wrote_is_corrupt(changes: dict[str, Any]) -> None:
    with pytest.raises(CorruptDataError, match="inflight"):
        read(inflight=json.dumps({**json.loads(RECORD.to_json()), **changes}))


def test_the_form_for_tools_is_json_with_every_field_typed() -> None:
    plain = json.loads(json.dumps(read().to_dict()))

    assert plain["session_id"] == "world-1"
    assert set(plain) == {"session_id", *HASH}
    assert plain["controls"] == [{"track": "camera", "schema": "v1", "data": {"x": 1}}]
    assert plain["inflight"]["event_ids"] == [7, 9]
    assert plain["inflight"]["reducer_state"] == {"held": "w"}
    assert plain["inflight"]["controls"] == plain["controls"]


def test_the_parent_of_chunk_0_is_the_life_and_of_a_later_one_the_last_request() -> None:
    assert read().parent_request_id == "ar-world-1-3-00"
    assert read(chunk_index="0").parent_request_id == "ar-world-1-create-00"
    assert read(last_request_id=None).parent_request_id == "ar-world-1-create-00"


CHUNK = {
    "life": "l",
    "chunk_index": "3",
    "request_id": "r",
    "applied_event_ids": "[1,2]",
    "payload": "redis:key",
    "content_type": "application/x-npy",
    "sha256": "00",
    "bytes": "12",
    "queued_ms": "1",
    "executed_ms": "2",
    "committed_at_ms": "3",
}


def chunk_entry(**changes: str | None) -> dict[bytes, bytes]:
    return {
        name.encode(): value.encode() for name, value in {**CHUNK, **changes}.items() if value is not None
    }


def test_a_chunks_entry_is_read_with_its_types() -> None:
    chunk = CommittedChunk.from_entry(chunk_entry())

    assert (chunk.chunk_index, chunk.applied_event_ids, chunk.bytes) == (3, (1, 2), 12)
    assert (chunk.frames, chunk.accepted_to_applied_ms) == (None, None)
    assert (
        CommittedChunk.from_entry(chunk_entry(frames="redis:f", accepted_to_applied_ms="0")).frames
        == "redis:f"
    )


def test_the_answer_form_of_a_chunk_reads_back_equal() -> None:
    chunk = CommittedChunk.from_entry(chunk_entry(accepted_to_applied_ms="5"))

    assert CommittedChunk.from_dict(json.loads(json.dumps(chunk.to_dict()))) == chunk


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, None) for name in CHUNK]
    + [
        ("chunk_index", "-1"),
        ("chunk_index", "x"),
        ("applied_event_ids", "[2,1]"),
        ("applied_event_ids", "12"),
        ("bytes", "1.5"),
        ("payload", ""),
        ("accepted_to_applied_ms", "soon"),
    ],
)
def test_a_chunks_entry_that_nobody_of_ours_wrote_is_corrupt(name: str, value: str | None) -> None:
    with pytest.raises(CorruptDataError, match=name) as refused:
        CommittedChunk.from_entry(chunk_entry(**{name: value}))
    assert refused.value.field == name


@pytest.mark.parametrize("name", ["chunk_index", "applied_event_ids", "life"])
def test_an_answer_without_a_field_of_the_chunk_is_corrupt(name: str) -> None:
    plain = CommittedChunk.from_entry(chunk_entry()).to_dict()
    del plain[name]

    with pytest.raises(CorruptDataError, match=name):
        CommittedChunk.from_dict(plain)
