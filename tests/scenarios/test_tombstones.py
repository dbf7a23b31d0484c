"""A worker whose release fails, on real processes: the janitor closes it with nobody watching, or a person does."""

import json
from typing import Any

import pytest

from support.broker import RealBroker, wait_until
from support.processes import Process, Processes

SESSION = "world-1"


@pytest.fixture
def env(broker: RealBroker) -> dict[str, str]:
    return {
        "REDIS_URL": broker.url,
        "WORLDLINE_CLOSE_RETRY_FIRST_MS": "100",
        "WORLDLINE_CLOSE_RETRY_LONGEST_MS": "400",
        "WORLDLINE_RECONCILE_MS": "1000",
        "PYTHONPATH": "tests",
    }


@pytest.fixture
def services(processes: Processes, env: dict[str, str]) -> list[Process]:
    """A host and a worker of the engine without a model."""
    started = [
        processes.script("worldline", "host", env=env),
        processes.script(
            "worldline-worker", "--model", "noop", "--engine", "support.noop_engine:make", env=env
        ),
    ]
    for process in started:
        process.wait_for_line("^ready ")
    return started


@pytest.fixture
def worldline(processes: Processes, env: dict[str, str]) -> Any:
    """Runs a command to its end: `worldline("fsck")`."""

    def run(*arguments: str) -> Process:
        process = processes.script("worldline", *arguments, env=env)
        process.wait(timeout=60)
        return process

    return run


def make_tombstone(worldline: Any) -> None:
    assert (
        worldline("sessions", "create", SESSION, "--model", "noop", "--param", "release_fails=3").returncode
        == 0
    )
    assert worldline("sessions", "next", SESSION).returncode == 0
    assert worldline("sessions", "close", SESSION).returncode == 1


def status(broker: RealBroker) -> str:
    with broker.client() as client:
        return client.hget(f"wl:{{{SESSION}}}:state", "status").decode()


def outcomes(worldline: Any) -> list[str]:
    lines = json.loads(worldline("history", SESSION, "--json").stdout)
    return [line["trigger"] for line in lines if line["trigger"].startswith("cleanup")]


def test_the_janitor_closes_it_with_nobody_watching(
    services: list[Process], processes: Processes, env: dict[str, str], worldline: Any, broker: RealBroker
) -> None:
    processes.script("worldline", "janitor", env=env).wait_for_line("^ready janitor=")
    make_tombstone(worldline)

    wait_until(lambda: status(broker) == "CLOSED", timeout=30, what="the close")

    assert outcomes(worldline) == ["cleanup_failed"] * 3 + ["cleanup_succeeded"]
    assert worldline("fsck").stdout == "every invariant holds\n"
    assert worldline("doctor").returncode == 0


def test_without_a_janitor_a_person_does(services: list[Process], worldline: Any, broker: RealBroker) -> None:
    make_tombstone(worldline)
    assert worldline("fsck").returncode == 0, "a tombstone breaks no invariant"

    retries = [worldline("tombstones", "retry", "--all").returncode for _ in range(3)]

    assert retries == [1, 1, 0]
    assert status(broker) == "CLOSED"
    assert worldline("tombstones", "list", "--json").stdout.strip() == "[]"
    assert worldline("fsck").returncode == 0
