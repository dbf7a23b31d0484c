"""What must hold for what belongs to no one session: the configuration, indexes, partitions and workers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

from actors.broker_pool import Broker
from actors.index_pages import index_pages
from actors.invariants.finding import Finding
from contracts.broker import map_exceptions
from contracts.keys import SCHEMA_VERSION
from contracts.lifecycle import Status


async def wrong_types(broker: Broker, wanted: Iterable[tuple[str, str]]) -> list[Finding]:
    """A finding for each of these keys that exists and has another type."""
    pairs = list(wanted)
    pipeline = broker.commands.pipeline(transaction=False)
    for key, _ in pairs:
        pipeline.type(key)
    with map_exceptions("TYPE"):
        found: list[Any] = await pipeline.execute()
    return [
        Finding("wrong_type", key, f"is a {kind.decode()}, must be a {right}", corrupt=True)
        for (key, right), kind in zip(pairs, found, strict=True)
        if kind.decode() not in (right, "none")
    ]


async def check_config(broker: Broker) -> list[Finding]:
    """The configuration is readable and of the version that we write."""
    key = broker.keys.config
    if wrong := await wrong_types(broker, [(key, "hash")]):
        return wrong
    with map_exceptions(key):
        raw: Any = await broker.commands.hgetall(key)
    if not raw:
        return []
    findings = []
    for name in ("partitions", "schema_version"):
        text = raw.get(name.encode(), b"").decode(errors="replace")
        if not text.isdigit() or int(text) == 0:
            findings.append(Finding("corrupt_config", key, f"{name} is {text!r:.40}", corrupt=True))
        elif name == "schema_version" and int(text) != SCHEMA_VERSION:
            findings.append(Finding("schema_version", key, f"is {text}, we write {SCHEMA_VERSION}"))
    return findings


def global_keys(broker: Broker) -> list[tuple[str, str]]:
    """Keys of all sessions and processes, with their types."""
    keys = broker.keys
    indexes = [*(keys.index(status) for status in Status), keys.tombstones]
    return [(key, "zset") for key in (*indexes, keys.workers, keys.hosts, keys.janitors)]


async def check_partitions(broker: Broker, partitions: int) -> list[Finding]:
    """Keys of partitions have their types, and nothing is counted that is not in the inbox."""
    findings: list[Finding] = []
    for index in range(partitions):
        keys = broker.keys.partition(index)
        kinds = {keys.lease: "hash", keys.inbox: "stream", keys.attempts: "hash", keys.live: "set"}
        wrong = await wrong_types(broker, kinds.items())
        findings += wrong
        if not {keys.inbox, keys.attempts} & {finding.key for finding in wrong}:
            findings += await _counted(broker, keys.inbox, keys.attempts)
    return findings


async def _counted(broker: Broker, inbox: str, attempts: str) -> list[Finding]:
    with map_exceptions(attempts):
        counted: Any = await broker.commands.hkeys(attempts)
        gone = [entry for entry in counted if not await broker.commands.xrange(inbox, entry, entry, count=1)]
    if not gone:
        return []
    names = ", ".join(entry.decode(errors="replace") for entry in gone[:5])
    return [
        Finding("attempts_left", attempts, f"counts {len(gone)} entries that are not in the inbox: {names}")
    ]


async def worker_ids(broker: Broker) -> list[str]:
    """Every worker that the index knows."""
    return [name async for page in index_pages(broker.commands, broker.keys.workers) for name, _ in page]


async def check_worker_types(broker: Broker, worker_id: str) -> list[Finding]:
    """Keys of a worker have their types."""
    keys = broker.keys.worker(worker_id)
    return await wrong_types(
        broker, {keys.requests: "stream", keys.sessions: "hash", keys.info: "hash"}.items()
    )


async def reservations(broker: Broker, worker_id: str) -> AsyncIterator[tuple[str, bytes]]:
    """Session and reservation, as they stand there."""
    key = broker.keys.worker(worker_id).sessions
    with map_exceptions(key):
        raw: Any = await broker.commands.hgetall(key)
    for name, text in raw.items():
        yield name.decode(errors="replace"), text
