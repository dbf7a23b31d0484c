"""Runs the Lua files: the only door to them.

`ScriptRunner` loads a file, resolves its `-- include:` lines and runs it by its digest. Each Lua file has one typed
function: those of a session and its events in `session_scripts.py`, of a partition in `partition_scripts.py`, of a
worker in `worker_scripts.py`; `Scripts` here has the one that clients need.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from redis.exceptions import NoScriptError

from contracts.broker import Client, map_exceptions
from contracts.errors import (
    CorruptDataError,
    EventQueueFullError,
    EventStaleError,
    InvalidTypeError,
    SessionNotFoundError,
    SessionStateError,
)
from contracts.events import AcceptStatus, ARDiffusionEventReceipt, ARDiffusionSessionEvent
from contracts.identity import check_session_id
from contracts.keys import Keys

_LUA: Final = Path(__file__).parent / "lua"
_INCLUDE: Final = re.compile(r"^-- include: (\w+)$", re.MULTILINE)
_WRONG_TYPE: Final = re.compile(r"WRONGTYPE (\S+) (holds a \w+, not a \w+)")
"""What `include/types.lua` says of a key that holds another type."""

Argument = str | int | bytes


@cache
def script_source(name: str) -> str:
    """The source of `lua/<name>.lua` with its includes put in, once each."""
    text = (_LUA / f"{name}.lua").read_text()
    return _INCLUDE.sub(lambda match: (_LUA / "include" / f"{match[1]}.lua").read_text(), text)


@cache
def _digest(name: str) -> str:
    return hashlib.sha1(script_source(name).encode(), usedforsecurity=False).hexdigest()


class ScriptRunner:
    """Runs Lua files on one broker.

    Args:
        client: an asynchronous client that answers bytes.
        keys: the key builder.
    """

    def __init__(self, client: Client, keys: Keys) -> None:
        self.client = client
        self.keys = keys

    async def run(self, name: str, keys: Sequence[str], args: Sequence[Argument]) -> list[Any]:
        """The script's reply: a list whose first item is the outcome, as str.

        Raises BrokerError, BrokerFullError or CorruptDataError. Sending the same call again is safe for every script,
        because each compares before it writes.
        """
        try:
            with map_exceptions(name):
                reply = await self._evaluate(name, keys, args)
        except CorruptDataError as error:
            wrong = _WRONG_TYPE.search(error.message)
            if wrong is None:
                raise
            raise CorruptDataError(f"wrong type: {wrong[1]} {wrong[2]}", field=wrong[1]) from error
        return [reply[0].decode(), *reply[1:]]

    async def _evaluate(self, name: str, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        try:
            # Not the library's own method: two more calls on the way of every script.
            return await self.client.execute_command("EVALSHA", _digest(name), len(keys), *keys, *args)
        except NoScriptError:
            return await self.client.eval(script_source(name), len(keys), *keys, *args)


class Scripts(ScriptRunner):
    """What a client calls."""

    async def accept_event(self, session_id: str, event: ARDiffusionSessionEvent) -> ARDiffusionEventReceipt:
        """Adds one event to a session's queue.

        Raises SessionNotFoundError, SessionStateError (names the status), EventStaleError (names the floor) or
        EventQueueFullError.
        """
        check_session_id(session_id)
        if not isinstance(event, ARDiffusionSessionEvent):
            raise InvalidTypeError(
                f"an event is an ARDiffusionSessionEvent, got {type(event).__name__}", field="event"
            )
        keys = self.keys.session(session_id)
        fields = [part for pair in event.to_entry().items() for part in pair]
        outcome, *values = await self.run(
            "accept_event", (keys.state, keys.events, keys.ids), (event.event_id, *fields)
        )
        match outcome:
            case "ACCEPTED" | "DUPLICATE":
                return ARDiffusionEventReceipt(
                    session_id, event.event_id, AcceptStatus(outcome), int(values[0])
                )
            case "STALE":
                raise EventStaleError(
                    f"event {event.event_id} is stale: the event floor is {int(values[0])}", field="event_id"
                )
            case "QUEUE_FULL":
                raise EventQueueFullError(
                    f"the event queue is full ({int(values[0])} pending)", field="event"
                )
            case "NOT_ACTIVE":
                status = values[0].decode()
                raise SessionStateError(
                    f"session {session_id} is {status.lower()}, events need active", field="status"
                )
            case _:
                raise SessionNotFoundError(f"session {session_id} does not exist", field="session_id")
