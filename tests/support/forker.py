"""Real processes that start at once: forked from one that has imported everything that they need.

with Forker(logs) as forker:
    host = forker.start("worldline", "host", env={"REDIS_URL": broker.url})

What is started has a process id, signals, log files and an exit status of its own, like any other `Process`; only the
half second of imports is saved, of which a test of many deaths needs hundreds.
"""

import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from support.processes import REPOSITORY, Process, base_env

PROGRAMS = {"worldline": "actors.cli.main", "worldline-worker": "gpu_worker.__main__"}
PRELOADED = (
    *PROGRAMS.values(),
    "actors.cli.commands",
    "actors.host",
    "actors.janitor.process",
    "support.noop_engine",
)


class Forker:
    """The process that forks, and what it has started."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.started: list[Process] = []
        self.ended: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        self._news = threading.Condition()

    def start(self, program: str, *args: str, name: str, env: Mapping[str, str]) -> Process:
        """Starts `program ARGS`; `name` is that of its log files."""
        number = len(self.started)
        label = f"{number}-{name}"
        order = {
            "number": number,
            "program": program,
            "args": args,
            "env": base_env() | dict(env),
            "stdout": str(self.logs / f"{label}.stdout"),
            "stderr": str(self.logs / f"{label}.stderr"),
        }
        for stream in ("stdout", "stderr"):
            Path(str(order[stream])).touch()
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        with self._news:
            assert self._news.wait_for(lambda: number in self._pids, 20), "the forker does not answer"
        process = _Forked(self, self._pids[number], label, [program, *args])
        self.started.append(process)
        return process

    def wait(self, pid: int, timeout: float | None) -> int:
        with self._news:
            if not self._news.wait_for(lambda: pid in self.ended, timeout):
                raise subprocess.TimeoutExpired(str(pid), timeout or 0)
        return self.ended[pid]

    def _listen(self) -> None:
        assert self._server.stdout is not None
        for line in self._server.stdout:
            news = json.loads(line)
            with self._news:
                if "number" in news:
                    self._pids[news["number"]] = news["pid"]
                else:
                    self.ended[news["pid"]] = news["status"]
                self._news.notify_all()

    def __enter__(self) -> Self:
        env = base_env() | {"PYTHONPATH": str(REPOSITORY / "tests")}
        self._server = subprocess.Popen(
            [sys.executable, "-m", "support.forker"],
            env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY,
        )  # fmt: skip
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait(20)
        self._listener.join(20)
        self._server.stdout.close()


class _Handle:
    """What `Process` asks of a `Popen`."""

    def __init__(self, forker: Forker, pid: int) -> None:
        self._forker = forker
        self.pid = pid

    def poll(self) -> int | None:
        return self._forker.ended.get(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        return self._forker.wait(self.pid, timeout)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class _Forked(Process):
    def __init__(self, forker: Forker, pid: int, name: str, argv: list[str]) -> None:
        self.name = name
        self.argv = argv
        self.stdout_path = forker.logs / f"{name}.stdout"
        self.stderr_path = forker.logs / f"{name}.stderr"
        self._popen: Any = _Handle(forker, pid)


def is_stopped(process: Process) -> bool:
    """Whether a process has been stopped by SIGSTOP."""
    try:
        status = Path(f"/proc/{process.pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] == "T"


# ------------------------------------------------------------------------------------------------ the other side
def serve() -> None:
    """Reads orders, forks, and says what became of it; kills what is left when nobody gives orders any more."""
    import importlib

    for module in PRELOADED:
        importlib.import_module(module)
    buffer, children = b"", set[int]()
    while True:
        if select.select([0], [], [], 0.01)[0]:
            data = os.read(0, 65_536)
            if not data:
                break
            *orders, buffer = (buffer + data).split(b"\n")
            for order in orders:
                children.add(_fork(json.loads(order)))
        _reap(children)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while children and time.monotonic() < deadline:
        _reap(children)
        time.sleep(0.01)


def _fork(order: dict[str, Any]) -> int:
    pid = os.fork()
    if pid == 0:
        _become(order)
    _tell({"number": order["number"], "pid": pid})
    return pid


def _reap(children: set[int]) -> None:
    for pid in list(children):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            children.discard(pid)
            _tell({"pid": pid, "status": os.waitstatus_to_exitcode(status)})


def _tell(news: dict[str, int]) -> None:
    os.write(1, json.dumps(news).encode() + b"\n")


def _become(order: dict[str, Any]) -> None:
    """The child: another environment, other files, and then the program's own main function."""
    status = 1
    try:
        os.setsid()
        for number, path in ((1, order["stdout"]), (2, order["stderr"])):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.clear()
        os.environ.update(order["env"])
        sys.argv = [order["program"], *order["args"]]
        random.seed()
        try:
            sys.modules[PROGRAMS[order["program"]]].main()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001 - it must never go on as a second forker
        import traceback

        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)


if __name__ == "__main__":
    serve()
