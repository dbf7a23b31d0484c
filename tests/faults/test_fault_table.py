"""The table of faults: complete, true about who passes what, and printed."""

from pathlib import Path

import pytest
import redis.asyncio

from contracts import failpoints
from contracts.failpoints import POINTS, Action
from support.broker import RealBroker
from support.fault_table import ACTIONS, MEANINGS, Op, Outcome, cells, one_cell_a_point, rows
from support.hosting import Caller, running_host
from support.make_faults_page import main
from support.worker_runner import WorkerRunner


def test_every_failpoint_has_a_line_and_every_line_a_failpoint() -> None:
    assert {point for point, _, _ in rows()} == {point.name for point in POINTS}
    lines = [(point, op) for point, op, _ in rows()]
    assert len(lines) == len(set(lines))
    assert set(ACTIONS) == set(Action) - {Action.HANG}
    assert set(MEANINGS) == set(Outcome)


@pytest.mark.parametrize("process", ["host", "worker"])
def test_each_failpoint_is_tried_once_and_no_fault_or_operation_is_left_out(process: str) -> None:
    chosen = one_cell_a_point(process)

    assert [cell.point for cell in chosen] == [point.name for point in POINTS if point.process == process]
    assert {cell.action for cell in chosen} == set(ACTIONS)
    assert {cell.op for cell in chosen} >= {Op.TICK, Op.RESET, Op.CLOSE}
    assert set(chosen) <= set(cells())


@pytest.mark.parametrize("op", Op)
async def test_an_operation_passes_the_places_that_the_table_says(
    broker: RealBroker, real: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch, op: Op
) -> None:
    # Given a session with one chunk, and a host that has not met it
    worker = WorkerRunner(broker.url)
    world, passed = Caller(real), set[str]()
    await worker()
    async with running_host(broker.url, host_id="first"):
        await world.ok("create", model="noop", params={"fail_at": 1} if op is Op.FAILING_TICK else {})
        await world.ok("next_chunk")
    monkeypatch.setattr(failpoints, "_armed", {"any": None})
    monkeypatch.setattr(failpoints, "_pass", passed.add)

    # When the operation runs
    async with running_host(broker.url, host_id="second"):
        await world.call({Op.RESET: "reset", Op.CLOSE: "close"}.get(op, "next_chunk"))
        await worker.end()

    # Then exactly those places were passed; nothing was sent again, and what a failing tick shares with others is theirs
    of_op = {point for point, row_op, _ in rows() if row_op is op and not point.startswith("host.resend")}
    assert of_op <= passed
    if op is not Op.FAILING_TICK:
        assert passed == of_op


def test_the_page_is_up_to_date_and_notices_when_it_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().err
    other = tmp_path / "faults.md"
    assert main(["--check"], other) == 1
    assert main([], other) == 0
    assert all(f"`{point.name}`" in other.read_text(encoding="utf-8") for point in POINTS)
