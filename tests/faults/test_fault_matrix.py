"""Every failpoint with every fault and every operation that passes it, on real processes."""

import pytest

from support.fault_table import Cell, cells

pytestmark = [pytest.mark.soak, pytest.mark.processes, pytest.mark.timeout(900)]


@pytest.mark.parametrize("cell", cells(), ids=lambda cell: cell.id)
def test_a_fault_ends_as_the_table_says(cell: Cell, outcome: str) -> None:
    assert outcome == cell.expected
