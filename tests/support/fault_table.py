"""What is expected at each failpoint: the data of the fault matrix and of `docs/faults.md`."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from contracts.failpoints import POINTS, Action


class Op(StrEnum):
    """What a client asks for when the fault comes."""

    TICK = "tick"
    FAILING_TICK = "failing tick"
    RESET = "reset"
    CLOSE = "close"


class Outcome(StrEnum):
    """How it ends, for the client and for the session."""

    DONE = "done"
    DONE_THEN_LOST = "done, then lost"
    RESTARTED = "worker_restarted"
    LOST = "worker_lost"


MEANINGS = {
    Outcome.DONE: "The command is answered once, as without the fault, and its effect is there once.",
    Outcome.DONE_THEN_LOST: "As `done`; but the worker's memory went with the fault, so that the session is FAILED "
    "(`worker_lost`) afterwards.",
    Outcome.RESTARTED: "The command is answered `worker_restarted` and the session is FAILED: its chunk may have run "
    "halfway and is never run again.",
    Outcome.LOST: "The command is answered `worker_lost` and the session is FAILED: no other worker can take it.",
}

ACTIONS = {
    Action.EXIT: "the process ends at once, and is started again (a worker) or another takes over (a host)",
    Action.RAISE: "an exception that nobody foresaw; a worker ends of it, and is started again",
    Action.STOP: "the process stops for longer than its lease (a host) or than it may be silent (a worker), then goes on",
}

_EVERY = (Op.TICK, Op.RESET, Op.CLOSE)
_DONE = (Outcome.DONE, Outcome.DONE, Outcome.DONE)
_NEVER_RUN_AGAIN = (Outcome.RESTARTED, Outcome.RESTARTED, Outcome.LOST)
_COMES_TRUE = (Outcome.DONE, Outcome.DONE, Outcome.LOST)
_MEMORY_GONE = (Outcome.DONE_THEN_LOST, Outcome.DONE_THEN_LOST, Outcome.DONE_THEN_LOST)
_NOTHING_TO_LOSE = (Outcome.DONE, Outcome.DONE, Outcome.DONE_THEN_LOST)

# Failpoint, the operations that pass it, and the outcomes in the order of ACTIONS.
_TABLE: tuple[tuple[str, tuple[Op, ...], tuple[Outcome, Outcome, Outcome]], ...] = (
    ("host.adopt.before", _EVERY, _DONE),
    ("host.adopt.after", _EVERY, _DONE),
    ("host.command.read", _EVERY, _DONE),
    ("host.begin.before", (Op.TICK,), _DONE),
    ("host.begin.after", (Op.TICK,), _DONE),
    ("host.reply.read", _EVERY, _DONE),
    ("host.reduce.before", (Op.TICK,), _DONE),
    ("host.reduce.after", (Op.TICK,), _DONE),
    ("host.commit.before", (Op.TICK,), _DONE),
    ("host.commit.after", (Op.TICK,), _DONE),
    ("host.fail.before", (Op.FAILING_TICK,), _DONE),
    ("host.fail.after", (Op.FAILING_TICK,), _DONE),
    ("host.reset.begin.before", (Op.RESET,), _DONE),
    ("host.reset.begin.after", (Op.RESET,), _DONE),
    ("host.reset.finish.before", (Op.RESET,), _DONE),
    ("host.reset.finish.after", (Op.RESET,), _DONE),
    ("host.close.begin.before", (Op.CLOSE,), _DONE),
    ("host.close.begin.after", (Op.CLOSE,), _DONE),
    ("host.close.finish.before", (Op.CLOSE,), _DONE),
    ("host.close.finish.after", (Op.CLOSE,), _DONE),
    ("host.entry.before", _EVERY, _DONE),
    ("host.entry.after", _EVERY, _DONE),
    ("host.resend.before", _EVERY, _DONE),
    ("host.resend.after", _EVERY, _DONE),
    ("worker.request.read", (Op.TICK,), _NEVER_RUN_AGAIN),
    ("worker.request.read", (Op.RESET,), _COMES_TRUE),
    ("worker.request.read", (Op.CLOSE,), _DONE),
    ("worker.run.before", (Op.TICK,), _NEVER_RUN_AGAIN),
    ("worker.run.after", (Op.TICK,), _NEVER_RUN_AGAIN),
    ("worker.payload.stored", (Op.TICK,), _NEVER_RUN_AGAIN),
    ("worker.reply.before", (Op.TICK,), _NEVER_RUN_AGAIN),
    ("worker.reply.before", (Op.RESET,), _COMES_TRUE),
    ("worker.reply.before", (Op.CLOSE,), _DONE),
    ("worker.reply.after", (Op.TICK,), _MEMORY_GONE),
    ("worker.reply.after", (Op.RESET,), _NOTHING_TO_LOSE),
    ("worker.reply.after", (Op.CLOSE,), _DONE),
    ("worker.ack.before", (Op.TICK,), _MEMORY_GONE),
    ("worker.ack.before", (Op.RESET,), _NOTHING_TO_LOSE),
    ("worker.ack.before", (Op.CLOSE,), _DONE),
    ("worker.ack.after", (Op.TICK,), _MEMORY_GONE),
    ("worker.ack.after", (Op.RESET,), _NOTHING_TO_LOSE),
    ("worker.ack.after", (Op.CLOSE,), _DONE),
    ("worker.reset.before", (Op.RESET,), _COMES_TRUE),
    ("worker.reset.after", (Op.RESET,), _COMES_TRUE),
    ("worker.release.before", (Op.CLOSE,), _DONE),
    ("worker.release.after", (Op.CLOSE,), _DONE),
)

_USUAL = {
    Op.TICK: "ok, ACTIVE",
    Op.FAILING_TICK: "model_error, FAILED model_error",
    Op.RESET: "ok, ACTIVE",
    Op.CLOSE: "ok, CLOSED",
}


@dataclass(frozen=True)
class Cell:
    """One thing that is tried: a fault at a place, during an operation."""

    point: str
    action: Action
    op: Op
    outcome: Outcome

    @property
    def process(self) -> str:
        return self.point.partition(".")[0]

    @property
    def id(self) -> str:
        return f"{self.point}-{self.action}-{self.op}".replace(" ", "_")

    @property
    def expected(self) -> str:
        """What the client is told and what the session is, as a trial says it."""
        match self.outcome:
            case Outcome.DONE:
                return _USUAL[self.op]
            case Outcome.DONE_THEN_LOST:
                return "ok, FAILED worker_lost"
            case failure:
                return f"{failure}, FAILED {failure}"


def rows() -> Iterator[tuple[str, Op, dict[Action, Outcome]]]:
    """Failpoint, operation, and the outcome of each action."""
    for point, ops, outcomes in _TABLE:
        for op in ops:
            yield point, op, dict(zip(ACTIONS, outcomes, strict=True))


def cells() -> tuple[Cell, ...]:
    """The whole matrix."""
    return tuple(
        Cell(point, action, op, outcome) for point, op, row in rows() for action, outcome in row.items()
    )


def one_cell_a_point(process: str) -> list[Cell]:
    """Each failpoint of a process once; actions and operations take turns."""
    chosen = []
    for number, point in enumerate(point for point in POINTS if point.process == process):
        of_point = [cell for cell in cells() if cell.point == point.name]
        of_action = [cell for cell in of_point if cell.action is list(ACTIONS)[number % len(ACTIONS)]]
        chosen.append(of_action[number // len(ACTIONS) % len(of_action)])
    return chosen
