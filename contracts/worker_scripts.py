"""Scripts over a worker's keys: its name, its busy mark, its reservations. All keys share the slot `{w:<id>}`."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from contracts.scripts import ScriptRunner


class ReserveResult(StrEnum):
    """How a reservation ended."""

    RESERVED = "RESERVED"
    FULL = "FULL"
    GONE = "GONE"
    """The worker is not alive, or still loads its model."""


class WorkerScripts(ScriptRunner):
    """Typed functions over the scripts of a worker. All may be sent again after a lost reply."""

    async def claim(
        self,
        worker_id: str,
        incarnation: str,
        fields: Mapping[str, str | int],
        *,
        ttl_ms: int,
        dead: str = "",
    ) -> int | None:
        """Takes the name for `incarnation` and writes `fields` to its info, which lives `ttl_ms`.

        Args:
            dead: an incarnation that the caller knows to be dead; it does not hold the name any more.

        Returns:
            The broker's time in ms, or None while another incarnation holds the name.
        """
        pairs = [part for pair in fields.items() for part in pair]
        info = self.keys.worker(worker_id).info
        outcome, *values = await self.run("worker_claim", (info,), (incarnation, ttl_ms, dead, *pairs))
        return int(values[0]) if outcome == "HELD" else None

    async def heartbeat(
        self, worker_id: str, incarnation: str, fields: Mapping[str, str | int], *, ttl_ms: int
    ) -> int | None:
        """Renews the name; None when another incarnation holds it, else the broker's time in ms."""
        return await self.claim(worker_id, incarnation, fields, ttl_ms=ttl_ms)

    async def leave(self, worker_id: str, incarnation: str) -> bool:
        """Removes the info; False when another incarnation holds the name, or nobody does."""
        outcome, *_ = await self.run("worker_leave", (self.keys.worker(worker_id).info,), (incarnation,))
        return bool(outcome == "LEFT")

    async def mark_busy(self, worker_id: str, incarnation: str) -> int | None:
        """Sets `busy_since` and returns it (broker time in ms); None when the name is not held any more."""
        info = self.keys.worker(worker_id).info
        outcome, *values = await self.run("worker_mark_busy", (info,), (incarnation,))
        return int(values[0]) if outcome == "BUSY" else None

    async def add_to_inbox(self, inbox: str, field: str, text: str) -> None:
        """Adds a reply, a notice, or a command that ends a session, also while the broker is out of memory.

        A second copy does no harm.
        """
        await self.run("worker_reply", (inbox,), (field, text))

    async def reserve(
        self, worker_id: str, session_id: str, life: str, *, overcommit: bool = False
    ) -> ReserveResult:
        """Reserves room for a session; one that is there already gets the new life and is never refused as FULL."""
        keys = self.keys.worker(worker_id)
        args = (session_id, life, "1" if overcommit else "")
        outcome, *_ = await self.run("worker_reserve", (keys.sessions, keys.info), args)
        return ReserveResult(outcome)

    async def unreserve(self, worker_id: str, session_id: str, life: str = "") -> bool:
        """Gives the room back if it is that life's ('' for any); False when there was nothing to remove."""
        keys = self.keys.worker(worker_id)
        outcome, *_ = await self.run("worker_unreserve", (keys.sessions,), (session_id, life))
        return bool(outcome == "REMOVED")
