"""What the doctor asks of what works behind the sessions: janitors, their scheduler, request groups, the inboxes."""

from __future__ import annotations

import asyncio
from typing import Any

from redis.exceptions import RedisError

from actors.broker_pool import Broker
from actors.config import JanitorSettings
from actors.doctor.checks import Check, Level
from actors.processes import list_workers
from actors.store import SessionStore
from contracts.broker import map_exceptions
from contracts.config import load_settings
from contracts.keys import WORKER_GROUP


async def janitor_checks(broker: Broker) -> list[Check]:
    """Reads what janitors, job queue, workers' groups and inboxes show."""
    now_ms = await SessionStore(broker.commands, broker.keys).now_ms()
    return [
        await _janitors(broker, now_ms),
        await _scheduler(),
        await _groups(broker),
        await _backlog(broker, now_ms),
    ]


async def _janitors(broker: Broker, now_ms: int) -> Check:
    oldest_ms = now_ms - max(broker.settings.lease_ms, 3 * broker.settings.heartbeat_ms)
    with map_exceptions(broker.keys.janitors):
        names: Any = await broker.commands.zrangebyscore(broker.keys.janitors, oldest_ms, "+inf")
    alive = [name.decode() for name in names]
    if not alive:
        text = "none is alive: no failed close is retried; start one with `worldline janitor`"
        return Check("janitors", Level.FAIL, text, {"alive": []})
    return Check("janitors", Level.OK, f"{len(alive)} alive: {', '.join(alive)}", {"alive": alive})


async def _scheduler() -> Check:
    from actors.jobs import scheduler_is_alive  # the job library is slow to load, and few commands need it

    settings = load_settings(JanitorSettings)
    values = {"url": settings.shown_jobs_url}
    try:
        alive = await asyncio.to_thread(scheduler_is_alive, settings)
    except (RedisError, OSError) as error:
        return Check("scheduler", Level.FAIL, f"the broker for jobs does not answer: {error}", values)
    if alive:
        return Check("scheduler", Level.OK, f"one works on {settings.shown_jobs_url}", values)
    text = "none works: what is to run later waits; start `worldline janitor` without --no-scheduler"
    return Check("scheduler", Level.FAIL, text, values)


async def _groups(broker: Broker) -> Check:
    """Each worker that serves reads its requests as the group of its stream."""
    pending: dict[str, int] = {}
    missing: list[str] = []
    for worker in await list_workers(broker):
        if worker["state"] != "alive" or worker["capacity"] is None:
            continue
        group = await _group(broker, worker["worker"])
        if group is None:
            missing.append(worker["worker"])
        else:
            pending[worker["worker"]] = group
    values = {"in_hand": pending, "missing": missing}
    if missing:
        text = f"the request streams of {', '.join(missing)} have no group: nothing is read"
        return Check("groups", Level.FAIL, text, values)
    return Check("groups", Level.OK, f"{len(pending)} read, {sum(pending.values())} requests in hand", values)


async def _group(broker: Broker, worker_id: str) -> int | None:
    """Requests that the worker has in hand; None without a group."""
    key = broker.keys.worker(worker_id).requests
    with map_exceptions(key):
        if not await broker.commands.exists(key):
            return None
        groups: Any = await broker.commands.xinfo_groups(key)
    for group in groups:
        if group["name"] == WORKER_GROUP.encode():
            return int(group["pending"])
    return None


async def _backlog(broker: Broker, now_ms: int) -> Check:
    """The oldest unfinished command, reply or notice: what is in an inbox is unfinished."""
    ages: dict[int, int] = {}
    waiting = 0
    for index in range(await broker.partitions() or 0):
        key = broker.keys.partition(index).inbox
        with map_exceptions(key):
            oldest: Any = await broker.commands.xrange(key, count=1)
            waiting += int(await broker.commands.xlen(key))
        if oldest:
            ages[index] = max(0, now_ms - int(oldest[0][0].partition(b"-")[0]))
    if not ages:
        return Check("backlog", Level.OK, "nothing is unfinished", {"unfinished": 0, "oldest_ms": None})
    partition, age_ms = max(ages.items(), key=lambda item: item[1])
    values = {"unfinished": waiting, "oldest_ms": age_ms, "partition": partition}
    text = f"{waiting} unfinished, the oldest for {age_ms / 1000:.1f} s in partition {partition}"
    limit_ms = broker.settings.queue_limit_ms + broker.settings.execution_limit_ms
    return Check("backlog", Level.WARN if age_ms > limit_ms else Level.OK, text, values)
