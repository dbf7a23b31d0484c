"""Several ranks of one sequence as threads of this process, in lockstep: the shape of an all-to-all without a network."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


class ThreadRank:
    """`SequenceParallel` for one thread.

    Args:
        rank: which one.
        boxes: what each rank has put down, shared by all.
        barrier: where they wait for each other.
    """

    def __init__(self, rank: int, boxes: list[torch.Tensor], barrier: threading.Barrier) -> None:
        self.rank, self.degree = rank, len(boxes)
        self._boxes, self._barrier = boxes, barrier

    def shard(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return x.chunk(self.degree, dim)[self.rank]

    def to_heads(self, x: torch.Tensor) -> torch.Tensor:
        return self.shard(torch.cat(self._all(x), dim=1), 3)

    def to_tokens(self, x: torch.Tensor) -> torch.Tensor:
        return self.shard(torch.cat(self._all(x), dim=2), 1)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._all(x), dim=1)

    def _all(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._boxes[self.rank] = x
        self._barrier.wait(20)
        everything = list(self._boxes)
        self._barrier.wait(20)  # nobody puts the next thing down before all have looked
        return everything


def on_ranks(degree: int, work: Callable[[ThreadRank], T]) -> list[T]:
    """What `work` returns on each rank."""
    boxes, barrier = [torch.empty(0)] * degree, threading.Barrier(degree)
    with ThreadPoolExecutor(degree) as pool:
        return list(pool.map(work, [ThreadRank(rank, boxes, barrier) for rank in range(degree)]))
