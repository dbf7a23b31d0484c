"""One transformer block and the output head, in the activations' own type throughout.

Every token has its own modulation, but frames share theirs: it is computed for G groups (a frame, an action, a state
each) and `spread` says which group each of the T tokens belongs to.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from gpu_worker.models.dreamzero.attention import CrossAttention, CrossKV, RegisterKV, SelfAttention
from gpu_worker.models.dreamzero.config import PATCH, DreamZeroTransformerConfig
from gpu_worker.models.lingbot_world.rope import Rotary


def layer_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """[B, T, D] -> [B, T, D], without weights."""
    return F.layer_norm(x, x.shape[-1:], eps=eps)


def modulate(normed: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """normed * (1 + scale) + shift, [B, T, D] each, every step rounded to their type."""
    return normed * (1 + scale) + shift


class Block(nn.Module):
    """Self-attention, cross-attention, feed-forward."""

    def __init__(self, config: DreamZeroTransformerConfig) -> None:
        super().__init__()
        dim, head_dim, eps = config.dim, config.head_dim, config.eps
        self.modulation = nn.Parameter(torch.zeros(1, 6, dim))
        self.self_attn = SelfAttention(dim, head_dim, eps)
        self.cross_attn = CrossAttention(dim, head_dim, eps)
        self.norm3 = nn.LayerNorm(dim, eps)
        self.ffn = nn.Sequential(
            nn.Linear(dim, config.ffn_dim), nn.GELU(approximate="tanh"), nn.Linear(config.ffn_dim, dim)
        )
        self._eps = eps

    def forward(
        self,
        x: torch.Tensor,
        time: torch.Tensor,
        spread: torch.Tensor,
        table: Rotary,
        *,
        registers: int,
        kv: RegisterKV,
        text: CrossKV,
        image: CrossKV,
    ) -> torch.Tensor:
        """x [1, T, D] -> [1, T, D].

        Args:
            x: hidden state of [video | action | state].
            time: the timesteps' projection [1, G, 6, D].
            spread: [T], each token's group.
            table: rotary positions of the tokens.
            registers: tokens at the end that are no frames.
            kv: this layer's past.
            text, image: this layer's K and V.
        """
        parts = (self.modulation.unsqueeze(1) + time)[:, spread]
        shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = parts.unbind(2)  # [1, T, D] each

        n = modulate(layer_norm(x, self._eps), shift_a, scale_a)
        x = x + self.self_attn(n, table, kv, registers) * gate_a

        x = x + self.cross_attn(self.norm3(x), text, image)

        n = modulate(layer_norm(x, self._eps), shift_f, scale_f)
        return x + self.ffn(n) * gate_f


class Head(nn.Module):
    """Video tokens to the values of their patches. Modulated by the timestep's embedding, not by its projection."""

    def __init__(self, config: DreamZeroTransformerConfig) -> None:
        super().__init__()
        self.head = nn.Linear(config.dim, math.prod(PATCH) * config.out_dim)
        self.modulation = nn.Parameter(torch.zeros(1, 2, config.dim))
        self._eps = config.eps

    def forward(self, x: torch.Tensor, embedding: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
        """x [1, T, D], embedding [1, G, D], spread [T] -> [1, T, patch values]."""
        shift, scale = (self.modulation.unsqueeze(1) + embedding.unsqueeze(2))[:, spread].unbind(2)
        return self.head(modulate(layer_norm(x, self._eps), shift, scale))
