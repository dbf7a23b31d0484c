"""What the doctor asks of the broker: version, durability, memory, clock."""

from __future__ import annotations

import re
import time
from typing import Any, Final

from redis.exceptions import ResponseError

from actors.broker_pool import Broker
from actors.doctor.checks import Check, Level
from contracts.broker import map_exceptions

_VERSION: Final = re.compile(r"\d+(?:\.\d+)*")
_OLDEST: Final = {"redis": (7, 0), "valkey": (8, 0)}
_LOSS: Final = {
    "always": "nothing that was answered",
    "everysec": "up to the last second, two on a disk under load",
    "no": "what the system has not written yet, often the last 30 s",
}
_CLOCK_LIMIT_MS: Final = 1_000
_MEMORY_WARN: Final = 0.8


async def broker_checks(broker: Broker) -> list[Check]:
    """Raises BrokerError where the broker can't be reached at all."""
    await broker.connect()
    with map_exceptions("INFO"):
        info: dict[str, Any] = await broker.commands.info()
    settings = {
        name: await _setting(broker, name) for name in ("appendonly", "appendfsync", "maxmemory-policy")
    }
    return [
        await _reachable(broker),
        _version(info),
        _role(info),
        _durability(info, settings["appendonly"], settings["appendfsync"]),
        _eviction(info, settings["maxmemory-policy"]),
        _memory(info),
        await _clock(broker),
    ]


async def _setting(broker: Broker, name: str) -> str | None:
    """A setting of the broker, or None where it does not tell (managed services often don't)."""
    try:
        with map_exceptions("CONFIG GET"):
            values = await broker.commands.config_get(name)
    except Exception as error:
        if isinstance(error.__cause__, ResponseError):
            return None
        raise
    value: Any = {_text(key): _text(item) for key, item in values.items()}.get(name)
    return value if isinstance(value, str) else None


async def _reachable(broker: Broker) -> Check:
    started = time.perf_counter()
    await broker.connect()
    ping_ms = round((time.perf_counter() - started) * 1000, 2)
    url = broker.settings.shown_url
    return Check("broker", Level.OK, f"{url} answers in {ping_ms} ms", {"url": url, "ping_ms": ping_ms})


def _version(info: dict[str, Any]) -> Check:
    kind = "valkey" if "valkey_version" in info else "redis"
    text = str(info.get(f"{kind}_version", ""))
    found = _VERSION.match(text)
    number = tuple(map(int, found[0].split("."))) if found else ()
    oldest = ".".join(map(str, _OLDEST[kind]))
    values = {"server": kind, "version": text}
    if number >= _OLDEST[kind]:
        return Check("version", Level.OK, f"{kind} {text}", values)
    return Check("version", Level.FAIL, f"{kind} {text or '?'}, at least {oldest} is needed", values)


def _role(info: dict[str, Any]) -> Check:
    role, replicas = str(info.get("role", "")), int(info.get("connected_slaves", 0))
    values = {"role": role, "replicas": replicas}
    if role == "master":
        return Check("role", Level.OK, f"primary with {replicas} replicas", values)
    return Check("role", Level.FAIL, "a replica: it can't be written to", values)


def _durability(info: dict[str, Any], appendonly: str | None, appendfsync: str | None) -> Check:
    enabled = bool(info.get("aof_enabled")) if appendonly is None else appendonly == "yes"
    window = _LOSS.get(appendfsync or "", "unknown: the broker does not tell appendfsync")
    if int(info.get("connected_slaves", 0)):
        window += "; on a failover also what the replica had not received"
    values = {
        "appendonly": enabled,
        "appendfsync": appendfsync,
        "loss_window": window if enabled else "everything",
    }
    if not enabled:
        return Check(
            "durability", Level.FAIL, "no append-only file: a crash of the broker loses every session", values
        )
    if info.get("aof_last_write_status", "ok") != "ok":
        return Check("durability", Level.FAIL, "the append-only file can't be written", values)
    level = Level.OK if appendfsync in ("always", "everysec") else Level.WARN
    return Check(
        "durability", level, f"append-only file, fsync {appendfsync or '?'}; a crash loses {window}", values
    )


def _eviction(info: dict[str, Any], policy: str | None) -> Check:
    policy = str(info.get("maxmemory_policy", "")) if policy is None else policy
    values = {"maxmemory_policy": policy}
    if policy == "noeviction":
        return Check("eviction", Level.OK, "noeviction", values)
    level = Level.FAIL if int(info.get("maxmemory", 0)) else Level.WARN
    return Check("eviction", level, f"{policy}: a full broker would drop sessions; set noeviction", values)


def _memory(info: dict[str, Any]) -> Check:
    used, limit = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    values = {"used_bytes": used, "limit_bytes": limit or None}
    text = f"{used / 2**20:.1f} MiB used" + (f" of {limit / 2**20:.1f} MiB" if limit else ", no limit")
    return Check("memory", Level.WARN if limit and used > _MEMORY_WARN * limit else Level.OK, text, values)


async def _clock(broker: Broker) -> Check:
    before = time.time()
    with map_exceptions("TIME"):
        seconds, microseconds = await broker.commands.time()
    middle = (before + time.time()) / 2
    offset_ms = round((seconds + microseconds / 1e6 - middle) * 1000)
    level = Level.OK if abs(offset_ms) <= _CLOCK_LIMIT_MS else Level.WARN
    return Check(
        "clock", level, f"the broker's clock is {offset_ms:+d} ms off this one", {"offset_ms": offset_ms}
    )


def _text(value: object) -> object:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
