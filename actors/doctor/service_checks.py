"""What the doctor asks of our own processes: hosts, workers, leases, tombstones."""

from __future__ import annotations

from typing import Any

from actors.broker_pool import Broker
from actors.doctor.checks import Check, Level
from contracts.broker import map_exceptions


async def service_checks(broker: Broker) -> list[Check]:
    """Reads what the processes say of themselves; the broker's own clock decides who is alive."""
    with map_exceptions("TIME"):
        seconds, microseconds = await broker.commands.time()
    now_ms = seconds * 1000 + microseconds // 1000
    return [
        await _hosts(broker, now_ms),
        await _partitions(broker, now_ms),
        await _workers(broker),
        await _tombstones(broker),
    ]


async def _hosts(broker: Broker, now_ms: int) -> Check:
    oldest_ms = now_ms - broker.settings.lease_ms  # a host says that it is there more often than that
    with map_exceptions(broker.keys.hosts):
        names: Any = await broker.commands.zrangebyscore(broker.keys.hosts, oldest_ms, "+inf")
    alive = [name.decode() for name in names]
    return _alive("hosts", alive, "start one with `worldline host`", {"alive": alive})


async def _workers(broker: Broker) -> Check:
    with map_exceptions(broker.keys.workers):
        names: Any = await broker.commands.zrange(broker.keys.workers, 0, -1)
    models: dict[str, str] = {}
    for name in (name.decode() for name in names):
        key = broker.keys.worker(name).info  # expires with its worker
        with map_exceptions(key):
            model: Any = await broker.commands.hget(key, "model")
        if model is not None:
            models[name] = model.decode()
    alive = [f"{name} ({model})" for name, model in models.items()]
    return _alive("workers", alive, "start one with `worldline-worker`", {"alive": models})


async def _partitions(broker: Broker, now_ms: int) -> Check:
    count = await broker.partitions()
    if count is None:
        return Check("partitions", Level.FAIL, "no host has ever started here", {"partitions": None})
    owners: dict[str, list[int]] = {}
    orphans: list[int] = []
    for index in range(count):
        key = broker.keys.partition(index).lease
        with map_exceptions(key):
            lease: Any = await broker.commands.hmget(key, ["owner", "expires_at_ms"])
        owner, expires = lease
        if owner is None or expires is None or int(expires) <= now_ms:
            orphans.append(index)
        else:
            owners.setdefault(owner.decode(), []).append(index)
    values = {"partitions": count, "owners": owners, "without_owner": orphans}
    if orphans:
        return Check("partitions", Level.FAIL, f"{len(orphans)} of {count} have no owner: {orphans}", values)
    shares = ", ".join(f"{owner} {len(indexes)}" for owner, indexes in owners.items())
    return Check("partitions", Level.OK, f"{count} leased: {shares}", values)


async def _tombstones(broker: Broker) -> Check:
    with map_exceptions(broker.keys.tombstones):
        count = int(await broker.commands.zcard(broker.keys.tombstones))
    level = Level.WARN if count else Level.OK
    text = f"{count} sessions wait for a retry of their clean-up" if count else "no clean-up is waiting"
    return Check("tombstones", level, text, {"count": count})


def _alive(name: str, alive: list[str], advice: str, values: dict[str, Any]) -> Check:
    if not alive:
        return Check(name, Level.FAIL, f"none is alive; {advice}", values)
    return Check(name, Level.OK, f"{len(alive)} alive: {', '.join(alive)}", values)
