"""Committed chunks as they come, over connections that may break."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

from actors.broker_pool import Broker
from actors.calls import Reconnection
from actors.streams import BEGINNING, CancelGuard, newest_id, read_after
from contracts.broker import map_exceptions
from contracts.errors import BrokerError, CorruptDataError, InvalidArgumentError, SessionNotFoundError
from contracts.lifecycle import TERMINAL, Status
from contracts.state import CommittedChunk

_IDLE_MS: Final = 1_000


async def watch_chunks(broker: Broker, session_id: str, *, from_start: bool) -> AsyncIterator[CommittedChunk]:
    """Yields each chunk of a session once, in order, until the session is CLOSED.

    Args:
        broker: whose pools are used; a watch holds one connection of the blocking pool.
        session_id: a session that exists.
        from_start: begin with the oldest chunk that is still listed instead of the next one.

    A reset shows as a chunk with another `life` and index 0. A break of the connection is waited out: reading goes on
    behind the last chunk that was yielded.
    """
    guard = CancelGuard()
    key = broker.keys.session(session_id).chunks
    cursor = BEGINNING if from_start else await newest_id(broker.commands, key)
    if await _status(broker, session_id) is None:
        raise SessionNotFoundError(f"session {session_id} does not exist", field="session_id")
    block_ms = min(_IDLE_MS, broker.settings.block_ms)
    reconnection = Reconnection()
    ended = False
    while True:
        try:
            entries = await read_after(broker.blocking, key, cursor, block_ms=1 if ended else block_ms)
            guard.check()
            if not entries:
                if ended:
                    return
                # Looked up after an empty read, and read once more: no chunk comes after CLOSED.
                ended = await _status(broker, session_id) in (None, *TERMINAL)
                guard.check()
            reconnection.succeeded()
        except BrokerError as error:
            await reconnection.failed(error)
            continue
        for entry_id, fields in entries:
            cursor = entry_id
            yield _decode(key, fields)


async def _status(broker: Broker, session_id: str) -> Status | None:
    key = broker.keys.session(session_id).state
    with map_exceptions(key):
        text: Any = await broker.commands.hget(key, "status")
    if text is None:
        return None
    try:
        return Status(text.decode())
    except ValueError:
        raise CorruptDataError(f"session {session_id}: status is {text!r:.40}", field="status") from None


def _decode(key: str, fields: dict[bytes, bytes]) -> CommittedChunk:
    try:
        return CommittedChunk.from_entry(fields)
    except (KeyError, ValueError, TypeError, InvalidArgumentError) as error:
        raise CorruptDataError(f"{key}: an entry is no committed chunk: {error}", field=key) from error
