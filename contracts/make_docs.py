"""Writes `docs/session_states.md` from the lifecycle table.

python -m contracts.make_docs           write it
python -m contracts.make_docs --check   exit 1 if it is out of date
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from contracts.generated import ROOT, write_or_check
from contracts.lifecycle import TRANSITIONS, Status, Trigger, destination, mermaid

COMMAND: Final = "python -m contracts.make_docs"
PAGE: Final = ROOT / "docs" / "session_states.md"

STATES: Final[Mapping[Status, str]] = {
    Status.ACTIVE: "Takes events and generates chunks.",
    Status.FAILED: "A chunk or the worker's memory was lost; `failure_code` says why. Reset it or close it.",
    Status.CLOSING: "The worker is asked to release the session.",
    Status.CLOSED: "Released. The id is free, and the keys expire after the retention time.",
    Status.CLEANUP_FAILED: "A tombstone: the release failed and is tried again. The id stays taken until it succeeds.",
}

TRIGGERS: Final[Mapping[Trigger, str]] = {
    Trigger.CREATED: "a session is created; the id had none, or a closed one",
    Trigger.TICK_FAILED: "a chunk failed",
    Trigger.WORKER_LOST: "the worker that held the session is gone or has restarted",
    Trigger.EVICTED: "the worker dropped the session to make room",
    Trigger.RESET_SUCCEEDED: "the worker has reset: chunk 0, a new life",
    Trigger.RESET_FAILED: "the worker could not reset",
    Trigger.CLOSE_REQUESTED: "a close or disconnect begins, or is tried again",
    Trigger.CLEANUP_SUCCEEDED: "the worker has released the session",
    Trigger.CLEANUP_FAILED: "the worker could not release the session",
}

INTRODUCTION: Final = f"""\
# States of a session

Made from the table in `contracts/lifecycle.py` by `{COMMAND}`; edit that, not this page.

A running tick or reset is not a state: it is the session's `inflight` record. Anything that the table does not list is
refused with an error that names the state.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, _diagram(), _states(), _transitions(), _matrix()])


def _diagram() -> str:
    return f"```mermaid\n{mermaid()}```\n"


def _states() -> str:
    rows = [f"| `{state}` | {STATES[state]} |" for state in Status]
    return _section("States", ["| state | means |", "| --- | --- |", *rows])


def _transitions() -> str:
    rows = [
        f"| `{row.trigger}` | {', '.join(map(_code, row.sources))} | `{row.dest}` | {TRIGGERS[row.trigger]} |"
        for row in TRANSITIONS
    ]
    return _section("Transitions", ["| trigger | from | to | when |", "| --- | --- | --- | --- |", *rows])


def _matrix() -> str:
    head = ["| trigger | " + " | ".join(map(_code, Status)) + " |", "| --- |" + " --- |" * len(Status)]
    rows = [
        f"| `{trigger}` | " + " | ".join(_cell(trigger, state) for state in Status) + " |"
        for trigger in Trigger
    ]
    return _section("Every trigger in every state", ["Empty: refused.", "", *head, *rows])


def _cell(trigger: Trigger, state: Status) -> str:
    to = destination(trigger, state)
    return "" if to is None else _code(to)


def _code(word: str) -> str:
    return f"`{word}`"


def _section(title: str, lines: Sequence[str]) -> str:
    return "\n".join([f"## {title}", "", *lines, ""])


def main(arguments: Sequence[str], path: Path = PAGE) -> int:
    """Writes or checks; the exit status."""
    return write_or_check({path: page()}, arguments, COMMAND)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
