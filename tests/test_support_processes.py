"""The process harness: lines, signals, logs, and nothing left behind."""

import os
import signal

import pytest

from support.broker import wait_until
from support.processes import Processes, reports_of_running_tests

PATIENT = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print("ready 42")
time.sleep(60)
"""


def python(processes: Processes, code: str, **options):
    return processes.start(os.sys.executable, "-c", code, name="python", **options)


def test_waits_for_a_line_and_ends_in_order(processes: Processes) -> None:
    process = python(processes, PATIENT)

    assert process.wait_for_line(r"^ready (\d+)$").group(1) == "42"
    assert process.running
    assert process.stop() == 7


def test_starts_modules_and_console_scripts(processes: Processes) -> None:
    assert processes.module("json.tool", "--help").wait() == 0

    script = processes.script("pytest", "--version")
    assert script.wait() == 0
    assert "pytest" in script.stdout


def test_a_process_that_ends_early_fails_the_wait_and_shows_its_logs(processes: Processes) -> None:
    process = python(processes, "import sys; print('going down', file=sys.stderr); sys.exit(3)")

    with pytest.raises(pytest.fail.Exception, match=r"ended with 3[\s\S]*going down"):
        process.wait_for_line("ready")


def test_a_silent_process_fails_the_wait_at_the_deadline(processes: Processes) -> None:
    process = python(processes, "print('half a line', end='', flush=True); import time; time.sleep(60)")

    with pytest.raises(pytest.fail.Exception, match="did not say 'half a line'"):
        process.wait_for_line("half a line", timeout=0.5)


def test_a_paused_process_says_nothing_until_it_is_resumed(processes: Processes) -> None:
    process = python(processes, "import time\nfor n in range(6000): print('n', n); time.sleep(0.01)")
    process.wait_for_line("n 1")

    process.pause()
    wait_until(lambda: _state(process.pid) == "T", what="the stop")
    before = process.stdout
    with pytest.raises(pytest.fail.Exception):
        process.wait_for_line(rf"n {before.count('n') + 1}$", timeout=0.2)
    assert process.stdout == before

    process.resume()
    process.wait_for_line(rf"n {before.count('n') + 1}$")
    assert process.kill() == -signal.SIGKILL


def test_the_environment_holds_no_setting_of_this_machine(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://elsewhere")
    monkeypatch.setenv("WORLDLINE_PREFIX", "odd")

    process = python(processes, "import os; print(sorted(os.environ))", env={"WORLDLINE_X": "1"})

    assert process.wait() == 0
    assert "REDIS_URL" not in process.stdout
    assert "WORLDLINE_PREFIX" not in process.stdout
    assert "WORLDLINE_X" in process.stdout


def test_nothing_is_left_behind_even_of_stubborn_grandchildren(tmp_path) -> None:
    harness = Processes(tmp_path)
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); time.sleep(60)"
    )
    parent = python(
        harness,
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {stubborn!r}]).wait()",
    )
    parent.wait_for_line("up")
    (child,) = parent.children()

    harness.end()

    assert not parent.running
    wait_until(lambda: _state(child) in ("", "Z"), what="the end of the grandchild")


def test_a_failed_test_gets_the_logs_of_its_processes(processes: Processes) -> None:
    python(processes, "print('what went wrong')").wait()

    reports = [text for title, text in reports_of_running_tests() if "python" in title]

    assert any("what went wrong" in text for text in reports)


def _state(pid: int) -> str:
    """The kernel's one-letter state of a process; empty when there is none."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
