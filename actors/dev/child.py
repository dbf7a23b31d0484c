"""One child process: started, watched, started again when it dies, and stopped."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from actors.dev import tether

LOG_LIMIT_BYTES: Final = 10 * 2**20
TAIL_LINES: Final = 20
STEADY_S: Final = 30.0
"""A child that lived this long is started again as if it had never died."""

_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 10.0
_READY: Final = re.compile(rb"^ready ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Program:
    """What a child runs.

    Args:
        name: for messages and the log's file name.
        command: an absolute path and its arguments.
        env: added to this process's environment.
        defaults: environment where this process's says nothing else.
        is_ready: whether it serves by now; by default once it has said `ready ...`.
        stop_s: how long it may take to stop before it is killed.
    """

    name: str
    command: Sequence[str]
    env: Mapping[str, str]
    defaults: Mapping[str, str] = field(default_factory=dict)
    is_ready: Callable[[], bool] | None = None
    stop_s: float = 15.0


class Child:
    """A program's process, one after the other; all of them write to the same log file."""

    def __init__(self, program: Program, logs: Path) -> None:
        self.program = program
        self.name = program.name
        self.log_path = logs / f"{program.name}.log"
        self.restart_at: float | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._log_start = 0
        self._pause_s = _FIRST_PAUSE_S

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def status(self) -> int | None:
        """Its exit status; None while it runs; -N when signal N ended it."""
        return None if self._process is None else self._process.poll()

    @property
    def running(self) -> bool:
        return self._process is not None and self.status is None

    def start(self) -> None:
        """Starts a process. It is in a session of its own, so that Ctrl-C reaches us alone and we stop it in order."""
        if self.log_path.exists() and self.log_path.stat().st_size > LOG_LIMIT_BYTES:
            self.log_path.replace(self.log_path.with_suffix(".old.log"))
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), *self.program.command],
                env={**self.program.defaults, **os.environ, "PYTHONUNBUFFERED": "1", **self.program.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._started = time.monotonic()
        self.restart_at = None

    def is_ready(self) -> bool:
        """Whether its present process serves."""
        if not self.running:
            return False
        if self.program.is_ready is not None:
            return self.program.is_ready()
        return _READY.search(self._log()) is not None

    def plan_restart(self) -> float:
        """Decides when a process that died is followed by the next; returns the pause in seconds."""
        if time.monotonic() - self._started > STEADY_S:
            self._pause_s = _FIRST_PAUSE_S
        pause_s, self._pause_s = self._pause_s, min(_LONGEST_PAUSE_S, self._pause_s * 2)
        self.restart_at = time.monotonic() + pause_s
        return pause_s

    def terminate(self) -> None:
        """Asks it to stop."""
        if self._process is not None and self.running:
            self._process.terminate()

    def finish(self) -> None:
        """Waits for the end that `terminate` asked for; kills what takes too long."""
        if self._process is None:
            return
        try:
            self._process.wait(self.program.stop_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def tail(self) -> str:
        """The last lines that its present process wrote."""
        return "\n".join(self._log().decode(errors="replace").splitlines()[-TAIL_LINES:])

    def _log(self) -> bytes:
        with self.log_path.open("rb") as log:
            log.seek(self._log_start)
            return log.read()
