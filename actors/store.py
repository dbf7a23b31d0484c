"""What the host reads from the broker, and the indexes that it keeps beside the state.

Indexes lie on other cluster slots than the state: a session is added to the new one before its state is written and
taken from the old one after, so that a crash leaves an entry too many, never one too few. Readers verify.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Final

from contracts.broker import Client, map_exceptions
from contracts.index_scripts import IndexScripts
from contracts.keys import Keys
from contracts.lifecycle import Status
from contracts.session_scripts import Entry, parse_entries
from contracts.state import SessionState

ENDING: Final = frozenset({Status.CLOSING, Status.CLEANUP_FAILED})
"""States in which a session is in the tombstones."""


class SessionStore:
    """Reads of one session, and the indexes over all.

    Args:
        client: the command client.
        batch: stream entries read at once.
    """

    def __init__(self, client: Client, keys: Keys, *, batch: int = 512) -> None:
        self.client = client
        self.keys = keys
        self.batch = batch
        self._indexes = IndexScripts(client, keys)

    async def load(self, session_id: str) -> SessionState | None:
        """The state hash, typed; None without a session. CorruptDataError names the field at fault."""
        key = self.keys.session(session_id).state
        with map_exceptions(key):
            raw: Any = await self.client.hgetall(key)
        return SessionState.from_hash(session_id, raw)

    async def read_events(self, session_id: str, after: str) -> tuple[Entry, ...]:
        """The next entries of the events stream, at most `batch`."""
        key = self.keys.session(session_id).events
        with map_exceptions(key):
            reply: Any = await self.client.xrange(key, min=f"({after}", max="+", count=self.batch)
        return parse_entries(reply)

    async def known_ids(self, session_id: str, event_ids: Iterable[int]) -> set[int]:
        """Those of `event_ids` that were accepted before and are still remembered."""
        wanted = list(event_ids)
        if not wanted:
            return set()
        key = self.keys.session(session_id).ids
        with map_exceptions(key):
            scores = await self.client.zmscore(key, [str(event_id) for event_id in wanted])
        return {event_id for event_id, score in zip(wanted, scores, strict=True) if score is not None}

    async def was_answered(self, session_id: str, command_id: str) -> bool:
        """Whether a command has its answer already."""
        key = self.keys.session(session_id).answered
        with map_exceptions(key):
            return bool(await self.client.hexists(key, command_id))

    async def now_ms(self) -> int:
        """The broker's clock."""
        with map_exceptions("TIME"):
            seconds, micros = await self.client.time()
        return int(seconds) * 1000 + int(micros) // 1000

    async def enter(self, session_id: str, status: Status) -> int:
        """Before a transition: the session joins the index of its new status (CLOSING: the tombstones as well).

        Returns the score, by which `leave` knows the entry again.
        """
        now = await self.now_ms()
        if status is Status.CLOSING:
            await self._indexes.add(self.keys.tombstones, session_id, now)
        await self._indexes.add(self.keys.index(status), session_id, now)
        return now

    async def leave(self, session_id: str, status: Status, score: int) -> None:
        """After a transition that was refused: takes back what `enter` wrote, unless somebody has entered it anew."""
        state = await self.load(session_id)
        if state is not None and state.status is status:
            return
        await self._indexes.drop(self.keys.index(status), session_id, score)
        if status is Status.CLOSING and (state is None or state.status not in ENDING):
            await self._indexes.drop(self.keys.tombstones, session_id, score)

    async def settle(self, session_id: str, status: Status | None, others: Collection[Status]) -> None:
        """After a transition: of the indexes `others` it stays only in that of its status, None without a session."""
        with map_exceptions("sessions index"):
            for other in others:
                if other is not status:
                    await self.client.zrem(self.keys.index(other), session_id)
            if Status.CLOSING in others and status not in ENDING:
                await self.client.zrem(self.keys.tombstones, session_id)

    async def retry_due(self, session_id: str, due_ms: int) -> None:
        """When the next close of a tombstone is due (broker time)."""
        await self._indexes.add(self.keys.tombstones, session_id, due_ms)
