"""Where a session lives: the worker of its model with the most room, chosen at creation by a reservation on its slot."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from contracts.broker import Client, map_exceptions
from contracts.errors import NoCapacityError
from contracts.keys import Keys
from contracts.worker_scripts import ReserveResult, WorkerScripts


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker that is alive.

    Args:
        capacity: sessions that may be resident.
        reserved: sessions placed on it.
        last_seen_ms: broker time of its last heartbeat.
    """

    worker_id: str
    incarnation: str
    model: str
    capacity: int
    reserved: int
    last_seen_ms: int

    @property
    def free(self) -> int:
        return self.capacity - self.reserved


class Placement:
    """Reserves room for sessions.

    Args:
        overcommit: place on a full worker too; its LRU then decides, visibly, who is evicted.
        lost_after_ms: a worker silent for so long is gone for good.
        connected_for_ms: milliseconds since the connection to the broker was last restored; while it is shorter than a
            period, an expired key may only mean that nobody could renew it.
    """

    def __init__(
        self, client: Client, keys: Keys, scripts: WorkerScripts, *, overcommit: bool, lost_after_ms: int,
        connected_for_ms: Callable[[], float],
    ) -> None:  # fmt: skip
        self.client = client
        self.keys = keys
        self.scripts = scripts
        self.overcommit = overcommit
        self.lost_after_ms = lost_after_ms
        self.connected_for_ms = connected_for_ms

    async def worker_ids(self) -> dict[str, int]:
        """Known workers, with the broker time at which each was last seen."""
        with map_exceptions(self.keys.workers):
            pairs: Any = await self.client.zrange(self.keys.workers, 0, -1, withscores=True)
        return {name.decode(): int(score) for name, score in pairs}

    async def info(self, worker_id: str, last_seen_ms: int = 0) -> WorkerInfo | None:
        """None while the worker's heartbeat has lapsed, or while it still loads its model."""
        k = self.keys.worker(worker_id)
        with map_exceptions(k.info):
            raw: Any = await self.client.hgetall(k.info)
            if not raw:
                return None
            reserved = await self.client.hlen(k.sessions)
        try:
            model, capacity = raw[b"model"].decode(), int(raw[b"capacity"])
            return WorkerInfo(
                worker_id, raw[b"incarnation"].decode(), model, capacity, reserved, last_seen_ms
            )
        except (KeyError, ValueError):
            return None

    async def alive(self) -> list[WorkerInfo]:
        """Workers that take sessions."""
        found = [await self.info(name, seen) for name, seen in (await self.worker_ids()).items()]
        return [info for info in found if info is not None]

    async def place(self, model: str, session_id: str, life: str) -> str:
        """Reserves room on the best worker of the model; returns its id. NoCapacityError (retryable) where none has any."""
        serving = [info for info in await self.alive() if info.model == model]
        if not serving:
            raise NoCapacityError(f"no worker serves model {model!r:.80}", field="model")
        for info in sorted(serving, key=lambda info: (-info.free, info.worker_id)):
            if await self.reserve(info.worker_id, session_id, life) is ReserveResult.RESERVED:
                return info.worker_id
        raise NoCapacityError(f"all workers of model {model!r:.80} are full", field="model")

    async def reserve(self, worker_id: str, session_id: str, life: str) -> ReserveResult:
        """Room on one worker; a session that has it already keeps it under the new life."""
        return await self.scripts.reserve(worker_id, session_id, life, overcommit=self.overcommit)

    async def unreserve(self, worker_id: str | None, session_id: str, life: str) -> None:
        """Gives the room back, if it is that life's."""
        if worker_id is not None:
            await self.scripts.unreserve(worker_id, session_id, life)

    async def is_gone(self, worker_id: str | None) -> bool:
        """Whether the worker's memory is gone for good: forgotten, or silent for `lost_after_ms`."""
        if worker_id is None:
            return True
        info = self.keys.worker(worker_id).info
        with map_exceptions(info):
            if await self.client.exists(info):
                return False
        seen = (await self.worker_ids()).get(worker_id)
        if seen is None:
            return True  # somebody took it out; an outage does not do that
        if self.connected_for_ms() < self.lost_after_ms:
            return False
        with map_exceptions("TIME"):
            seconds, micros = await self.client.time()
        return int(seconds) * 1000 + int(micros) // 1000 - seen > self.lost_after_ms


def monotonic_ms() -> float:
    """Milliseconds of this process's monotonic clock."""
    return time.monotonic() * 1000
