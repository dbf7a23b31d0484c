"""One cell of the fault matrix: a failpoint, what happens there, and the operation that passes it.

Each cell has a broker of its own as far as it can see (a prefix), a host, a second one that waits to take over, and a
worker. The operation is sent, the armed process meets its fault, is started again or goes on, and then everything is
looked at: what the client was told, what the session is, whether each chunk was made once, whether life goes on.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from actors.fsck import check_all
from contracts.errors import WorldlineError
from contracts.events import ARDiffusionSessionEvent
from contracts.failpoints import EXIT_STATUS, Action
from contracts.lifecycle import Status
from contracts.state import SessionState
from support.fault_table import Cell, Op
from support.forked_stack import LEASE_MS, PATIENCE_S, WORKER_LOST_AFTER_MS, Stack, digest_of, ready, until
from support.forker import Forker, is_stopped
from support.processes import Process

SEED = 11
STOPPED_S = {"host": 1.5 * LEASE_MS / 1000, "worker": 1.3 * WORKER_LOST_AFTER_MS / 1000}
"""Longer than a lease; longer than a worker may be silent."""

CELLS_AT_ONCE = 6


@dataclass
class Result:
    """What was seen: `outcome` as the table has it, and everything that is wrong beside it."""

    outcome: str = ""
    wrong: list[str] = field(default_factory=list)
    logs: str = ""

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            self.wrong.append(what)


def run_cells(cells: Sequence[Cell], logs: Path, url: str) -> dict[Cell, Result]:
    """Runs cells side by side; whatever goes wrong stands in their results."""

    async def run(forker: Forker) -> dict[Cell, Result]:
        slots = asyncio.Semaphore(CELLS_AT_ONCE)

        async def one(number: int, cell: Cell) -> Result:
            async with slots:
                return await run_cell(cell, forker, url, number)

        results = await asyncio.gather(*(one(number, cell) for number, cell in enumerate(cells)))
        return dict(zip(cells, results, strict=True))

    with Forker(logs) as forker:
        return asyncio.run(run(forker))


async def run_cell(cell: Cell, forker: Forker, url: str, number: int) -> Result:
    """Runs a cell. Whatever goes wrong stands in the result."""
    stack = Stack(forker, url, f"f{number}", WORLDLINE_PARTITIONS="1", WORLDLINE_WATCHDOG="false")
    result = Result()
    try:
        async with asyncio.timeout(2 * PATIENCE_S):
            await _Trial(cell, stack, result).run()
    except Exception as error:  # noqa: BLE001 - the cell that failed must not hide the others
        result.wrong.append(f"{type(error).__name__}: {error}")
    finally:
        await stack.end()
    result.logs = stack.report()
    return result


class _Trial:
    def __init__(self, cell: Cell, stack: Stack, result: Result) -> None:
        self.cell = cell
        self.stack = stack
        self.result = result
        self.session = stack.session("world")

    async def run(self) -> None:
        cell, stack = self.cell, self.stack
        worker = stack.worker(
            f"{cell.point}={cell.action}@{self._passage()}" if cell.process == "worker" else ""
        )
        first = stack.host("first")
        await ready(worker)
        await self._begin()
        if cell.process == "worker":
            operation = asyncio.create_task(self._operate())
            await self._suffer(worker)
        elif cell.point.startswith("host.resend"):
            worker.pause()
            operation = asyncio.create_task(self._operate())
            await until(self._in_flight, "something is in flight")
            victim = await self._replace(first)
            await self._suffer(victim, while_stopped=worker)
        else:
            victim = await self._replace(first)
            operation = asyncio.create_task(self._operate())
            await self._suffer(victim)
        answer = await operation
        state = await self._quiet()
        code = f" {state.failure_code}" if state.failure_code else ""
        self.result.outcome = f"{answer}, {state.status}{code}"
        await self._check_streams()
        await self._live_on(state)
        findings = await check_all(stack.broker)
        self.result.check(not findings, f"fsck: {findings}")

    def _passage(self) -> int:
        """The chunk of the beginning passes what every request and every tick passes."""
        return 1 if self.cell.point.startswith(("worker.reset", "worker.release")) else 2

    async def _begin(self) -> None:
        """A session with one chunk and an event that waits."""
        params = {"fail_at": 1} if self.cell.op is Op.FAILING_TICK else {}
        await self.session.create(model="noop", seed=SEED, params=params)
        await self.session.accept_event(ARDiffusionSessionEvent(0, prompt="begin"))
        await self.session.next_chunk()
        await self.session.accept_event(ARDiffusionSessionEvent(1, prompt="go on"))
        await until(self._inbox_empty, "the inbox is empty")

    async def _replace(self, first: Process) -> Process:
        """The first host hands over to the armed one; another stands by."""
        assert await asyncio.to_thread(first.stop) == 0
        victim = self.stack.host("victim", f"{self.cell.point}={self.cell.action}")
        await ready(victim, or_fault=True)
        self.stack.host("standby")
        return victim

    async def _operate(self) -> str:
        """Sends the operation; what the client is told."""
        call = {
            Op.TICK: self.session.next_chunk,
            Op.FAILING_TICK: self.session.next_chunk,
            Op.RESET: self.session.reset,
            Op.CLOSE: self.session.close,
        }[self.cell.op]
        try:
            await call()
        except WorldlineError as error:
            return error.code
        return "ok"

    async def _suffer(self, process: Process, while_stopped: Process | None = None) -> None:
        """Waits for the fault and lets it take its course."""
        fault = rf"^failpoint {self.cell.point}: {self.cell.action}$"
        await asyncio.to_thread(process.wait_for_line, fault, stream="stderr", timeout=PATIENCE_S)
        if self.cell.action is Action.STOP:
            await until(lambda: is_stopped(process), "the process has stopped")
            if while_stopped is not None:
                while_stopped.resume()
            await asyncio.sleep(STOPPED_S[self.cell.process])
            process.resume()
            return
        if while_stopped is not None:
            while_stopped.resume()
        if self.cell.action is Action.EXIT:
            assert await asyncio.to_thread(process.wait) == EXIT_STATUS
        elif self.cell.process == "worker":
            assert await asyncio.to_thread(process.wait) == 1  # a defect ends it
        if self.cell.process == "worker":
            await ready(self.stack.worker())

    # -- afterwards --------------------------------------------------------------------------------------------

    async def _quiet(self) -> SessionState:
        """Nothing is unfinished, twice in a row."""
        for _ in range(2):
            await until(self._inbox_empty, "the inbox is empty")
            await until(self._settled, "nothing is in flight")
            await asyncio.sleep(0.4)
        return await self.session.state()

    async def _in_flight(self) -> bool:
        return (await self.session.state()).inflight is not None

    async def _settled(self) -> bool:
        return not await self._in_flight()

    async def _inbox_empty(self) -> bool:
        return await self.stack.broker.commands.xlen(self.stack.broker.keys.partition(0).inbox) == 0

    async def _check_streams(self) -> None:
        """Chunks follow each other, each command has one answer, each event one fate."""
        check = self.result.check
        chunks = await self.stack.read("world", "chunks")
        expected: dict[str, int] = {}
        for chunk in chunks:
            index = expected.get(chunk["life"], 0)
            check(int(chunk["chunk_index"]) == index, f"chunk {chunk['chunk_index']} where {index} is due")
            expected[chunk["life"]] = index + 1
        applied = [i for chunk in chunks for i in json.loads(chunk["applied_event_ids"])]
        check(applied == sorted(set(applied)), f"events applied: {applied}")
        dropped = [int(entry["event_id"]) for entry in await self.stack.read("world", "rejected")]
        check(
            len({*applied, *dropped}) == len(applied) + len(dropped), f"applied {applied}, dropped {dropped}"
        )
        commands = [
            json.loads(entry["answer"])["command_id"] for entry in await self.stack.read("world", "answers")
        ]
        check(len(commands) == len(set(commands)), f"answers to {commands}")

    async def _live_on(self, state: SessionState) -> None:
        """A reset brings a failed session back, an active one goes on, a closed one leaves its id free."""
        session = self.session
        if state.status is Status.CLOSED:
            await session.create(model="noop", seed=SEED)
        elif state.status is Status.FAILED:
            await session.reset()
        index = state.chunk_index if state.status is Status.ACTIVE else 0
        chunk = await session.next_chunk()
        self.result.check(chunk.chunk_index == index, f"chunk {chunk.chunk_index} follows, not {index}")
        ticks = [tick for tick in await self.stack.read("world", "ticks") if tick["life"] == chunk.life]
        # The worker's memory of this life has seen each committed tick once, and nothing else.
        follows = digest_of(ticks, SEED) in await session.read(chunk.payload)
        self.result.check(follows, "the chunk does not follow from the committed ticks")
        self.result.check(await session.close() is Status.CLOSED, "the session does not close")
        await until(self._inbox_empty, "the inbox is empty")
