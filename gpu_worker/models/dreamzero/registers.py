"""Register tokens: actions and states on their way into the transformer, and actions on their way out.

The checkpoint keeps one set of weights an embodiment category, and has one category. Weights lie [in, out].
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

_BASE = 10_000.0


class CategoryLinear(nn.Module):
    """x W + b of the only category."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.zeros(1, inputs, outputs))
        self.b = nn.Parameter(torch.zeros(1, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, inputs] -> [B, T, outputs]."""
        return x @ self.W[0] + self.b[0]


class CategoryMLP(nn.Module):
    """Two layers with a ReLU between them: the state encoder, and the action decoder."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.layer1 = CategoryLinear(inputs, hidden)
        self.layer2 = CategoryLinear(hidden, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, inputs] -> [B, T, outputs]."""
        return self.layer2(F.relu(self.layer1(x)))


class ActionEncoder(nn.Module):
    """Noisy actions and their timesteps to tokens."""

    def __init__(self, action_dim: int, dim: int) -> None:
        super().__init__()
        self.W1 = CategoryLinear(action_dim, dim)
        self.W2 = CategoryLinear(2 * dim, dim)
        self.W3 = CategoryLinear(dim, dim)

    def forward(self, actions: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        """actions [B, A, action_dim], timesteps [B, A] -> [B, A, D]."""
        lifted = self.W1(actions)
        time = sine_cosine(timesteps, lifted.shape[-1]).to(lifted.dtype)
        return self.W3(F.silu(self.W2(torch.cat((lifted, time), dim=-1))))


def sine_cosine(timesteps: torch.Tensor, dim: int) -> torch.Tensor:
    """[sin | cos] of t * exp(-i ln(10000) / half), float32 [*, dim]."""
    half = dim // 2
    steps = torch.arange(half, dtype=torch.float32, device=timesteps.device)
    angles = timesteps.float().unsqueeze(-1) * torch.exp(steps * (-math.log(_BASE) / half))
    return torch.cat((angles.sin(), angles.cos()), dim=-1)
