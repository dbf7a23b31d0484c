"""What the page for the operator on call must name."""

from contracts.errors import FAILURE_CODES
from support.tree import REPOSITORY

PAGE = (REPOSITORY / "docs" / "operations.md").read_text(encoding="utf-8")


def test_every_code_that_a_session_can_fail_with_has_its_row() -> None:
    rows = {
        line.split("`")[1] for line in PAGE.splitlines() if line.startswith("| `") and line.count("|") == 4
    }

    assert rows >= FAILURE_CODES
