"""Connections to the broker, and the one edge where its exceptions become ours.

Two kinds of client: one for commands, one for blocking reads. Neither retries by itself, because a retry beneath a
write would write twice; what is safe to send again is sent again by its caller, who knows.
"""

from __future__ import annotations

import re
from types import TracebackType
from typing import Any, Final

import redis.exceptions as rx
from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from contracts.errors import BrokerError, ConfigurationError, CorruptDataError
from contracts.wire_client import OneWire, WireClient, WirePool

Client = Redis
"""An asynchronous client that answers bytes in RESP2 shapes, whatever the URL asks for."""

CONNECT_TIMEOUT_S: Final = 1.0
COMMAND_TIMEOUT_S: Final = 5.0
BLOCK_MARGIN_S: Final = 2.0

_SHAPE_OPTIONS: Final = (
    "protocol",
    "decode_responses",
    "socket_timeout",
    "retry_on_timeout",
    "max_connections",
)
_PASSWORD_OPTION: Final = re.compile(r"([?&]password=)[^&#]*")


class BrokerFullError(BrokerError):
    """Raised when the broker refuses a write because it is out of memory."""

    code = "broker_full"


def command_client(url: str, *, timeout_s: float = COMMAND_TIMEOUT_S) -> Client:
    """A client for commands and scripts, all on one connection; no blocking read may run on it."""
    pool = _connections(url, timeout_s)
    return WireClient(pool, OneWire(pool, timeout_s))


def blocking_client(url: str, *, block_ms: int, max_connections: int = 64) -> Client:
    """A client for reads that block up to `block_ms`; its sockets wait longer than that."""
    timeout_s = block_ms / 1000 + BLOCK_MARGIN_S
    pool = _connections(url, timeout_s)
    return WireClient(pool, WirePool(pool, timeout_s, max_connections))


def _connections(url: str, timeout_s: float) -> ConnectionPool:
    """How a connection is made; nobody borrows from this pool."""
    options = check_url(url, "REDIS_URL")
    for name in _SHAPE_OPTIONS:
        options.pop(name, None)
    return ConnectionPool(
        **options,
        protocol=2,
        socket_timeout=timeout_s,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
    )


def check_url(url: str, field: str) -> dict[str, Any]:
    """The client's options in a broker's URL; ConfigurationError names `field` and never shows the URL."""
    try:
        return dict(parse_url(url))
    except ValueError as error:
        text = str(error)
        if "Port" in text:  # it shows what stands there, which is a piece of a password that holds a slash
            text = "the port is no number from 0 to 65535; in a password write / as %2F, ? as %3F, # as %23"
        raise ConfigurationError(f"{field}: {text}", field=field) from None


def redact(url: str) -> str:
    """The URL with its password hidden, for logs and messages; also of a URL that makes no sense."""
    scheme, separator, rest = url.partition("://")
    login, at, place = rest.rpartition("@")
    user, colon, _password = login.partition(":")
    shown = f"{scheme}{separator}{user}:***@{place}" if at and colon else url
    return _PASSWORD_OPTION.sub(r"\1***", shown)


async def is_cluster(client: Client) -> bool:
    """Whether the broker is a cluster, where a script or transaction touches one slot. One that does not tell is none."""
    try:
        with map_exceptions("INFO"):
            info: Any = await client.info("cluster")
    except CorruptDataError:
        return False
    return str(info.get("cluster_enabled", 0)) == "1"


class map_exceptions:  # noqa: N801 - reads as a verb: `with map_exceptions(key):`
    """Turns the client library's exceptions into ours; `what` names the key or the command."""

    # A class, because a generator costs more than many a command that runs in it.
    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, _FOREIGN):
            raise _translated(error, self._what) from error


_FOREIGN: Final = (rx.ConnectionError, rx.TimeoutError, rx.ResponseError, rx.InvalidResponse, OSError)


def _translated(error: BaseException, what: str) -> Exception:
    if isinstance(error, rx.OutOfMemoryError):
        return BrokerFullError(f"the broker is out of memory ({what})", field=what)
    if isinstance(error, rx.ReadOnlyError):
        return BrokerError(f"the broker is a read-only replica ({what})", field="REDIS_URL")
    if isinstance(error, rx.ResponseError):
        return _from_response(error, what)
    if isinstance(error, rx.InvalidResponse):
        return BrokerError(f"what answers is no Redis or Valkey ({what}): {error}", field="REDIS_URL")
    if isinstance(error, rx.AuthenticationError):
        return BrokerError(f"the broker refuses the login ({what}): {error}", field="REDIS_URL")
    return BrokerError(f"the broker does not answer ({what}): {error}", field="REDIS_URL")


def _from_response(error: rx.ResponseError, what: str) -> Exception:
    text = str(error)
    if "WRONGTYPE" in text:
        return CorruptDataError(f"a key holds the wrong type ({what}): {text}", field=what)
    if "OOM" in text:
        return BrokerFullError(f"the broker is out of memory ({what})", field=what)
    if "READONLY" in text or "LOADING" in text or "MASTERDOWN" in text or "UNBLOCKED" in text:
        return BrokerError(f"the broker can't serve now ({what}): {text}", field="REDIS_URL")
    return CorruptDataError(f"the broker refused {what}: {text}", field=what)
