"""`worldline dev`: starts, restarts, keeps data, and leaves nothing behind."""

import os
import signal
import sys
from pathlib import Path

import pytest

from actors.dev import tether
from support.broker import free_port, wait_until
from support.dev import command_line, port_of, start_dev
from support.processes import Processes

pytestmark = pytest.mark.real_broker


def gone(pid: int) -> bool:
    return command_line(pid) == ""


def test_it_starts_restarts_what_dies_and_stops(processes: Processes, tmp_path: Path) -> None:
    dev = start_dev(processes, tmp_path / "data")
    assert dev.process.stdout == f"REDIS_URL={dev.url}\nready\n"
    first = dev.children()
    dev.cli("doctor")
    dev.cli("sessions", "create", "w", "--model", "reference", "--seed", "1")

    for name in ("host", "janitor", "worker", "broker"):
        os.kill(first[name], signal.SIGKILL)
    second = wait_until(
        lambda: children if set((children := dev.children()).values()).isdisjoint(first.values()) else None,
        timeout=30,
        what="a new process of each kind",
    )

    assert set(second) == {"broker", "host", "janitor", "worker"}
    for name in second:
        assert f"{name} ended with -9; starting it again in" in dev.process.stderr
    # The session is still there, and its world has begun anew or is reported lost; the services work in any case.
    wait_until(lambda: dev.log("worker").count("ready worker=") == 2, timeout=60, what="the new worker")
    dev.cli("sessions", "create", "v", "--model", "reference", "--timeout", "60")
    dev.cli("sessions", "next", "v", "--timeout", "60")
    dev.cli("sessions", "show", "w")

    assert dev.process.stop() == 0
    assert all(gone(pid) for pid in second.values())


def test_data_is_found_again_on_the_next_start_and_one_dev_has_it_at_a_time(
    processes: Processes, tmp_path: Path
) -> None:
    port = free_port()
    dev = start_dev(processes, tmp_path / "data", "--port", str(port))
    assert port_of(dev.url) == str(port)
    dev.cli("sessions", "create", "w", "--model", "reference")

    again = processes.script("worldline", "dev", "--data-dir", str(tmp_path / "data"))
    assert again.wait() == 4
    assert f"in use by process {dev.process.pid}" in again.stderr
    taken = processes.script("worldline", "dev", "--data-dir", str(tmp_path / "other"), "--port", str(port))
    assert taken.wait() == 78
    assert f"port {port} is taken" in taken.stderr

    # Killed outright, it takes its children with it.
    children = dev.children()
    dev.process.kill()
    wait_until(lambda: all(gone(pid) for pid in children.values()), timeout=5, what="the end of all children")

    dev = start_dev(processes, tmp_path / "data", "--port", str(port))
    assert '"w"' in dev.cli("sessions", "list", "--json").stdout
    dev.process.send(signal.SIGINT)
    assert dev.process.wait() == 0


def test_a_service_that_can_not_start_is_shown_with_its_log(processes: Processes, tmp_path: Path) -> None:
    dev = processes.script(
        "worldline", "dev", "--data-dir", str(tmp_path / "data"), "--model", "no-such-model"
    )

    status = dev.wait(timeout=60)

    assert status == 78, dev.report()
    assert "ready" not in dev.stdout
    assert "worker | " in dev.stderr
    assert "no-such-model" in dev.stderr
    assert dev.stderr.strip().splitlines()[-1].startswith("error: worker ended with 78")


def test_it_stops_while_it_still_starts(processes: Processes, tmp_path: Path) -> None:
    dev = processes.script("worldline", "dev", "--data-dir", str(tmp_path / "data"))
    dev.wait_for_line("^REDIS_URL=")

    assert dev.stop() == 0
    assert "ready" not in dev.stdout


def test_it_ignores_the_broker_of_the_environment(processes: Processes, tmp_path: Path) -> None:
    dev = processes.script(
        "worldline",
        "dev",
        "--data-dir",
        str(tmp_path / "data"),
        "--json",
        env={"REDIS_URL": "redis://127.0.0.1:1/0"},
    )

    dev.wait_for_line('"ready": true', timeout=60)
    assert '"redis_url": "redis://127.0.0.1:' in dev.stdout
    assert dev.stop() == 0


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_where_the_kernel_does_not_help_a_child_is_watched(processes: Processes, end: signal.Signals) -> None:
    sleeper = "import os, time; print('up', os.getpid(), flush=True); time.sleep(60)"
    watcher = (
        "import sys; sys.path.insert(0, sys.argv[1]); import tether; "
        "sys.exit(tether.watch(int(sys.argv[2]), sys.argv[3:]))"
    )
    parent = (
        "import os, subprocess, sys, time\n"
        "watcher, folder, sleeper = sys.argv[1:]\n"
        "command = [sys.executable, '-c', watcher, folder, str(os.getpid()), sys.executable, '-c', sleeper]\n"
        "subprocess.Popen(command)\n"
        "time.sleep(60)\n"
    )
    process = processes.start(
        sys.executable, "-c", parent, watcher, str(Path(tether.__file__).parent), sleeper
    )
    pid = int(process.wait_for_line(r"^up (\d+)").group(1))
    [between] = process.children()

    if end is signal.SIGKILL:
        process.kill()
    else:
        os.kill(between, signal.SIGTERM)

    wait_until(lambda: gone(pid), timeout=5, what="the end of the child")
