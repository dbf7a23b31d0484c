"""One transformer block, the output head, and the small functions that they read like.

Modulation comes a frame at a time, or a token at a time where a sequence is shared; G is the number of such groups,
T / G the tokens of each.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from gpu_worker.models.lingbot_world.attention import (
    CrossAttention,
    SelfAttention,
    SelfAttentionKV,
    SequenceParallel,
    TextKV,
)
from gpu_worker.models.lingbot_world.config import LingBotTransformerConfig
from gpu_worker.models.lingbot_world.rope import Rotary

CameraAffine = tuple[torch.Tensor, torch.Tensor]
"""(1 + scale, shift) of one block, [B, T, D] each."""


def layer_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """[B, T, D] -> float32 [B, T, D], without weights."""
    return F.layer_norm(x.float(), x.shape[-1:], eps=eps)


def modulate(normed: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """normed * (1 + scale) + shift: normed [B, T, D], shift and scale [B, G, D]."""
    grouped = normed.unflatten(1, (shift.shape[1], -1))
    return torch.addcmul(shift.unsqueeze(2), grouped, 1 + scale.unsqueeze(2)).flatten(1, 2)


def add_gated(x: torch.Tensor, update: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x + update * gate in float32, back in x's type: x and update [B, T, D], gate [B, G, D]."""
    groups = gate.shape[1]
    before, change = (value.float().unflatten(1, (groups, -1)) for value in (x, update))
    return torch.addcmul(before, change, gate.unsqueeze(2)).flatten(1, 2).to(x.dtype)


class AffineLayerNorm(nn.LayerNorm):
    """Layer norm with weights, in float32."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the parent's name
        """[B, T, D] -> [B, T, D]."""
        return F.layer_norm(
            input.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps
        ).to(input.dtype)


class Block(nn.Module):
    """Self-attention, camera, cross-attention, feed-forward."""

    def __init__(self, config: LingBotTransformerConfig) -> None:
        super().__init__()
        dim, head_dim, eps = config.dim, config.attention_head_dim, config.eps
        self.modulation = nn.Parameter(torch.zeros(1, 6, dim))
        self.self_attn = SelfAttention(dim, head_dim, eps)
        self.cross_attn = CrossAttention(dim, head_dim, eps)
        self.norm3 = AffineLayerNorm(dim, eps)
        self.ffn = nn.Sequential(
            nn.Linear(dim, config.ffn_dim), nn.GELU(approximate="tanh"), nn.Linear(config.ffn_dim, dim)
        )
        self.cam_injector_layer1 = nn.Linear(dim, dim)
        self.cam_injector_layer2 = nn.Linear(dim, dim)
        self.cam_scale_layer = nn.Linear(dim, dim)
        self.cam_shift_layer = nn.Linear(dim, dim)
        self._eps = eps

    def camera_affine(self, camera: torch.Tensor) -> CameraAffine:
        """What this block does with camera tokens [B, T, D]; the same for every forward of a chunk."""
        injected = self.cam_injector_layer2(F.silu(self.cam_injector_layer1(camera))) + camera
        return 1 + self.cam_scale_layer(injected), self.cam_shift_layer(injected)

    def forward(
        self,
        x: torch.Tensor,
        time: torch.Tensor,
        table: Rotary,
        camera: CameraAffine,
        *,
        kv: SelfAttentionKV,
        text: TextKV,
        parallel: SequenceParallel | None = None,
    ) -> torch.Tensor:
        """x [B, T, D] -> [B, T, D]; `time` is the timestep's projection, float32 [B, G, 6, D]."""
        parts = self.modulation.float().unsqueeze(1) + time
        shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = parts.unbind(2)  # [B, G, D] each

        n = modulate(layer_norm(x, self._eps), shift_a, scale_a).to(x.dtype)
        x = add_gated(x, self.self_attn(n, table, kv, parallel), gate_a)

        scale_c, shift_c = camera
        x = torch.addcmul(shift_c, scale_c, x)

        x = x + self.cross_attn(self.norm3(x), *text, parallel)

        n = modulate(layer_norm(x, self._eps), shift_f, scale_f).to(x.dtype)
        return add_gated(x, self.ffn(n), gate_f)


class Head(nn.Module):
    """Tokens to the values of their patches. It is modulated by the timestep's embedding, not by its projection."""

    def __init__(self, config: LingBotTransformerConfig) -> None:
        super().__init__()
        t, h, w = config.patch_size
        self.head = nn.Linear(config.dim, t * h * w * config.out_channels)
        self.modulation = nn.Parameter(torch.zeros(1, 2, config.dim))
        self._eps = config.eps

    def forward(self, x: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """x [B, T, D], embedding [B, G, D] -> [B, T, patch values]."""
        return self.head(self.modulated(layer_norm(x, self._eps), embedding).to(x.dtype))

    def modulated(self, normed: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """Shift and scale of the normed tokens [B, T, D]."""
        shift, scale = (self.modulation.float().unsqueeze(1) + embedding.float().unsqueeze(2)).unbind(2)
        return modulate(normed, shift, scale)


# ---------------------------------------------------------------------------------------------------- patches


def patchify(x: torch.Tensor, patch: tuple[int, int, int]) -> torch.Tensor:
    """[B, C, F, H, W] -> [B, T, C * patch]: tokens in order frame, row, column; values in order (c, pt, ph, pw)."""
    batch, channels, *sizes = x.shape
    split = [part for size, step in zip(sizes, patch, strict=True) for part in (size // step, step)]
    return x.reshape(batch, channels, *split).permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)


def unpatchify(tokens: torch.Tensor, grid: tuple[int, int, int], patch: tuple[int, int, int]) -> torch.Tensor:
    """[B, T, patch * C] -> [B, C, F, H, W]: values in order (pt, ph, pw, c), c fastest; `grid` in tokens."""
    parts = tokens.unflatten(2, (*patch, -1)).unflatten(1, grid)  # [B, f, h, w, pt, ph, pw, C]
    ordered = parts.permute(0, 7, 1, 4, 2, 5, 3, 6)  # [B, C, f, pt, h, ph, w, pw]
    return ordered.flatten(6, 7).flatten(4, 5).flatten(2, 3)
