"""Hosts and workers as people see them, and how a worker that will not come back is forgotten."""

from __future__ import annotations

from typing import Any, Final

from actors.broker_pool import Broker
from actors.index_pages import index_pages
from actors.store import SessionStore
from actors.watch_workers import tell_sessions
from contracts.broker import map_exceptions
from contracts.errors import WorldlineError

_INFO_NUMBERS: Final = ("capacity", "resident", "busy_since")
_DEFAULT_PARTITIONS: Final = 1


class WorkerNotFoundError(WorldlineError, LookupError):
    """Raised when no worker of that name was ever seen, or it was forgotten."""

    code = "not_found"


class WorkerAliveError(WorldlineError, RuntimeError):
    """Raised when a worker is to be forgotten that is still there."""

    code = "worker_alive"


async def list_workers(broker: Broker) -> list[dict[str, Any]]:
    """One mapping a worker, by name.

    `state` is `alive`, `silent` (its heartbeat has lapsed) or `lost` (it has been silent for `worker_lost_after_ms`).
    """
    now_ms = await SessionStore(broker.commands, broker.keys).now_ms()
    return sorted(
        [
            await _worker(broker, name, round(seen), now_ms)
            async for page in index_pages(broker.commands, broker.keys.workers)
            for name, seen in page
        ],
        key=lambda worker: str(worker["worker"]),
    )


async def _worker(broker: Broker, worker_id: str, seen_ms: int, now_ms: int) -> dict[str, Any]:
    keys = broker.keys.worker(worker_id)
    with map_exceptions(keys.info):
        raw: Any = await broker.commands.hgetall(keys.info)
    with map_exceptions(keys.sessions):
        reserved = int(await broker.commands.hlen(keys.sessions))
    with map_exceptions(keys.requests):
        waiting = int(await broker.commands.xlen(keys.requests))
    info = {name.decode(): value.decode(errors="replace") for name, value in raw.items()}
    numbers = {name: int(info[name]) if info.get(name, "").isdigit() else None for name in _INFO_NUMBERS}
    silent_ms = max(0, now_ms - seen_ms)
    lapsed = "lost" if silent_ms > broker.settings.worker_lost_after_ms else "silent"
    return {
        "worker": worker_id,
        "state": "alive" if info else lapsed,
        "model": info.get("model"),
        "incarnation": info.get("incarnation"),
        "capacity": numbers["capacity"],
        "resident": numbers["resident"],
        "reserved": reserved,
        "waiting": waiting,
        "busy_since_ms": numbers["busy_since"],
        "last_seen_ms": seen_ms,
        "silent_ms": silent_ms,
    }


async def forget_worker(broker: Broker, worker_id: str, *, force: bool = False) -> tuple[int, list[str]]:
    """Declares a worker lost: tells each session that was placed on it, and takes it out of the index.

    Returns how many sessions were told, and those whose reservation can't be read. Raises WorkerNotFoundError, or WorkerAliveError unless `force`.
    """
    keys = broker.keys.worker(worker_id)
    with map_exceptions(keys.info):
        known = await broker.commands.zscore(broker.keys.workers, worker_id) is not None
        alive = bool(await broker.commands.exists(keys.info))
        placed = int(await broker.commands.hlen(keys.sessions))
    if not (known or alive or placed):
        raise WorkerNotFoundError(f"there is no worker {worker_id}", field="worker")
    if alive and not force:
        raise WorkerAliveError(f"worker {worker_id} is alive; stop it first, or use --force", field="worker")
    why = f"worker {worker_id} was declared lost by hand"
    partitions = await broker.partitions() or _DEFAULT_PARTITIONS
    with map_exceptions(keys.info):
        # Out of the way of placements first, and out of the index last: what fails in between can be done again.
        await broker.commands.delete(keys.info)
        told = await tell_sessions(broker.commands, broker.keys, worker_id, why, partitions=partitions)
        await broker.commands.zrem(broker.keys.workers, worker_id)
    return told


async def list_hosts(broker: Broker) -> list[dict[str, Any]]:
    """One mapping a host, by name; a host that holds a lease is listed even where the index has lost it."""
    now_ms = await SessionStore(broker.commands, broker.keys).now_ms()
    seen = {
        name: round(score)
        async for page in index_pages(broker.commands, broker.keys.hosts)
        for name, score in page
    }
    owned: dict[str, list[int]] = {name: [] for name in seen}
    for index in range(await broker.partitions() or 0):
        if (owner := await _owner(broker, index, now_ms)) is not None:
            owned.setdefault(owner, []).append(index)
    return [_host(broker, name, seen.get(name), owned[name], now_ms) for name in sorted(owned)]


async def _owner(broker: Broker, index: int, now_ms: int) -> str | None:
    key = broker.keys.partition(index).lease
    with map_exceptions(key):
        lease: Any = await broker.commands.hmget(key, ["owner", "expires_at_ms"])
    owner, expires = lease
    if owner is None or expires is None or int(expires) <= now_ms:
        return None
    return str(owner.decode())


def _host(broker: Broker, name: str, seen_ms: int | None, owned: list[int], now_ms: int) -> dict[str, Any]:
    silent_ms = None if seen_ms is None else max(0, now_ms - seen_ms)
    alive = bool(owned) or (silent_ms is not None and silent_ms <= broker.settings.lease_ms)
    return {
        "host": name,
        "state": "alive" if alive else "silent",
        "partitions": owned,
        "last_seen_ms": seen_ms,
        "silent_ms": silent_ms,
    }
