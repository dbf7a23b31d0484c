"""What crosses ranks inside a forward: tokens are shared out everywhere, heads inside attention.

    a layer   self-attention: q, k and v in one all-to-all, the result in one back
              cross-attention: q in one all-to-all, the result in one back; text K and V never travel
    a forward one all-gather, after the head

N is the degree, and rank r has the tokens [r T/N, (r + 1) T/N) and the heads [r H/N, (r + 1) H/N).
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import torch
import torch.distributed as dist

from gpu_worker.parallel.errors import ShardError

ALL_TO_ALLS_PER_LAYER: Final = 4
ALL_GATHERS_PER_FORWARD: Final = 1


class Ulysses:
    """A rank's side of the exchange; one collective call a method, `shard` none.

    Args:
        group: the process group that tensors cross in; None while there is none.
        rank: which rank this is.
        degree: how many there are.
    """

    def __init__(self, group: dist.ProcessGroup | None, rank: int, degree: int) -> None:
        self.group = group
        self.rank = rank
        self.degree = degree
        self.calls: Counter[str] = Counter()
        """Collectives begun so far, by name."""
        self.broken = False
        """Whether one did not come to its end: the group is of no use any more."""

    def shard(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's contiguous share of `dim`, a view; ShardError where it has no equal shares."""
        if x.shape[dim] % self.degree:
            raise ShardError(f"dimension {dim} of {list(x.shape)} has no {self.degree} equal shares")
        return x.chunk(self.degree, dim)[self.rank]

    def to_heads(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T / N, n, H, S] -> [B, T, n, H / N, S]: all tokens of this rank's heads."""
        sent = x.unflatten(3, (self.degree, -1)).movedim(3, 0)  # [N, B, T / N, n, H / N, S]
        return self._exchange(sent).movedim(0, 1).flatten(1, 2)

    def to_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, H / N, S] -> [B, T / N, H, S]: the way back."""
        sent = x.unflatten(1, (self.degree, -1)).movedim(1, 0)  # [N, B, T / N, H / N, S]
        return self._exchange(sent).movedim(0, 2).flatten(2, 3)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T / N, C] of each rank -> [B, T, C]."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.degree)]
        self._begin("all_gather")
        dist.all_gather(parts, x, group=self._open())
        self.broken = False
        return torch.cat(parts, dim=1)

    def _exchange(self, sent: torch.Tensor) -> torch.Tensor:
        """Part r of `sent` goes to rank r, and what comes from rank r becomes part r."""
        sent = sent.contiguous()
        received = torch.empty_like(sent)
        self._begin("all_to_all")
        dist.all_to_all_single(received, sent, group=self._open())
        self.broken = False
        return received

    def _begin(self, name: str) -> None:
        self.calls[name] += 1
        self.broken = True

    def _open(self) -> dist.ProcessGroup:
        if self.group is None:
            raise ShardError("the ranks have broken off")
        return self.group
