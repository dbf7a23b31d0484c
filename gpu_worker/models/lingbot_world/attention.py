"""Self-attention through a KV seam, and cross-attention to the text.

Shapes: B batch, T tokens of the block, H heads of size S, D = H * S.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from gpu_worker.kv.attention import attend
from gpu_worker.models.lingbot_world.rope import Rotary, rotate

TextKV = tuple[torch.Tensor, torch.Tensor]
"""K and V of one layer's cross-attention, [B, text tokens, H, S] each."""


class SelfAttentionKV(Protocol):
    """One layer's past: a paged handle, or the contiguous reference."""

    def write_and_attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Keeps k and v of the current frames, then attends from q [B, T, H, S] to past and present."""
        ...


class SequenceParallel(Protocol):
    """Several workers that share one sequence: tokens everywhere, heads inside attention."""

    degree: int
    rank: int

    def shard(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's tokens: its contiguous share of `dim`."""
        ...

    def to_heads(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T / N, n, H, S] -> [B, T, n, H / N, S]: all tokens of this rank's heads."""
        ...

    def to_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, H / N, S] -> [B, T / N, H, S]: the way back."""
        ...

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T / N, C] of each rank -> [B, T, C]."""
        ...


class WideRMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over all D channels, before the heads are split; in float32, weight included."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, D] -> [B, T, D]."""
        return F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps).to(x.dtype)


class _Attention(nn.Module):
    def __init__(self, dim: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)
        self.o = nn.Linear(dim, dim)
        self.norm_q = WideRMSNorm(dim, eps)
        self.norm_k = WideRMSNorm(dim, eps)
        self._head_dim = head_dim

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self._head_dim))  # [B, T, D] -> [B, T, H, S]


class SelfAttention(_Attention):
    """Attention to the visible past and, in both directions, to the block itself."""

    def forward(
        self, x: torch.Tensor, table: Rotary, kv: SelfAttentionKV, parallel: SequenceParallel | None = None
    ) -> torch.Tensor:
        """[B, T, D] -> [B, T, D]. K is kept after norm and rotation."""
        q = rotate(self._heads(self.norm_q(self.q(x))), table)
        k = rotate(self._heads(self.norm_k(self.k(x))), table)
        v = self._heads(self.v(x))
        if parallel is None:
            return self.o(kv.write_and_attend(q, k, v).flatten(2))
        q, k, v = parallel.to_heads(torch.stack((q, k, v), dim=2)).unbind(2)
        return self.o(parallel.to_tokens(kv.write_and_attend(q, k, v)).flatten(2))


class CrossAttention(_Attention):
    """Attention to all text tokens, padding included; K and V are projected once a prompt."""

    def project(self, text: torch.Tensor, parallel: SequenceParallel | None = None) -> TextKV:
        """K and V of embedded text [B, tokens, D]; of several workers each keeps its own heads, compact."""
        k, v = self._heads(self.norm_k(self.k(text))), self._heads(self.v(text))
        if parallel is None:
            return k, v
        return parallel.shard(k, 2).contiguous(), parallel.shard(v, 2).contiguous()

    def forward(
        self, x: torch.Tensor, k: torch.Tensor, v: torch.Tensor, parallel: SequenceParallel | None = None
    ) -> torch.Tensor:
        """[B, T, D] -> [B, T, D]."""
        q = self._heads(self.norm_q(self.q(x)))
        if parallel is None:
            return self.o(attend(q, k, v).flatten(2))
        q = parallel.to_heads(q.unsqueeze(2)).squeeze(2)
        return self.o(parallel.to_tokens(attend(q, k, v)).flatten(2))
