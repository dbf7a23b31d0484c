"""All keys of one session at one moment. They share a slot, so one transaction reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from actors.broker_pool import Broker
from contracts.broker import map_exceptions
from contracts.creation import MAX_PENDING_EVENTS
from contracts.keys import SESSION_KEY_TYPES, SessionKeys
from contracts.session_scripts import Entry, parse_entries

EVENTS_READ: Final = MAX_PENDING_EVENTS + 1
"""Entries read of an event stream: one more than may ever be pending."""

Types = Mapping[str, str]
"""Last part of a key -> the type that it has, `none` for one that is missing."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One session. What can't be read because its key has a wrong type is empty.

    Args:
        expires: last parts of those keys that have a time to live.
        events_length: may be more than the `events` that were read.
    """

    session_id: str
    keys: SessionKeys
    types: Types
    expires: frozenset[str]
    state: Mapping[bytes, bytes] = field(default_factory=dict)
    events_length: int = 0
    events: tuple[Entry, ...] = ()
    ids: tuple[str, ...] = ()
    chunks: tuple[Entry, ...] = ()
    history: tuple[Entry, ...] = ()
    answers: tuple[Entry, ...] = ()
    answered: Mapping[bytes, bytes] = field(default_factory=dict)
    rejected_length: int = 0

    def key(self, part: str) -> str:
        """A key by its last part."""
        return f"{self.keys.base}:{part}"

    def right(self, part: str) -> bool:
        """Whether a key is missing or of its type."""
        return self.types[part] in (SESSION_KEY_TYPES[part], "none")


async def read_snapshot(broker: Broker, session_id: str) -> Snapshot:
    """Reads one session."""
    keys, parts = broker.keys.session(session_id), list(SESSION_KEY_TYPES)
    pipeline = broker.commands.pipeline(transaction=True)
    for part in parts:
        pipeline.type(f"{keys.base}:{part}")
        pipeline.pttl(f"{keys.base}:{part}")
    pipeline.hgetall(keys.state)
    pipeline.xlen(keys.events)
    pipeline.xrange(keys.events, count=EVENTS_READ)
    pipeline.zrange(keys.ids, 0, -1)
    pipeline.xrange(keys.chunks)
    pipeline.xrange(keys.history)
    pipeline.xrange(keys.answers)
    pipeline.hgetall(keys.answered)
    pipeline.xlen(keys.rejected)
    with map_exceptions(keys.state):
        replies: list[Any] = await pipeline.execute(raise_on_error=False)
    heads, contents = replies[: 2 * len(parts)], replies[2 * len(parts) :]
    state, length, events, ids, chunks, history, answers, answered, rejected = (
        None if isinstance(reply, Exception) else reply for reply in contents
    )
    return Snapshot(
        session_id,
        keys,
        types={part: kind.decode() for part, kind in zip(parts, heads[::2], strict=True)},
        expires=frozenset(part for part, ttl in zip(parts, heads[1::2], strict=True) if ttl >= 0),
        state={} if state is None else state,
        events_length=length or 0,
        events=_entries(events),
        ids=tuple(name.decode(errors="replace") for name in ids or ()),
        chunks=_entries(chunks),
        history=_entries(history),
        answers=_entries(answers),
        answered={} if answered is None else answered,
        rejected_length=rejected or 0,
    )


def _entries(reply: Any) -> tuple[Entry, ...]:
    return () if reply is None else parse_entries(reply)
