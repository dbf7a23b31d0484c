"""How commands fail: the exit status, one line for people, one document for programs."""

import subprocess
import sys

import pytest

from actors.broker_pool import NoHostError
from actors.calls import AnswerTimeoutError
from actors.cli.exit_codes import exit_code
from contracts import errors
from contracts.broker import BrokerFullError
from contracts.commands import Op
from support.answerer import Answerer

PASSWORD = "very-secret"

INTERRUPTED_IMPORT = """
import os, signal, sys

class Interrupts:
    def find_spec(self, name, *rest):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
from actors.cli.main import main
main(["--help"])
"""


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.SessionNotFoundError("x"), 3),
        (errors.SessionStateError("x"), 4),
        (errors.SessionExistsError("x"), 4),
        (errors.EventStaleError("x"), 4),
        (errors.OwnershipLostError("x"), 4),
        (errors.CorruptDataError("x"), 65),
        (errors.BrokerError("x"), 69),
        (errors.EventQueueFullError("x"), 75),
        (errors.NoCapacityError("x"), 75),
        (errors.CommandExpiredError("x"), 75),
        (NoHostError("x"), 75),
        (AnswerTimeoutError("x", command_id="c"), 75),
        (BrokerFullError("x"), 75),
        (errors.ConfigurationError("x"), 78),
        (errors.InvalidArgumentError("x"), 2),
        (errors.InvalidTypeError("x"), 2),
        (errors.CommandPoisonedError("x"), 1),
        (errors.TickFailedError("x", code="worker_lost"), 1),
        (errors.WorldlineError("x"), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_has_its_exit_status(error, status) -> None:
    assert exit_code(error) == status


@pytest.mark.parametrize("status", [2, 3, 4, 75])
def test_an_error_of_the_host_is_one_line_or_one_document(served: Answerer, worldline, status: int) -> None:
    error = {
        2: errors.InvalidArgumentError("no reducer of that name", field="reducer"),
        3: errors.SessionNotFoundError("session w does not exist", field="session_id"),
        4: errors.SessionStateError("session w is FAILED", field="status"),
        75: errors.NoCapacityError("all workers are full", field="model"),
    }[status]
    served.handlers[Op.RESET] = lambda command: error

    plain = worldline("sessions", "reset", "w")
    as_json = worldline("sessions", "reset", "w", "--json")

    assert (plain.status, plain.out, plain.err) == (status, "", f"error: {error}\n")
    assert (as_json.status, as_json.json, as_json.err) == (status, {"error": error.to_dict()}, "")


def test_a_command_line_that_makes_no_sense_is_usage(worldline) -> None:
    assert worldline("sessions", "next").status == 2
    assert worldline("nonsense").status == 2
    assert worldline("sessions", "list", "--status", "ODD").status == 2
    assert worldline("sessions", "push", "w", "--event-id", "x").status == 2

    said = worldline("sessions", "next", "--json")
    assert (said.status, said.json["error"]["code"]) == (2, "usage")
    assert "ID" in said.json["error"]["message"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("sessions", "create", "w", "--model", "m", "--param", "fov"),
        ("sessions", "create", "w", "--model", "m", "--param", "fov={"),
        ("sessions", "create", "w", "--model", "m", "--param", "a=1", "--param", "a=2"),
        ("sessions", "create", "w", "--model", "m", "--seed", "-1"),
        ("sessions", "create", "w", "--model", "m", "--recording", "some"),
        ("sessions", "create", "no spaces", "--model", "m"),
        ("sessions", "push", "w", "--event-id", "1"),
        ("sessions", "push", "w", "--event-id", "-1", "--prompt", "p"),
        ("sessions", "push", "w", "--event-id", "1", "--control", "camera:schema"),
        ("sessions", "push", "w", "--event-id", "1", "--control", "camera:schema:[1]"),
        ("sessions", "push", "w", "--event-id", "1", "--control", 'camera:schema:{"x": NaN}'),
    ],
    ids=" ".join,
)
def test_bad_values_are_refused_before_anything_is_sent(served: Answerer, worldline, arguments) -> None:
    said = worldline(*arguments, "--json")

    assert (said.status, said.json["error"]["code"]) == (2, "invalid_argument")
    assert said.json["error"]["field"]
    assert served.seen == []


@pytest.mark.parametrize(
    "arguments",
    [("sessions", "list"), ("sessions", "next", "w"), ("sessions", "watch", "w"), ("doctor",)],
    ids=" ".join,
)
@pytest.mark.timeout(20)
def test_a_broker_that_is_not_there_is_said_and_not_waited_for(worldline, monkeypatch, arguments) -> None:
    monkeypatch.setenv("REDIS_URL", f"redis://:{PASSWORD}@127.0.0.1:1/0")

    said = worldline(*arguments)

    assert (said.status, said.err.count("\n")) == (69, 1)
    assert PASSWORD not in said.out + said.err


def test_an_unknown_setting_is_bad_configuration(worldline, monkeypatch) -> None:
    monkeypatch.setenv("WORLDLINE_LEASE_MSS", "5")

    for command in (("sessions", "list"), ("doctor",), ("host",), ("dev",), ("demo",)):
        said = worldline(*command)
        assert (said.status, "WORLDLINE_LEASE_MSS" in said.err) == (78, True), command


def test_a_setting_out_of_range_is_bad_configuration(worldline, monkeypatch) -> None:
    monkeypatch.setenv("WORLDLINE_LEASE_MS", "0")

    said = worldline("sessions", "list", "--json")

    assert (said.status, said.json["error"]["code"]) == (78, "bad_configuration")
    assert "lease_ms" in said.json["error"]["field"]


def test_a_url_that_is_none_is_bad_configuration(worldline, monkeypatch) -> None:
    monkeypatch.setenv("REDIS_URL", f"https://user:{PASSWORD}@example.org")

    said = worldline("doctor")

    assert said.status == 78
    assert PASSWORD not in said.err


def test_without_a_host_a_command_says_so(worldline) -> None:
    said = worldline("sessions", "close", "w", "--json")

    assert (said.status, said.json["error"]["code"]) == (75, "no_host")
    assert said.json["error"]["retryable"] is True


def test_a_key_of_the_wrong_type_is_corrupt_data(served: Answerer, worldline, broker) -> None:
    key = served.keys.session("w").state
    with broker.client() as client:
        client.set(key, "x")

    said = worldline("sessions", "show", "w", "--json")

    assert (said.status, said.json["error"]["field"]) == (65, key)


def test_an_answer_that_does_not_come_in_time_can_be_asked_for_later(served: Answerer, worldline) -> None:
    served.handlers[Op.NEXT_CHUNK] = lambda command: None

    said = worldline("sessions", "next", "w", "--timeout", "0.2", "--json")

    assert (said.status, said.json["error"]["code"]) == (75, "no_answer")


def test_an_interrupt_while_the_commands_are_imported_is_one_too() -> None:
    command = [sys.executable, "-c", INTERRUPTED_IMPORT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
