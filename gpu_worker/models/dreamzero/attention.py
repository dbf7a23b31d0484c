"""Self-attention of video and registers through a KV seam, and cross-attention to text and image.

Shapes: B batch, T tokens [video | action | state], H heads of size S, D = H * S.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from gpu_worker.kv.attention import attend
from gpu_worker.models.lingbot_world.rope import Rotary, rotate

CrossKV = tuple[torch.Tensor, torch.Tensor]
"""K and V of one layer's cross-attention to text or image, [1, tokens, H, S] each."""


class RegisterKV(Protocol):
    """One layer's past, with room beside the current frames for registers, which never become past."""

    def write_and_attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        extra_k: torch.Tensor | None = None,
        extra_v: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Keeps k and v of the current frames, then attends from q [1, T, H, S] to past, present and extra tokens."""
        ...


class CastFirstRMSNorm(nn.Module):
    """x rsqrt(mean(x^2) + eps) in float32 over all D channels, cast to x's type, and only then times the weight."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, D] -> [B, T, D]."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight


class _Attention(nn.Module):
    def __init__(self, dim: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)
        self.o = nn.Linear(dim, dim)
        self.norm_q = CastFirstRMSNorm(dim, eps)
        self.norm_k = CastFirstRMSNorm(dim, eps)
        self._head_dim = head_dim

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self._head_dim))  # [B, T, D] -> [B, T, H, S]


class SelfAttention(_Attention):
    """Attention in both directions over past frames, current frames and registers."""

    def forward(self, x: torch.Tensor, table: Rotary, kv: RegisterKV, registers: int) -> torch.Tensor:
        """[1, T, D] -> [1, T, D]; the last `registers` tokens are no frames. K is kept after norm and rotation."""
        q = rotate(self._heads(self.norm_q(self.q(x))).double(), table).to(x.dtype)
        k = rotate(self._heads(self.norm_k(self.k(x))).double(), table).to(x.dtype)
        v = self._heads(self.v(x))
        if not registers:
            return self.o(kv.write_and_attend(q, k, v).flatten(2))
        sizes = (x.shape[1] - registers, registers)
        (k, extra_k), (v, extra_v) = k.split(sizes, 1), v.split(sizes, 1)
        return self.o(kv.write_and_attend(q, k, v, extra_k, extra_v).flatten(2))


class CrossAttention(_Attention):
    """Attention to all text tokens, padding included, and beside it to the image; both are projected once a rollout."""

    def __init__(self, dim: int, head_dim: int, eps: float) -> None:
        super().__init__(dim, head_dim, eps)
        self.k_img = nn.Linear(dim, dim)
        self.v_img = nn.Linear(dim, dim)
        self.norm_k_img = CastFirstRMSNorm(dim, eps)

    def project_text(self, text: torch.Tensor) -> CrossKV:
        """K and V of embedded text [1, tokens, D]."""
        return self._heads(self.norm_k(self.k(text))), self._heads(self.v(text))

    def project_image(self, image: torch.Tensor) -> CrossKV:
        """K and V of the embedded image [1, tokens, D]."""
        return self._heads(self.norm_k_img(self.k_img(image))), self._heads(self.v_img(image))

    def forward(self, x: torch.Tensor, text: CrossKV, image: CrossKV) -> torch.Tensor:
        """[1, T, D] -> [1, T, D]."""
        q = self._heads(self.norm_q(self.q(x)))
        return self.o((attend(q, *text) + attend(q, *image)).flatten(2))
