"""Tombstones as people see them, and their retry at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from actors.broker_pool import Broker
from actors.calls import call
from actors.index_pages import index_pages
from actors.store import ENDING
from contracts.broker import map_exceptions
from contracts.commands import Command, Op
from contracts.errors import SessionNotFoundError, SessionStateError, WorldlineError
from contracts.identity import check_session_id
from contracts.lifecycle import Status
from contracts.state import SessionState

_AT_ONCE: Final = 16
DEFAULT_REASON: Final = "retried by hand"


@dataclass(frozen=True, slots=True)
class Tombstone:
    """A session whose release failed.

    Args:
        failures: how often.
        due_ms: broker time of the janitor's next retry; None where no retry is due.
        since_ms: broker time of the last failure.
        error: what the worker said last.
    """

    session_id: str
    life: str
    failures: int
    due_ms: int | None
    since_ms: int | None
    worker: str | None
    error: str | None

    def to_dict(self) -> dict[str, object]:
        """The form that `--json` prints."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True, slots=True)
class Retried:
    """What became of one retry: CLOSED, or the error."""

    session_id: str
    error: WorldlineError | None = None

    def to_dict(self) -> dict[str, object]:
        """The form that `--json` prints."""
        status = Status.CLOSED if self.error is None else None
        return {
            "session_id": self.session_id,
            "ok": self.error is None,
            "status": status,
            "error": None if self.error is None else self.error.to_dict(),
        }


async def list_tombstones(broker: Broker) -> AsyncIterator[Tombstone]:
    """Every tombstone; those whose retry is due soonest come first."""
    seen: set[str] = set()
    for index in (broker.keys.tombstones, broker.keys.index(Status.CLEANUP_FAILED)):
        async for page in index_pages(broker.commands, index):
            for session_id, score in page:
                if session_id in seen:
                    continue
                seen.add(session_id)
                due_ms = round(score) if index == broker.keys.tombstones else None
                state = await _state(broker, session_id)
                if state is not None and state.status is Status.CLEANUP_FAILED:
                    yield _tombstone(state, due_ms)


async def find_tombstone(broker: Broker, session_id: str) -> Tombstone:
    """One tombstone, or a session whose close is running; SessionNotFoundError, or SessionStateError for any other."""
    state = await _state(broker, check_session_id(session_id))
    if state is None:
        raise SessionNotFoundError(f"session {session_id} does not exist", field="session_id")
    if state.status not in ENDING:
        raise SessionStateError(
            f"session {session_id} is {state.status.lower()}, a retry needs cleanup_failed", field="status"
        )
    with map_exceptions(broker.keys.tombstones):
        score: Any = await broker.commands.zscore(broker.keys.tombstones, session_id)
    return _tombstone(state, None if score is None else round(score))


async def retry_tombstones(
    broker: Broker, tombstones: Iterable[Tombstone], *, reason: str, timeout_s: float
) -> list[Retried]:
    """Closes that life of each of them and waits for the answers; a close that runs already is joined."""
    slots = asyncio.Semaphore(_AT_ONCE)

    async def retry(tombstone: Tombstone) -> Retried:
        args = {"life": tombstone.life, "reason": reason}
        command = Command(Op.CLOSE, tombstone.session_id, args=args)
        async with slots:
            try:
                await call(broker, command, timeout_s)
            except WorldlineError as error:
                return Retried(tombstone.session_id, error)
        return Retried(tombstone.session_id)

    return list(await asyncio.gather(*(retry(tombstone) for tombstone in tombstones)))


def all_failed_alike(results: Sequence[Retried], kind: type[WorldlineError]) -> WorldlineError | None:
    """The error of the first, if each of them failed with one of that kind."""
    errors = [result.error for result in results if isinstance(result.error, kind)]
    return errors[0] if results and len(errors) == len(results) else None


async def _state(broker: Broker, session_id: str) -> SessionState | None:
    key = broker.keys.session(session_id).state
    with map_exceptions(key):
        raw: Any = await broker.commands.hgetall(key)
    return SessionState.from_hash(session_id, raw)


def _tombstone(state: SessionState, due_ms: int | None) -> Tombstone:
    return Tombstone(
        state.session_id,
        state.life,
        state.close_attempts,
        due_ms,
        state.updated_at_ms,
        state.worker,
        state.cleanup_error,
    )
