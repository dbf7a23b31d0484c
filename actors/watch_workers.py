"""Notices that a worker is gone for good, and tells each session that was placed on it."""

from __future__ import annotations

from typing import Any

import structlog

from actors.placement import Placement
from actors.store import SessionStore
from contracts.broker import Client, map_exceptions
from contracts.errors import WorldlineError
from contracts.events import loads
from contracts.keys import Keys
from contracts.messages import Notice, NoticeKind


class WorkerWatch:
    """Looks at the workers each heartbeat; several hosts may do so, because notices are about one life.

    Args:
        partitions: how many there are.
        lost_after_ms: a worker silent for so long is gone.
    """

    def __init__(
        self,
        client: Client,
        keys: Keys,
        store: SessionStore,
        placement: Placement,
        *,
        partitions: int,
        lost_after_ms: int,
    ) -> None:
        self.client = client
        self.keys = keys
        self.store = store
        self.placement = placement
        self.partitions = partitions
        self.lost_after_ms = lost_after_ms
        self.log = structlog.get_logger("workers")
        self._declared: dict[str, int] = {}

    async def look(self) -> None:
        """Declares each worker lost that has been silent for long, once."""
        now = await self.store.now_ms()
        for worker_id, seen in (await self.placement.worker_ids()).items():
            if now - seen <= self.lost_after_ms or self._declared.get(worker_id) == seen:
                continue
            if await self.placement.is_gone(worker_id):
                await self.declare_lost(worker_id)
                self._declared[worker_id] = seen

    async def declare_lost(self, worker_id: str) -> int:
        """Adds one notice a placed session to its inbox; returns how many."""
        k = self.keys.worker(worker_id)
        with map_exceptions(k.sessions):
            placed: Any = await self.client.hgetall(k.sessions)
        for name, reservation in placed.items():
            await self._tell(worker_id, name.decode(), reservation)
        self.log.warning("worker lost", worker=worker_id, sessions=len(placed))
        return len(placed)

    async def _tell(self, worker_id: str, session_id: str, reservation: bytes) -> None:
        try:
            life = str(loads(reservation, "reservation")["life"])
        except (WorldlineError, KeyError, TypeError):
            self.log.warning("reservation unreadable", worker=worker_id, session_id=session_id)
            return
        text = f"worker {worker_id} was silent for more than {self.lost_after_ms} ms"
        notice = Notice(NoticeKind.WORKER_LOST, session_id, worker_id, life, "none", text)
        inbox = self.keys.inbox_of(session_id, self.partitions)
        with map_exceptions(inbox):
            await self.client.xadd(inbox, {"notice": notice.to_json()})
