"""Sessions by status, read page by page from the index and checked against their state.

The index and the state lie in different slots, so an entry of the index is a hint: what the state hash says counts.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from actors.broker_pool import Broker
from contracts.broker import map_exceptions
from contracts.errors import CorruptDataError
from contracts.lifecycle import Status
from contracts.state import SessionState

_PAGE: Final = 200
_SHOWN: Final = (
    "status",
    "model",
    "reducer",
    "chunk_index",
    "event_floor",
    "pace_ms",
    "worker",
    "failure_code",
    "cleanup_error",
    "created_at_ms",
    "updated_at_ms",
)


async def list_sessions(
    broker: Broker, statuses: Sequence[Status], *, limit: int | None = None
) -> AsyncIterator[dict[str, Any]]:
    """Yields one mapping a session, status by status, those that changed last first.

    A session whose state is corrupt is yielded with `error` in place of its fields; one that the index lists although
    its state is gone, or is another one, is left out.
    """
    seen: set[str] = set()
    for status in statuses:
        async for names in _pages(broker, status):
            fresh = [name for name in names if name not in seen]
            for entry in await _entries(broker, fresh):
                if entry["status"] in (status, None):
                    if limit is not None and len(seen) >= limit:
                        return
                    seen.add(entry["session_id"])
                    yield entry


async def _pages(broker: Broker, status: Status) -> AsyncIterator[list[str]]:
    """The index from its newest entry downwards, by score, so that what moves meanwhile moves no page."""
    key = broker.keys.index(status)
    highest: float | str = "+inf"
    at_highest = 0
    while True:
        with map_exceptions(key):
            page: Any = await broker.commands.zrevrangebyscore(
                key, highest, "-inf", start=at_highest, num=_PAGE, withscores=True
            )
        if not page:
            return
        yield [name.decode(errors="replace") for name, _ in page]
        lowest = page[-1][1]
        equal = sum(1 for _, score in page if score == lowest)
        at_highest = at_highest + equal if lowest == highest else equal
        highest = lowest


async def _entries(broker: Broker, session_ids: Sequence[str]) -> list[dict[str, Any]]:
    pipeline = broker.commands.pipeline(transaction=False)
    for session_id in session_ids:
        keys = broker.keys.session(session_id)
        pipeline.hgetall(keys.state)
        pipeline.xlen(keys.events)
    with map_exceptions("state"):
        replies = await pipeline.execute(raise_on_error=False)
    rows = zip(session_ids, replies[::2], replies[1::2], strict=True)
    entries = (_entry(session_id, raw, pending) for session_id, raw, pending in rows)
    return [entry for entry in entries if entry is not None]


def _entry(session_id: str, raw: Any, pending: Any) -> dict[str, Any] | None:
    wrong = next((reply for reply in (raw, pending) if isinstance(reply, Exception)), None)
    if wrong is not None:
        return _corrupt(session_id, CorruptDataError(f"session {session_id}: {wrong}", field="state"))
    try:
        state = SessionState.from_hash(session_id, raw)
    except CorruptDataError as error:
        return _corrupt(session_id, error)
    if state is None:
        return None
    shown = {name: getattr(state, name) for name in _SHOWN}
    return {"session_id": session_id, **shown, "pending_events": pending}


def _corrupt(session_id: str, error: CorruptDataError) -> dict[str, Any]:
    return {"session_id": session_id, "status": None, "error": error.to_dict()}
