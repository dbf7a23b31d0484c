"""`worldline sessions`: what is sent, and what is printed."""

import orjson
import pytest
import redis

from contracts.commands import Op
from contracts.errors import TickFailedError
from contracts.keys import Keys
from contracts.lifecycle import Status
from contracts.state import SessionState
from support.answerer import Answerer, chunk_fields

CONTROL = {"mode": "state", "transitions": [{"actions": ["w"], "client_ts_ms": 0}]}
KEYS = Keys()


@pytest.fixture
def client(broker) -> redis.Redis:
    with broker.client() as client:
        yield client


def put_state(client: redis.Redis, session_id: str, status: str = "ACTIVE", at_ms: int = 1, **fields) -> None:
    state = {
        "status": status,
        "model": "reference",
        "chunk_index": 2,
        "updated_at_ms": at_ms,
        "event_floor": -1,
    }
    client.hset(KEYS.session(session_id).state, mapping=state | {"max_pending_events": 4} | fields)
    client.zadd(KEYS.index(Status(status)), {session_id: at_ms})
    events = KEYS.session(session_id).events
    client.xdel(events, client.xadd(events, {"x": "x"}))


def test_create_sends_every_option(served: Answerer, worldline) -> None:
    options = {
        "--model": "reference",
        "--reducer": "lingbot-camera",
        "--seed": "7",
        "--prompt": "a valley",
        "--pace-ms": "40",
        "--presence-ms": "60000",
        "--idle-ms": "90000",
        "--max-pending-events": "9",
        "--recording": "all",
    }
    pairs = [part for pair in options.items() for part in pair]

    said = worldline("sessions", "create", "w", *pairs, "--param", "fov=60", "--param", 'sky="red"', "--json")

    assert said.status == 0
    assert said.json == {"session_id": "w", "life": "life-1", "chunk_index": 0, "event_floor": -1}
    assert dict(served.seen[0].args) == {
        "model": "reference",
        "reducer": "lingbot-camera",
        "seed": 7,
        "prompt": "a valley",
        "pace_ms": 40,
        "presence_ms": 60_000,
        "idle_ms": 90_000,
        "max_pending_events": 9,
        "recording": "all",
        "params": {"fov": 60, "sky": "red"},
    }


@pytest.mark.parametrize(
    ("arguments", "op", "args", "document"),
    [
        (("run", "w"), Op.RUN, {}, {"session_id": "w", "running": True}),
        (("run", "w", "--pace-ms", "9"), Op.RUN, {"pace_ms": 9}, {"session_id": "w", "running": True}),
        (("pause", "w"), Op.PAUSE, {}, {"session_id": "w", "running": False}),
        (("close", "w"), Op.CLOSE, {}, {"session_id": "w", "status": "CLOSED"}),
        (
            ("close", "w", "--reason", "late"),
            Op.CLOSE,
            {"reason": "late"},
            {"session_id": "w", "status": "CLOSED"},
        ),
        (
            ("reset", "w"),
            Op.RESET,
            {},
            {"session_id": "w", "life": "life-2", "chunk_index": 0, "event_floor": 7},
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_command_is_sent_and_its_outcome_printed(
    served: Answerer, worldline, *, arguments, op, args, document
) -> None:
    said = worldline("sessions", *arguments, "--json")
    plain = worldline("sessions", *arguments)

    assert (said.status, said.json) == (0, document)
    assert (plain.status, plain.out.count("\n"), plain.err) == (0, 1, "")
    assert [(command.op, dict(command.args)) for command in served.seen] == [(op, args)] * 2


def test_next_prints_an_array_and_its_progress_apart(served: Answerer, worldline) -> None:
    said = worldline("sessions", "next", "w", "--count", "3", "--json")
    single = worldline("sessions", "next", "w", "--json")

    assert [chunk["chunk_index"] for chunk in said.json] == [0, 1, 2]
    assert said.json[0] == chunk_fields("w", 0) | {"request_id": said.json[0]["request_id"]}
    assert said.err.count("\n") == 3
    assert [chunk["chunk_index"] for chunk in single.json] == [3]


def test_next_tells_what_was_committed_before_a_failure(served: Answerer, worldline) -> None:
    outcomes = [
        chunk_fields("w", 0),
        chunk_fields("w", 1),
        TickFailedError("the model failed", code="model_error"),
    ]
    served.handlers[Op.NEXT_CHUNK] = lambda command: outcomes.pop(0)

    said = worldline("sessions", "next", "w", "--count", "5", "--json")

    assert (said.status, len(said.json)) == (1, 2)
    assert said.err.endswith("error: the model failed\n")


def test_push_adds_an_event_with_prompt_and_controls(worldline, client) -> None:
    put_state(client, "w")
    control = f"camera:lingbot.camera_actions.v1:{orjson.dumps(CONTROL).decode()}"

    said = worldline(
        "sessions", "push", "w", "--event-id", "4", "--prompt", "rain", "--control", control, "--json"
    )
    again = worldline("sessions", "push", "w", "--event-id", "4", "--prompt", "rain", "--json")

    assert said.json == {"session_id": "w", "event_id": 4, "status": "ACCEPTED", "pending_event_count": 1}
    assert (again.status, again.json["status"]) == (0, "DUPLICATE")
    [(_, fields)] = client.xrange(KEYS.session("w").events)
    assert fields[b"event_id"] == b"4"
    assert fields[b"prompt"] == b"rain"
    assert orjson.loads(fields[b"controls"]) == [
        {"track": "camera", "schema": "lingbot.camera_actions.v1", "data": CONTROL}
    ]


def test_push_is_refused_with_the_status_of_the_reason(worldline, client) -> None:
    put_state(client, "stale", event_floor=9)
    put_state(client, "full", max_pending_events=1)
    put_state(client, "closing", status="CLOSING")
    assert worldline("sessions", "push", "full", "--event-id", "1", "--prompt", "p").status == 0

    for session_id, status in {"stale": 4, "full": 75, "closing": 4, "none": 3}.items():
        assert worldline("sessions", "push", session_id, "--event-id", "5", "--prompt", "p").status == status


def test_show_gives_the_fields_of_the_hash_typed(worldline, client) -> None:
    put_state(client, "w", seed=5, params='{"fov": 60}', prompt="hills")

    said = worldline("sessions", "show", "w", "--json")
    plain = worldline("sessions", "show", "w")

    assert set(said.json) == set(SessionState.__dataclass_fields__)
    assert (said.json["session_id"], said.json["status"], said.json["seed"]) == ("w", "ACTIVE", 5)
    assert said.json["params"] == {"fov": 60}
    assert "hills" in plain.out
    assert worldline("sessions", "show", "none").status == 3


def test_list_shows_what_the_index_says_and_the_state_confirms(worldline, client) -> None:
    put_state(client, "older", at_ms=10)
    put_state(client, "newer", at_ms=20)
    put_state(client, "failed", status="FAILED", failure_code="worker_lost")
    client.zadd(
        KEYS.index(Status.ACTIVE), {"gone": 30, "failed": 25}
    )  # a state that is gone, one that moved on

    everything = worldline("sessions", "list", "--json").json
    active = worldline("sessions", "list", "--status", "active", "--json").json
    plain = worldline("sessions", "list")

    assert [(entry["session_id"], entry["status"]) for entry in everything] == [
        ("newer", "ACTIVE"),
        ("older", "ACTIVE"),
        ("failed", "FAILED"),
    ]
    assert [entry["session_id"] for entry in active] == ["newer", "older"]
    assert active[0]["pending_events"] == 0
    assert "worker_lost" in plain.out
    assert worldline("sessions", "list", "--limit", "1", "--json").json == everything[:1]


def test_list_goes_through_all_pages_even_when_many_changed_at_once(worldline, client) -> None:
    names = [f"w{number}" for number in range(450)]
    pipeline = client.pipeline(transaction=False)
    for number, name in enumerate(names):
        pipeline.hset(KEYS.session(name).state, mapping={"status": "ACTIVE", "model": "m"})
        pipeline.zadd(KEYS.index(Status.ACTIVE), {name: 5 if number < 300 else number})
    pipeline.execute()

    listed = worldline("sessions", "list", "--json").json

    assert sorted(entry["session_id"] for entry in listed) == sorted(names)
    assert listed[0]["session_id"] == "w449"


def test_a_corrupt_session_does_not_hide_the_others(worldline, client) -> None:
    put_state(client, "good")
    put_state(client, "bad", chunk_index="two")
    client.set(KEYS.session("worse").state, "x")
    client.zadd(KEYS.index(Status.ACTIVE), {"worse": 5})

    said = worldline("sessions", "list", "--json")

    assert said.status == 1
    assert {entry["session_id"]: entry["status"] for entry in said.json} == {
        "good": "ACTIVE",
        "bad": None,
        "worse": None,
    }
    assert all(entry["error"]["code"] == "corrupt_data" for entry in said.json if entry["status"] is None)
    assert worldline("sessions", "list").status == 1


def test_an_empty_list_is_an_empty_array(worldline) -> None:
    assert worldline("sessions", "list", "--json").json == []
    assert worldline("sessions", "list").out.startswith("session")


def test_watch_prints_one_line_a_chunk(served: Answerer, worldline, client) -> None:
    put_state(client, "w", status="CLOSED")
    for index in range(3):
        fields = chunk_fields("w", index, applied_event_ids="[4,5]", frames="f", accepted_to_applied_ms=index)
        client.xadd(KEYS.session("w").chunks, fields)

    said = worldline("sessions", "watch", "w", "--from-start", "--json")
    some = worldline("sessions", "watch", "w", "--from-start", "--count", "2")

    lines = [orjson.loads(line) for line in said.out.splitlines()]
    assert [(line["chunk_index"], line["applied_event_ids"]) for line in lines] == [
        (n, [4, 5]) for n in range(3)
    ]
    assert some.out.count("\n") == 3  # with its header
    none = worldline("sessions", "watch", "none")
    assert (none.status, none.out, none.err) == (3, "", "error: session none does not exist\n")
