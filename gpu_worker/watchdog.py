"""The watchdog of one worker: a small process beside it that ends it when a request takes longer than it may.

A pipeline that hangs in a blocking call can't be interrupted from inside. So this process looks, over a connection of
its own, at what the worker has in hand. Past the execution limit it answers that tick `execution_timeout` in the
worker's stead, kills the worker and ends; whoever supervises the worker starts it again. A reset or release that hangs
is left to that next start, for which it has come true.

It is started by the worker, which writes the `Assignment` to its standard input, and ends with the worker. A worker
that is process 1 of a container can't be killed from inside: give the container an init process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Final

import orjson
import structlog

from contracts.broker import command_client
from contracts.errors import BrokerError, InvalidArgumentError, TickFailedError, WorldlineError
from contracts.keys import Keys
from contracts.logs import configure_logging
from contracts.messages import Kind, WorkerReply, WorkerRequest
from contracts.watchdog_scripts import InHand, TimeOut, WatchdogScripts

COMMAND_TIMEOUT_S: Final = 2.0
LATE_S: Final = 1.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Assignment:
    """What the worker tells its watchdog.

    Args:
        url, prefix: of the broker.
        worker_id, incarnation: the start of a worker that is watched.
        limit_ms: longest that a request may be in hand, counted from `busy_since` by the broker's clock.
        grace_ms: after a time without sight of the broker, nothing is ended for so long: the worker, too, could not
            send what it had finished.
        poll_ms: how often it looks.
        log_level, log_format: as the worker's.
    """

    url: str
    prefix: str
    worker_id: str
    incarnation: str
    limit_ms: int
    grace_ms: int
    poll_ms: int
    log_level: str
    log_format: str

    def to_json(self) -> bytes:
        return orjson.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> Assignment:
        return cls(**orjson.loads(text))


class Patience:
    """Judges whether what is in hand has taken too long. Pure: no broker, no signals.

    The mark `busy_since` disappears with the worker's info when its heartbeats stop, for instance because the call that
    hangs lets nothing else run. So what was seen of a request once is remembered.
    """

    def __init__(self, assignment: Assignment, clock: Callable[[], float] = time.monotonic) -> None:
        self._assignment = assignment
        self._clock = clock
        self._looked_s = clock()
        self._not_before_s = float("-inf")
        self._entry_id: str | None = None
        self._since_ms: int | None = None

    def blind(self) -> None:
        """The broker did not answer."""
        self._not_before_s = self._clock() + self._assignment.grace_ms / 1000

    def overdue(self, seen: InHand) -> bool:
        """Whether the worker has to be ended for what was seen in its hand."""
        now_s = self._clock()
        if now_s - self._looked_s > self._assignment.poll_ms / 1000 + LATE_S:
            self.blind()  # the broker was slow, or this process did not run: the same may hold for the worker
        self._looked_s = now_s
        if seen.holder == self._assignment.incarnation and seen.busy_since_ms is not None:
            self._since_ms = seen.busy_since_ms
        elif seen.entry_id != self._entry_id:
            self._since_ms = None
        self._entry_id = seen.entry_id
        if seen.entry_id is None or self._since_ms is None or now_s < self._not_before_s:
            return False
        return seen.now_ms - self._since_ms > self._assignment.limit_ms


class Watchdog:
    """Looks until the worker is gone, or has to go.

    Args:
        assignment: whom to watch.
        kill: ends the worker.
    """

    def __init__(self, assignment: Assignment, kill: Callable[[], None]) -> None:
        self._assignment = assignment
        self._kill = kill
        self._patience = Patience(assignment)
        self._overdue: str | None = None
        self._tried = False
        self._client = command_client(assignment.url, timeout_s=COMMAND_TIMEOUT_S)
        self._scripts = WatchdogScripts(self._client, Keys(assignment.prefix))

    async def run(self, gone: asyncio.Event) -> bool:
        """Watches until `gone` is set; whether it has ended the worker."""
        try:
            while not gone.is_set():
                if await self._look():
                    return True
                await _wait(gone, self._assignment.poll_ms / 1000)
            return False
        finally:
            await self._client.aclose()

    async def _look(self) -> bool:
        try:
            if self._overdue is None:
                seen = await self._scripts.in_hand(self._assignment.worker_id)
                if not self._patience.overdue(seen):
                    return False
                self._overdue = seen.entry_id
            return self._overdue is not None and await self._end(self._overdue)
        except BrokerError:
            self._patience.blind()
        except WorldlineError as error:
            log.warning("the worker can't be watched", error=error.message)
        return False

    async def _end(self, entry_id: str) -> bool:
        """Answers what is in hand and kills the worker; False if it has just answered by itself."""
        worker_id, incarnation = self._assignment.worker_id, self._assignment.incarnation
        answer = self._answer(await self._scripts.entry(worker_id, entry_id))
        tried, self._tried = self._tried, True
        outcome = await self._scripts.time_out(worker_id, incarnation, entry_id, answer)
        if outcome is TimeOut.ANSWERED and not tried:
            self._overdue, self._tried = None, False
            return False
        # Answered at the second try it was by the first, of which nothing was heard.
        log.error("a request took too long, the worker is killed", worker=worker_id, entry_id=entry_id)
        self._kill()
        return True

    def _answer(self, fields: dict[bytes, bytes]) -> tuple[str, str] | None:
        try:
            request = WorkerRequest.from_entry(fields)
        except InvalidArgumentError:
            return None
        if request.kind is not Kind.TICK:
            return None
        error = TickFailedError(
            f"the tick took longer than {self._assignment.limit_ms} ms", code="execution_timeout"
        )
        reply = WorkerReply(
            request.session_id, request.request_id, request.fence, request.life,
            self._assignment.incarnation, error=error, executed_ms=self._assignment.limit_ms,
        )  # fmt: skip
        return request.reply_to, reply.to_json()


async def _wait(gone: asyncio.Event, timeout_s: float) -> None:
    try:
        await asyncio.wait_for(gone.wait(), timeout_s)
    except TimeoutError:
        return


async def watch(assignment: Assignment, parent: int) -> None:
    """Watches the parent process. The end of standard input is the end of the worker, which alone holds its other end."""
    gone = asyncio.Event()

    def read() -> None:
        if not os.read(0, 1024):
            gone.set()

    def kill() -> None:
        # A worker that is gone has handed its child, this process, to another parent.
        if os.getppid() == parent:
            os.kill(parent, signal.SIGKILL)

    asyncio.get_running_loop().add_reader(0, read)
    await Watchdog(assignment, kill).run(gone)


def main() -> None:
    """Reads the assignment, a line, from standard input."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # They are meant for the worker, which may take its time with what it has in hand.
        signal.signal(number, signal.SIG_IGN)
    parent = os.getppid()
    line = _read_line()
    if not line:
        return
    assignment = Assignment.from_json(line)
    configure_logging(assignment.log_level, assignment.log_format)
    asyncio.run(watch(assignment, parent))


def _read_line() -> bytes:
    """The first line, from the descriptor itself: a buffer would hold back what follows."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return b""
        line += byte
    return line


if __name__ == "__main__":
    main()
