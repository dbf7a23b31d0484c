"""Each failpoint of a host once, on real processes; the table says how it ends."""

import pytest

from support.fault_table import Cell, one_cell_a_point

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("cell", one_cell_a_point("host"), ids=lambda cell: cell.id)
def test_a_fault_ends_as_the_table_says(cell: Cell, outcome: str) -> None:
    assert outcome == cell.expected
