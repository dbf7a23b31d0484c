"""Runs the cells of the fault matrix that a module asks for, side by side; starts processes quickly."""

from collections.abc import Iterator

import pytest

from support.broker import RealBroker
from support.fault_cell import Result, run_cells
from support.fault_table import Cell
from support.forker import Forker


@pytest.fixture(scope="module")
def forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forker]:
    """Starts real processes in no time."""
    with Forker(tmp_path_factory.mktemp("forked")) as running:
        yield running


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, real_server: RealBroker, tmp_path_factory: pytest.TempPathFactory
) -> dict[Cell, Result]:
    """What came of each cell that a selected test of this module is about."""
    cells = [
        item.callspec.params["cell"]
        for item in request.session.items
        if item.path == request.path and "cell" in getattr(getattr(item, "callspec", None), "params", {})
    ]
    real_server.reset()
    return run_cells(cells, tmp_path_factory.mktemp("faults"), real_server.url)


@pytest.fixture
def outcome(results: dict[Cell, Result], cell: Cell) -> str:
    """How the cell ended; fails if anything else was wrong, or its own process logs say why it did not end."""
    result = results[cell]
    assert not result.wrong, f"{result.outcome}\n" + "\n".join(result.wrong) + f"\n{result.logs}"
    return result.outcome
