"""Amounts of memory as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import InvalidArgumentError
from contracts.memory_size import format_memory, parse_memory


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("128", 128),
        ("128B", 128),
        ("141GB", 141 * 10**9),
        ("141 gb", 141 * 10**9),
        ("80GiB", 80 * 2**30),
        ("80gi", 80 * 2**30),
        ("1.5TB", 15 * 10**11),
        ("0.1GB", 10**8),
        ("2k", 2000),
        (" 3MiB ", 3 * 2**20),
    ],
)
def test_a_unit_with_an_i_is_a_power_of_1024_and_one_without_of_1000(text: str, count: int) -> None:
    assert parse_memory(text) == count


@pytest.mark.parametrize("text", ["", "x", "GB", "1iB", "+1", "-1", "1,5GB", "1GBs", "9" * 25, "9.3EB"])
def test_anything_else_is_refused_naming_the_setting(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="device_memory") as caught:
        parse_memory(text, "device_memory")
    assert caught.value.field == "device_memory"


@given(st.integers(0, 2**63 - 1))
def test_a_number_of_bytes_stays_itself(count: int) -> None:
    assert parse_memory(str(count)) == count


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1 kB"), (57_083_724_800, "57.1 GB"), (10**20, "100 EB")],
)
def test_bytes_are_shown_with_three_digits(count: int, text: str) -> None:
    assert format_memory(count) == text
