"""Sessions whose client is gone, or that nobody uses any more: a `disconnect` is sent, and the host looks again.

    presence_ms   the client's presence has expired
    idle_ms       neither event nor command nor chunk for so long

Nothing is acted on before a session's whole limit has passed since the broker was last reached anew: while it was away
nobody could renew anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import structlog

from actors.broker_pool import Broker
from actors.janitor.commands import send_command
from actors.janitor.facts import Facts
from actors.janitor.recent import Recent
from contracts.broker import map_exceptions
from contracts.commands import Command, Condition, Op
from contracts.identity import new_command_id
from contracts.lifecycle import LIVE


class Clients:
    """Finds absent clients and idle sessions.

    Args:
        broker: its connections.
        period_ms: a session is asked to disconnect at most once in this time.
    """

    def __init__(self, broker: Broker, period_ms: int) -> None:
        self._broker = broker
        self._recent = Recent(period_ms)
        self._log = structlog.get_logger("janitor")

    async def look(self, facts: Iterable[Facts], now_ms: int, connected_for_ms: float) -> None:
        """One pass over some sessions."""
        watched = [
            item
            for item in facts
            if item.status in LIVE
            and item.session_id not in self._recent
            and (item.presence_ms or item.idle_ms)
        ]
        absent = [
            item for item in watched if _over(item.presence_ms, item.created_at_ms, now_ms, connected_for_ms)
        ]
        for item in await self._without_presence(absent):
            await self._disconnect(item, Condition.ABSENT)
        quiet = [
            item for item in watched if _over(item.idle_ms, item.updated_at_ms, now_ms, connected_for_ms)
        ]
        for item in quiet:
            if item.session_id not in self._recent and not item.flying and await self._is_idle(item, now_ms):
                await self._disconnect(item, Condition.IDLE)
        self._recent.prune()

    async def _without_presence(self, items: list[Facts]) -> list[Facts]:
        if not items:
            return []
        pipeline = self._broker.commands.pipeline(transaction=False)
        for item in items:
            pipeline.exists(self._broker.keys.session(item.session_id).presence)
        with map_exceptions("presence"):
            present = await pipeline.execute()
        return [item for item, there in zip(items, present, strict=True) if not there]

    async def _is_idle(self, item: Facts, now_ms: int) -> bool:
        """Whether the newest entry ever added to each of its streams is old enough."""
        keys = self._broker.keys.session(item.session_id)
        pipeline = self._broker.commands.pipeline(transaction=False)
        for key in (keys.events, keys.answers, keys.chunks):
            pipeline.xinfo_stream(key)
        with map_exceptions("streams"):
            replies = await pipeline.execute(raise_on_error=False)
        newest_ms = max((_last_ms(reply) for reply in replies), default=0)
        return now_ms - newest_ms >= (item.idle_ms or 0)

    async def _disconnect(self, item: Facts, only_if: Condition) -> None:
        args = {"life": item.life, "reason": str(only_if), "only_if": only_if}
        command = Command(Op.DISCONNECT, item.session_id, new_command_id(), args)
        if await send_command(self._broker, command):
            self._recent.add(item.session_id)
            self._log.info("disconnect sent", session_id=item.session_id, reason=str(only_if))


def _over(limit_ms: int | None, since_ms: int, now_ms: int, connected_for_ms: float) -> bool:
    return bool(limit_ms) and min(now_ms - since_ms, connected_for_ms) >= (limit_ms or 0)


def _last_ms(reply: Any) -> int:
    """When the newest entry was added; 0 for a stream that does not exist."""
    if isinstance(reply, Exception):
        return 0
    last = reply.get("last-generated-id", reply.get(b"last-generated-id", b"0-0"))
    return int(last.partition(b"-")[0])
