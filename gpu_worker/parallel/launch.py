"""Which process of a worker this is. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Launch:
    """One process among those that a launcher started for one worker, all on one machine.

    Args:
        rank: which one; 0 talks to the broker.
        degree: how many there are.
        attempt: how often the launcher has started them anew.
    """

    rank: int = 0
    degree: int = 1
    attempt: int = 0

    def device(self, name: str) -> str:
        """The device of this rank, where the worker's is `cuda` or `cpu`."""
        return f"cuda:{self.rank}" if name == "cuda" else name
