"""Times compared fairly: contenders take turns in short batches, so that whatever else the machine does hits all of them.

A contender's figure is the median over its batches. A ratio is the median over the rounds of the ratio within a round.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

Operation = Callable[[], Awaitable[None] | None]


@dataclass
class Contender:
    """Something that is timed.

    Args:
        name: of the row.
        operation: one tick, or what is compared with one; may be a coroutine function.
        batch: as many make one batch.
    """

    name: str
    operation: Operation
    batch: int
    batches_us: list[float] = field(default_factory=list)

    async def run(self) -> float:
        """Microseconds of one operation, as the mean of a batch."""
        # Caches, and on a virtual machine the processors themselves, first have to find out who works now.
        await self._repeat(self.batch)
        started = time.perf_counter()
        await self._repeat(self.batch)
        return (time.perf_counter() - started) / self.batch * 1e6

    async def _repeat(self, count: int) -> None:
        for _ in range(count):
            waiting = self.operation()
            if waiting is not None:
                await waiting

    def figures(self) -> dict[str, Any]:
        """Microseconds: the median batch, and the middle half of all batches."""
        low, _, high = quantiles(self.batches_us, n=4)
        middle = median(self.batches_us)
        return {"median_us": round(middle), "quartiles_us": [round(low), round(high)]}


async def interleave(contenders: Sequence[Contender], *, rounds: int) -> None:
    """Times one batch of each, `rounds` times over, each round beginning with another one; one batch to warm up."""
    for contender in contenders:
        await contender.run()
    for turn in range(rounds):
        first = turn % len(contenders)
        for contender in [*contenders[first:], *contenders[:first]]:
            contender.batches_us.append(await contender.run())


def ratio(above: Contender, below: Contender, *, digits: int = 2) -> float:
    """Median of the rounds' ratios."""
    pairs = zip(above.batches_us, below.batches_us, strict=True)
    return round(median(one / other for one, other in pairs), digits)
