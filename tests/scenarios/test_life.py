"""A whole life on real processes: by the command line, and by redis-py alone."""

import json
import signal
import sys
import time
import uuid
from binascii import crc_hqx
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from support.dev import Dev, start_dev
from support.processes import Processes

pytestmark = [pytest.mark.real_broker, pytest.mark.processes]

KEYS_HELD = {"mode": "state", "transitions": [{"actions": ["w"], "client_ts_ms": 0}]}
CONTROL = {"track": "camera", "schema": "lingbot.camera_actions.v1", "data": KEYS_HELD}


@pytest.fixture(scope="module")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dev]:
    harness = Processes(tmp_path_factory.mktemp("processes"))
    try:
        yield start_dev(harness, tmp_path_factory.mktemp("dev") / "data")
    finally:
        harness.end()


def test_a_life_by_the_command_line(dev: Dev) -> None:
    def ask(*arguments: str, status: int = 0):
        return json.loads(dev.cli("sessions", *arguments, "--json", status=status).stdout)

    started = ask("create", "cli", "--model", "reference", "--reducer", "lingbot-camera", "--seed", "3")
    assert (started["chunk_index"], started["event_floor"]) == (0, -1)
    assert ask("create", "cli", "--model", "reference", status=4)["error"]["code"] == "already_exists"

    receipt = ask(
        *("push", "cli", "--event-id", "5", "--prompt", "rain"),
        *("--control", f"camera:lingbot.camera_actions.v1:{json.dumps(KEYS_HELD)}"),
    )
    assert (receipt["status"], receipt["pending_event_count"]) == ("ACCEPTED", 1)
    chunks = ask("next", "cli", "--count", "2")
    assert [(chunk["chunk_index"], chunk["applied_event_ids"]) for chunk in chunks] == [(0, [5]), (1, [])]
    assert ask("push", "cli", "--event-id", "5", "--prompt", "rain")["status"] == "DUPLICATE"
    assert ask("push", "cli", "--event-id", "4", "--prompt", "rain", status=4)["error"]["code"] == "stale"

    state = ask("show", "cli")
    assert (state["status"], state["chunk_index"], state["event_floor"]) == ("ACTIVE", 2, 5)
    assert (state["prompt"], state["controls"][0]["track"]) == ("rain", "camera")
    assert any(entry["session_id"] == "cli" for entry in ask("list", "--status", "ACTIVE"))

    ask("run", "cli", "--pace-ms", "20")
    lines = dev.cli("sessions", "watch", "cli", "--from-start", "--count", "6", "--json").stdout.splitlines()
    assert [json.loads(line)["chunk_index"] for line in lines] == list(range(6))
    ask("pause", "cli")

    again = ask("reset", "cli")
    assert (again["chunk_index"], again["event_floor"]) == (0, 5)
    assert again["life"] != started["life"]
    assert ask("close", "cli") == {"session_id": "cli", "status": "CLOSED"}
    assert ask("close", "cli") == {"session_id": "cli", "status": "CLOSED"}
    assert ask("next", "cli", status=4)["error"]["code"] == "invalid_state"
    assert ask("next", "nobody", status=3)["error"]["code"] == "not_found"


def test_a_life_by_redis_py_alone(dev: Dev) -> None:
    """Everything here is spelled out, as a program in any other language would do it."""
    broker = redis.Redis.from_url(dev.url, decode_responses=True)
    session = "bare"
    base = f"wl:{{{session}}}"
    partitions = int(broker.hget("wl:config", "partitions"))
    inbox = f"wl:{{p{crc_hqx(session.encode(), 0) % 16384 % partitions}}}:inbox"

    def command(op: str, **args) -> dict:
        newest = broker.xrevrange(f"{base}:answers", count=1)
        cursor = newest[0][0] if newest else "0-0"
        command_id = uuid.uuid4().hex
        body = {"op": op, "session_id": session, "command_id": command_id, "args": args}
        broker.xadd(inbox, {"command": json.dumps(body)})
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            for _, entries in broker.xread({f"{base}:answers": cursor}, block=1_000):
                for cursor, fields in entries:  # noqa: B007 -- the cursor moves on
                    answer = json.loads(fields["answer"])
                    if answer["command_id"] == command_id:
                        return answer
        pytest.fail(f"{op} was not answered")

    # Without a session an event goes nowhere.
    assert broker.xadd(f"{base}:events", {"event_id": "1", "prompt": "x"}, nomkstream=True) is None

    created = command("create", model="reference", reducer="lingbot-camera", seed=11)
    assert created["ok"] is True
    assert created["result"]["chunk_index"] == 0
    life = created["result"]["life"]

    broker.xadd(f"{base}:events", {"event_id": "10", "prompt": "a valley"}, nomkstream=True)
    broker.xadd(f"{base}:events", {"event_id": "11", "controls": json.dumps([CONTROL])}, nomkstream=True)
    broker.xadd(f"{base}:events", {"event_id": "12", "controls": "not json"}, nomkstream=True)
    chunk = command("next_chunk")
    assert chunk["ok"] is True
    assert chunk["result"]["applied_event_ids"] == [10, 11]
    assert command("next_chunk")["result"]["chunk_index"] == 1

    entries = [fields for _, fields in broker.xrange(f"{base}:chunks")]
    assert [entry["chunk_index"] for entry in entries] == ["0", "1"]
    assert {entry["life"] for entry in entries} == {life}
    assert json.loads(entries[0]["applied_event_ids"]) == [10, 11]
    payload = redis.Redis.from_url(dev.url).get(entries[0]["payload"].removeprefix("redis:"))
    assert len(payload) == int(entries[0]["bytes"])
    [(_, rejected)] = broker.xrange(f"{base}:rejected")
    assert (rejected["event_id"], rejected["reason"]) == ("12", "invalid")

    state = broker.hgetall(f"{base}:state")
    assert (state["status"], state["chunk_index"], state["event_floor"]) == ("ACTIVE", "2", "11")
    assert state["prompt"] == "a valley"
    assert broker.xlen(f"{base}:events") == 0

    closed = command("close")
    assert closed == {"command_id": closed["command_id"], "ok": True, "result": {"status": "CLOSED"}}
    refused = command("next_chunk")
    assert (refused["ok"], refused["error"]["code"]) == (False, "invalid_state")
    assert broker.hget(f"{base}:state", "status") == "CLOSED"
    broker.close()


def test_a_watch_ends_when_told_to(dev: Dev) -> None:
    dev.cli("sessions", "create", "watched", "--model", "reference", "--pace-ms", "50")
    environment = {"REDIS_URL": dev.url}

    watching = dev.harness.script("worldline", "sessions", "watch", "watched", "--json", env=environment)
    watching.wait_for_line('"chunk_index":1')
    watching.send(signal.SIGINT)
    assert watching.wait() == 130
    assert "Traceback" not in watching.stderr

    shell = f"{Path(sys.executable).parent}/worldline sessions watch watched | head -n 3"
    piped = dev.harness.start("/bin/bash", "-o", "pipefail", "-c", shell, env=environment)
    assert piped.wait() == 0, piped.report()
    assert piped.stderr == ""

    # It ends by itself when the session does.
    watching = dev.harness.script("worldline", "sessions", "watch", "watched", env=environment)
    watching.wait_for_line("^ +[0-9]+ ")
    dev.cli("sessions", "close", "watched")
    assert watching.wait() == 0
