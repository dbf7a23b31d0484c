"""What a session has been through: its lifecycle transitions, with who and why."""

from __future__ import annotations

from typing import Any

from actors.broker_pool import Broker
from contracts.broker import map_exceptions
from contracts.errors import SessionNotFoundError
from contracts.identity import check_session_id
from contracts.session_scripts import parse_entries


async def read_history(broker: Broker, session_id: str, *, limit: int | None = None) -> list[dict[str, Any]]:
    """The transitions, oldest first, the last `limit` of them. SessionNotFoundError where there is no trace of one."""
    key = broker.keys.session(check_session_id(session_id)).history
    with map_exceptions(key):
        raw: Any = await broker.commands.xrevrange(key, count=limit)
    if not raw:
        raise SessionNotFoundError(f"there is no history of session {session_id}", field="session_id")
    return [_line(fields) for _, fields in reversed(parse_entries(raw))]


def _line(fields: dict[bytes, bytes]) -> dict[str, Any]:
    line: dict[str, Any] = {name.decode(): value.decode(errors="replace") for name, value in fields.items()}
    at_ms = str(line.get("at_ms", ""))
    return line | {"at_ms": int(at_ms) if at_ms.isdigit() else None}
