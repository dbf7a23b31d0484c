"""What the janitor has to know of a session, read for many at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import structlog

from actors.broker_pool import Broker
from contracts.broker import map_exceptions
from contracts.creation import DEFAULT_MAX_PENDING_EVENTS
from contracts.errors import CorruptDataError, InvalidArgumentError
from contracts.identity import check_session_id, parse_index
from contracts.lifecycle import Status

_FIELDS: Final = (
    "status",
    "life",
    "created_at_ms",
    "updated_at_ms",
    "close_attempts",
    "max_pending_events",
    "presence_ms",
    "idle_ms",
    "inflight",
)


@dataclass(frozen=True, slots=True)
class Facts:
    """One session; `status` is None where there is no state.

    Args:
        failed_closes: how often its release has failed.
        flying: whether a request is in flight.
        pending_entries: length of its event stream.
    """

    session_id: str
    status: Status | None
    life: str = ""
    created_at_ms: int = 0
    updated_at_ms: int = 0
    failed_closes: int = 0
    max_pending_events: int = DEFAULT_MAX_PENDING_EVENTS
    presence_ms: int | None = None
    idle_ms: int | None = None
    flying: bool = False
    pending_entries: int = 0


async def read_facts(broker: Broker, session_ids: Iterable[str]) -> dict[str, Facts]:
    """Facts by session. A state that can't be read is left out: nothing is done about it but by people."""
    legal = [name for name in session_ids if _is_legal(name)]
    if not legal:
        return {}
    pipeline = broker.commands.pipeline(transaction=False)
    for session_id in legal:
        keys = broker.keys.session(session_id)
        pipeline.hmget(keys.state, _FIELDS)
        pipeline.xlen(keys.events)
    with map_exceptions("state"):
        replies = await pipeline.execute(raise_on_error=False)
    facts: dict[str, Facts] = {}
    for session_id, raw, length in zip(legal, replies[::2], replies[1::2], strict=True):
        try:
            facts[session_id] = _facts(session_id, raw, length)
        except (InvalidArgumentError, ValueError) as error:
            structlog.get_logger("janitor").warning(
                "state unreadable", session_id=session_id, error=str(error)
            )
    return facts


def _facts(session_id: str, raw: Any, length: Any) -> Facts:
    for reply in (raw, length):
        if isinstance(reply, Exception):
            raise CorruptDataError(str(reply), field="state")
    text = _texts(raw)
    if "status" not in text:
        return Facts(session_id, None)
    numbers = {name: parse_index(text[name], name) for name in text if name.endswith("_ms")}
    return Facts(
        session_id,
        Status(text["status"]),
        life=text.get("life", ""),
        failed_closes=parse_index(text.get("close_attempts", "0"), "close_attempts"),
        max_pending_events=parse_index(
            text.get("max_pending_events", str(DEFAULT_MAX_PENDING_EVENTS)), "max_pending_events"
        ),
        flying="inflight" in text,
        pending_entries=int(length),
        **numbers,
    )


def _texts(raw: Sequence[bytes | None]) -> dict[str, str]:
    pairs = zip(_FIELDS, raw, strict=True)
    return {name: value.decode() for name, value in pairs if value is not None}


def _is_legal(session_id: str) -> bool:
    try:
        check_session_id(session_id)
    except InvalidArgumentError:
        return False
    return True
