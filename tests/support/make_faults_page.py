"""Writes `docs/faults.md` from the list of failpoints and the table of what is expected there.

python -m tests.support.make_faults_page           write it
python -m tests.support.make_faults_page --check   exit 1 if it is out of date
"""

import sys
from collections.abc import Sequence
from pathlib import Path

# The tests import each other without their folder's name, and so must what is run beside them.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from contracts.failpoints import POINTS
from contracts.generated import ROOT, write_or_check
from support.fault_table import ACTIONS, MEANINGS, rows

COMMAND = "python -m tests.support.make_faults_page"
PAGE = ROOT / "docs" / "faults.md"

INTRODUCTION = f"""\
# Faults

Made from the failpoints in `contracts/failpoints.py` and the table in `tests/support/fault_table.py` by `{COMMAND}`;
edit those, not this page.

A failpoint is a named place in the code of host or worker. They are off, unless `WORLDLINE_FAILPOINTS` arms them:
`host.commit.after=exit@2` ends the process at the second passage of one. Each line below is tried on real processes and
a real broker: a session has one chunk and an event that waits, the operation is sent, and the process that passes the
place meets its fault. Afterwards each chunk was made and committed once, each event has had one fate, each command one
answer, the invariants hold (`worldline fsck`), a reset brings a FAILED session back, and the session closes.
`make test` tries each failpoint once, `make soak` every line.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, *_faults(), *_outcomes(), *_table()])


def _faults() -> list[str]:
    return [
        "## The faults",
        "",
        "| fault | what happens |",
        "| --- | --- |",
        *(f"| {action} | {what} |" for action, what in ACTIONS.items()),
        "",
    ]


def _outcomes() -> list[str]:
    return [
        "## The outcomes",
        "",
        "| outcome | means |",
        "| --- | --- |",
        *(f"| {outcome} | {text} |" for outcome, text in MEANINGS.items()),
        "",
        "Done is, for a failing tick (the model raises), that it is answered `model_error` and the session is FAILED.",
        "",
    ]


def _table() -> list[str]:
    when = {point.name: point.when for point in POINTS}
    head = ["failpoint", "when", "operation", *ACTIONS]
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    for point, op, outcomes in rows():
        lines.append(f"| `{point}` | {when[point]} | {op} | {' | '.join(outcomes.values())} |")
    return ["## Every failpoint", "", *lines, ""]


def main(arguments: Sequence[str], path: Path = PAGE) -> int:
    """Writes or checks; the exit status."""
    return write_or_check({path: page()}, arguments, COMMAND)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
