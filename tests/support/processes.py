"""Real processes under test: started with their own log files, watched by line, signalled by pid, always ended.

    host = processes.script("worldline", "host", env={"REDIS_URL": broker.url})
    host.wait_for_line(r"^ready")
    host.pause(); host.resume(); host.kill()
    assert host.stop() == 0

Waits block the thread. An `async def` test that shares its loop with something the process needs awaits
`asyncio.to_thread(host.wait_for_line, ...)` instead.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
LOG_TAIL_BYTES = 20_000
POLL_S = 0.02

_harnesses: weakref.WeakSet["Processes"] = weakref.WeakSet()


class Process:
    """One process and the two files that its output goes to."""

    def __init__(self, name: str, argv: list[str], env: Mapping[str, str], cwd: Path, logs: Path) -> None:
        self.name = name
        self.argv = argv
        self.stdout_path = logs / f"{name}.stdout"
        self.stderr_path = logs / f"{name}.stderr"
        with self.stdout_path.open("wb") as stdout, self.stderr_path.open("wb") as stderr:
            # A group of its own, so that the end of a test also ends what the process started.
            self._popen = subprocess.Popen(
                argv,
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; -N when signal N ended it."""
        return self._popen.poll()

    @property
    def running(self) -> bool:
        return self.returncode is None

    @property
    def stdout(self) -> str:
        return self.stdout_path.read_text(encoding="utf-8", errors="replace")

    @property
    def stderr(self) -> str:
        return self.stderr_path.read_text(encoding="utf-8", errors="replace")

    def wait_for_line(self, pattern: str, *, timeout: float = 20.0, stream: str = "stdout") -> re.Match[str]:
        """The first whole line in which `pattern` is found; fails at the deadline or when the process ends."""
        expression = re.compile(pattern)
        deadline = time.monotonic() + timeout
        while True:
            ended = not self.running  # asked before reading, so that the last lines are seen
            for line in _whole_lines(self.stdout if stream == "stdout" else self.stderr, ended=ended):
                if match := expression.search(line):
                    return match
            if ended:
                pytest.fail(
                    f"{self} ended with {self.returncode} before it said {pattern!r}\n{self.report()}"
                )
            if time.monotonic() > deadline:
                pytest.fail(f"{self} did not say {pattern!r} within {timeout:g} s\n{self.report()}")
            time.sleep(POLL_S)

    def wait(self, *, timeout: float = 20.0) -> int:
        """Wait for its end and return the exit status."""
        try:
            return self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{self} did not end within {timeout:g} s\n{self.report()}")

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process itself, not to its children."""
        self._popen.send_signal(number)

    def pause(self) -> None:
        self.send(signal.SIGSTOP)

    def resume(self) -> None:
        self.send(signal.SIGCONT)

    def kill(self) -> int:
        """SIGKILL, and wait until it is gone."""
        self.send(signal.SIGKILL)
        return self.wait()

    def stop(self, *, timeout: float = 20.0) -> int:
        """SIGTERM, and wait for the orderly end."""
        self.send(signal.SIGTERM)
        return self.wait(timeout=timeout)

    def children(self) -> list[int]:
        """Pids of its direct children."""
        tasks = Path(f"/proc/{self.pid}/task")
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            return [int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()]
        return []

    def report(self) -> str:
        """The tail of both logs, for a failure message."""
        parts = [f"--- {self.name} {stream} ---\n{_tail(path)}" for stream, path in self._logs()]
        return "\n".join(parts)

    def end_group(self) -> None:
        """Whatever is left of the process and its group, at the end of a test."""
        for number, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGCONT)
                os.killpg(self.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(patience)

    def _logs(self) -> Iterator[tuple[str, Path]]:
        yield "stdout", self.stdout_path
        yield "stderr", self.stderr_path

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"


class Processes:
    """Starts processes for one test (or module) and ends them all afterwards."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.started: list[Process] = []
        _harnesses.add(self)

    def start(
        self, *argv: str, name: str = "", env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> Process:
        """Any command line. `env` is added to a clean base that holds no worldline setting."""
        label = f"{len(self.started)}-{name or Path(argv[0]).name}"
        process = Process(label, list(argv), base_env() | dict(env or {}), cwd or REPOSITORY, self.logs)
        self.started.append(process)
        return process

    def module(
        self,
        module: str,
        *args: str,
        name: str = "",
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Process:
        """`python -m MODULE ARGS` with the interpreter of the tests."""
        return self.start(sys.executable, "-m", module, *args, name=name or module, env=env, cwd=cwd)

    def script(
        self,
        script: str,
        *args: str,
        name: str = "",
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Process:
        """A console script that is installed beside the interpreter of the tests."""
        path = Path(sys.executable).parent / script
        return self.start(str(path), *args, name=name or "-".join((script, *args[:1])), env=env, cwd=cwd)

    def end(self) -> None:
        """End everything, last started first."""
        for process in reversed(self.started):
            process.end_group()


def base_env() -> dict[str, str]:
    """This environment without anything that configures worldline, and with output that comes at once."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WORLDLINE_") and k != "REDIS_URL"}
    return kept | {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "OMP_NUM_THREADS": "1"}


def reports_of_running_tests() -> list[tuple[str, str]]:
    """(title, log tail) of each process of each harness that is alive; for the report of a failed test."""
    return [
        (f"{process} exit={process.returncode}", process.report())
        for harness in list(_harnesses)
        for process in harness.started
    ]


def _whole_lines(text: str, *, ended: bool) -> list[str]:
    lines = text.splitlines(keepends=True)
    if lines and not ended and not lines[-1].endswith("\n"):
        lines.pop()  # still being written
    return [line.rstrip("\r\n") for line in lines]


def _tail(path: Path) -> str:
    data = path.read_bytes()[-LOG_TAIL_BYTES:]
    return data.decode("utf-8", errors="replace") or "(empty)"
