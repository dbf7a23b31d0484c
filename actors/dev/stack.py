"""Broker, host, worker and janitor on one data directory."""

from __future__ import annotations

import fcntl
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

from actors.dev.child import Program
from actors.dev.embedded import broker_program, broker_url
from actors.dev.supervisor import Supervisor
from contracts.errors import ConfigurationError, WorldlineError

BROKER_START_S: Final = 60.0
"""A large append-only file takes its time to load."""

SERVICES_START_S: Final = 300.0
"""So does a large model."""

_WORKER_DEFAULTS: Final = {"OMP_NUM_THREADS": "1"}
"""More threads wait for each other as soon as anything else runs: ticks of 20 ms took seconds on two busy cores."""


class DataDirInUseError(WorldlineError, RuntimeError):
    """Raised when another process works on the same data directory."""

    code = "in_use"


class Stack:
    """The processes of one data directory; use it as a context manager, so that nothing is left behind.

    Args:
        data_dir: broker data, logs and the lock; made if missing, reused if not.
        port: of the broker.
        model: what the worker serves.
        say: told in a line what happens to children.
    """

    def __init__(self, data_dir: Path, *, port: int, model: str, say: Callable[[str], None]) -> None:
        self.data_dir = data_dir
        self.port = port
        self.url = broker_url(port)
        self.stopping = threading.Event()
        self.supervisor = Supervisor(data_dir / "logs", say)
        self._model = model
        self._lock: IO[str] | None = None

    def __enter__(self) -> Self:
        self._lock = _lock(self.data_dir / "lock")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.supervisor.stop()
        if self._lock is not None:
            self._lock.close()

    def start_broker(self) -> bool:
        """Starts the broker; False if it was told to stop meanwhile."""
        program = broker_program(self.data_dir / "broker", self.port)
        return self.supervisor.start([program], self.stopping, timeout_s=BROKER_START_S)

    def start_services(self, *, janitor: bool) -> bool:
        """Starts host, worker and, if wanted, janitor; False if it was told to stop meanwhile."""
        # The lock makes sure that there is one of each, so a fixed name lets the next one take over at once.
        programs = [self._ours("host", "--host-id", "dev"), self._worker()]
        if janitor:
            programs.append(self._ours("janitor", "--janitor-id", "dev"))
        return self.supervisor.start(programs, self.stopping, timeout_s=SERVICES_START_S)

    def _ours(self, command: str, *options: str) -> Program:
        env = {"REDIS_URL": self.url, "WORLDLINE_JOBS_URL": self.url}
        return Program(command, [sys.executable, "-m", "actors.cli", command, *options], env)

    def _worker(self) -> Program:
        command = [sys.executable, "-m", "gpu_worker", "--model", self._model]
        return Program("worker", command, {"REDIS_URL": self.url}, defaults=_WORKER_DEFAULTS)


def _lock(path: Path) -> IO[str]:
    """Holds the directory until the file is closed or the process ends, however it ends."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    except OSError as error:
        raise ConfigurationError(
            f"data directory {path.parent}: {error.strerror}", field="data_dir"
        ) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        holder = file.read().strip() or "?"
        file.close()
        message = f"{path.parent} is in use by process {holder}; give this one another --data-dir"
        raise DataDirInUseError(message, field="data_dir") from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file
