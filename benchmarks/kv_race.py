"""Contenders that only compute, timed in turns by the processor time that they take.

Nothing here waits for anything, so with one thread processor time is what a clock on the wall would show on an idle
machine; on a busy one it is still right.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any


@dataclass
class Row:
    """Something that is timed.

    Args:
        name: of the row.
        operation: what is timed; its result is dropped.
        batch: as many make one sample.
    """

    name: str
    operation: Callable[[], object]
    batch: int = 1
    samples_us: list[float] = field(default_factory=list)

    def sample(self) -> float:
        """Microseconds of one operation, as the mean of a batch."""
        started = time.process_time_ns()
        for _ in range(self.batch):
            self.operation()
        return (time.process_time_ns() - started) / self.batch / 1000

    def figures(self) -> dict[str, Any]:
        """Microseconds: the median sample, and the middle half of all."""
        low, _, high = quantiles(self.samples_us, n=4)
        return {"median_us": round(median(self.samples_us)), "quartiles_us": [round(low), round(high)]}


def race(rounds: int, *rows: Row) -> dict[str, Any]:
    """One sample of each a round, each round beginning with another one, after one to warm up. Figures by name."""
    for row in rows:
        row.sample()
    for turn in range(rounds):
        first = turn % len(rows)
        for row in (*rows[first:], *rows[:first]):
            row.samples_us.append(row.sample())
    return {row.name: row.figures() for row in rows}


def ratio(above: Row, below: Row) -> float:
    """Median over the rounds of the ratio within a round."""
    pairs = zip(above.samples_us, below.samples_us, strict=True)
    return round(median(one / other for one, other in pairs), 4)
