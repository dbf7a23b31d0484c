"""Amounts of memory as people write them."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

from contracts.errors import InvalidArgumentError

MAX_BYTES: Final = 2**63 - 1
"""More than any device has, and the most that every JSON writer here can carry."""

_SIZE: Final = re.compile(r"([0-9]{1,24}(?:\.[0-9]{1,9})?) ?([kmgt]?)(i?)b?", re.IGNORECASE)
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_UNITS: Final = ("bytes", "kB", "MB", "GB", "TB", "PB", "EB")


def parse_memory(text: str, field: str = "memory") -> int:
    """Bytes of "1048576", "141GB" (powers of 1000) or "80GiB" (powers of 1024); InvalidArgumentError otherwise."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        raise InvalidArgumentError(
            f"{field} is a number of bytes, or one with a unit such as 141GB or 80GiB, got {text!r:.80}",
            field=field,
        )
    number, unit, binary = match.groups()
    count = int(Decimal(number) * (1024 if binary else 1000) ** _POWERS[unit.lower()])
    if count > MAX_BYTES:
        raise InvalidArgumentError(f"{field} is more than any device has: {text!r:.80}", field=field)
    return count


def format_memory(count: int) -> str:
    """`count` bytes with a unit of powers of 1000 and three digits: "57.1 GB"."""
    power = 0
    while count >= 1000 ** (power + 1) and power + 1 < len(_UNITS):
        power += 1
    return f"{count / 1000**power:.{3 if power else 4}g} {_UNITS[power]}"
