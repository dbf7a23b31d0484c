"""Notices that a worker is gone for good, and tells each session that was placed on it."""

from __future__ import annotations

from typing import Any

import structlog

from actors.placement import Placement
from actors.store import SessionStore
from contracts.broker import Client, map_exceptions
from contracts.errors import CorruptDataError
from contracts.keys import Keys
from contracts.messages import NO_INCARNATION, Notice, NoticeKind
from contracts.reservation import Reservation
from contracts.worker_scripts import WorkerScripts


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
        why = f"worker {worker_id} was silent for more than {self.lost_after_ms} ms"
        told, unreadable = await tell_sessions(
            self.client, self.keys, worker_id, why, partitions=self.partitions
        )
        self.log.warning("worker lost", worker=worker_id, sessions=told, unreadable=unreadable)
        return told


async def tell_sessions(
    client: Client, keys: Keys, worker_id: str, why: str, *, partitions: int
) -> tuple[int, list[str]]:
    """Tells each session that is placed on a worker that its memory there is gone, also on a full broker.

    Returns how many were told, and the sessions whose reservation can't be read.
    """
    key, told, scripts = keys.worker(worker_id).sessions, 0, WorkerScripts(client, keys)
    unreadable: list[str] = []
    with map_exceptions(key):
        placed: Any = await client.hgetall(key)
    for name, text in placed.items():
        session_id = name.decode(errors="replace")
        try:
            life = Reservation.from_json(text, session_id).life
        except CorruptDataError:
            unreadable.append(session_id)
            continue
        notice = Notice(NoticeKind.WORKER_LOST, session_id, worker_id, life, NO_INCARNATION, why)
        await scripts.add_to_inbox(keys.inbox_of(session_id, partitions), "notice", notice.to_json())
        told += 1
    return told, unreadable
