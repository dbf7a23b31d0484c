"""The lifecycle of a session: five states and one table.

A running tick or reset is not a state; it is the session's `inflight` record. `actors/fsm.py` builds its machine
from TRANSITIONS, and the diagram in the docs is printed from it, so this table is the only place where a transition
is written down.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple


class Status(StrEnum):
    """Where a session is in its life; stored in upper case."""

    ACTIVE = "ACTIVE"
    FAILED = "FAILED"
    CLOSING = "CLOSING"
    CLOSED = "CLOSED"
    CLEANUP_FAILED = "CLEANUP_FAILED"


class Trigger(StrEnum):
    """What moves a session from one state to another."""

    CREATED = "created"
    TICK_FAILED = "tick_failed"
    WORKER_LOST = "worker_lost"
    EVICTED = "evicted"
    RESET_SUCCEEDED = "reset_succeeded"
    RESET_FAILED = "reset_failed"
    CLOSE_REQUESTED = "close_requested"
    CLEANUP_SUCCEEDED = "cleanup_succeeded"
    CLEANUP_FAILED = "cleanup_failed"


class Transition(NamedTuple):
    """One row of the table."""

    trigger: Trigger
    sources: tuple[Status, ...]
    dest: Status


_RUNNABLE: Final = (Status.ACTIVE, Status.FAILED)

TRANSITIONS: Final[tuple[Transition, ...]] = (
    Transition(Trigger.CREATED, (Status.CLOSED,), Status.ACTIVE),
    Transition(Trigger.TICK_FAILED, (Status.ACTIVE,), Status.FAILED),
    Transition(Trigger.WORKER_LOST, (Status.ACTIVE,), Status.FAILED),
    Transition(Trigger.EVICTED, (Status.ACTIVE,), Status.FAILED),
    Transition(Trigger.RESET_SUCCEEDED, _RUNNABLE, Status.ACTIVE),
    Transition(Trigger.RESET_FAILED, _RUNNABLE, Status.FAILED),
    Transition(Trigger.CLOSE_REQUESTED, (*_RUNNABLE, Status.CLEANUP_FAILED), Status.CLOSING),
    Transition(Trigger.CLEANUP_SUCCEEDED, (Status.CLOSING,), Status.CLOSED),
    Transition(Trigger.CLEANUP_FAILED, (Status.CLOSING,), Status.CLEANUP_FAILED),
)

INITIAL: Final = Status.CLOSED
"""A session that does not exist stands where a closed one stands."""

LIVE: Final = frozenset({Status.ACTIVE, Status.FAILED})
"""States in which a session can be reset."""

TERMINAL: Final = frozenset({Status.CLOSED})

_TABLE: Final = {(row.trigger, source): row.dest for row in TRANSITIONS for source in row.sources}


def destination(trigger: Trigger, source: Status) -> Status | None:
    """Where `trigger` leads from `source`, or None where it is illegal."""
    return _TABLE.get((trigger, source))


def mermaid() -> str:
    """The state diagram, for the docs."""
    lines = ["stateDiagram-v2", "    [*] --> ACTIVE: created"]
    for row in TRANSITIONS:
        lines += [f"    {source} --> {row.dest}: {row.trigger}" for source in row.sources]
    return "\n".join(lines) + "\n"
