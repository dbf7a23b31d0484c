"""A causal video transformer over paged KV: DiT blocks, positions on absolute frames, text by cross-attention.

Shapes: B = 1, F frames, N = GRID * GRID tokens a frame, T = F * N tokens, H heads of size S, D = H * S.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import nn

from gpu_worker.kv.attention import attend
from gpu_worker.kv.cross_attention import CrossAttentionLayer, LayerKV
from gpu_worker.kv.layer import LayerKVHandle
from gpu_worker.models.reference.camera import MOTION_SIZE
from gpu_worker.models.reference.spec import (
    CHANNELS,
    GEOMETRY_CHANNELS,
    GRID,
    HEAD_SIZE,
    HEADS,
    LAYERS,
    TOKENS_PER_FRAME,
)

DIM: Final = HEADS * HEAD_SIZE
_OCTAVES: Final = 3
_POINT_FEATURES: Final = 2 * _OCTAVES * GEOMETRY_CHANNELS


def sinusoid(values: torch.Tensor, size: int, base: float = 10_000.0) -> torch.Tensor:
    """[...] -> [..., size]: cosines, then sines, of falling frequency; in float64 until the end."""
    half = size // 2
    frequencies = base ** (-torch.arange(half, dtype=torch.float64, device=values.device) / half)
    angles = values.double().unsqueeze(-1) * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def rotary_table(start_frame: int, frames: int, device: torch.device) -> torch.Tensor:
    """Rotations [T, S / 2] as complex numbers: half of each head for time, a quarter each for height and width.

    `start_frame` is absolute, so what is cached keeps its place in time after the window has moved on.
    """
    time = torch.arange(start_frame, start_frame + frames, dtype=torch.float64, device=device)
    side = torch.arange(GRID, dtype=torch.float64, device=device)
    t, h, w = (axis.reshape(-1) for axis in torch.meshgrid(time, side, side, indexing="ij"))
    angles = []
    for positions, pairs in ((t, HEAD_SIZE // 4), (h, HEAD_SIZE // 8), (w, HEAD_SIZE // 8)):
        frequencies = 100.0 ** (-torch.arange(pairs, dtype=torch.float64, device=device) / pairs)
        angles.append(positions.unsqueeze(-1) * frequencies)
    turn = torch.cat(angles, dim=-1)
    return torch.polar(torch.ones_like(turn), turn).to(torch.complex64)


def rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Applies rotations [T, S / 2] to x [B, T, H, S]."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * table.unsqueeze(1)).flatten(-2).to(x.dtype)


def _heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (HEADS, HEAD_SIZE))  # [B, T, D] -> [B, T, H, S]


class CrossAttention(nn.Module):
    """Attention to the text, whose K and V are projected once a prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(DIM, DIM)
        self.k = nn.Linear(DIM, DIM)
        self.v = nn.Linear(DIM, DIM)
        self.o = nn.Linear(DIM, DIM)

    def project(self, text: torch.Tensor) -> LayerKV:
        """K and V [1, tokens, H, S] of text [1, tokens, D]."""
        return F.rms_norm(_heads(self.k(text)), (HEAD_SIZE,)), _heads(self.v(text))

    def forward(self, x: torch.Tensor, cached: CrossAttentionLayer) -> torch.Tensor:
        """[B, T, D] -> [B, T, D]."""
        q = 2 * F.rms_norm(
            _heads(self.q(x)), (HEAD_SIZE,)
        )  # doubled: picks words out instead of averaging all
        return self.o(attend(q, cached["k"], cached["v"]).flatten(-2))


class Block(nn.Module):
    """Self-attention over paged KV, cross-attention to the text, feed-forward; modulated a frame at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.modulation = nn.Linear(DIM, 6 * DIM)
        self.q = nn.Linear(DIM, DIM)
        self.k = nn.Linear(DIM, DIM)
        self.v = nn.Linear(DIM, DIM)
        self.o = nn.Linear(DIM, DIM)
        self.cross = CrossAttention()
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)

    def forward(
        self,
        x: torch.Tensor,
        condition: torch.Tensor,
        rotary: torch.Tensor,
        kv: LayerKVHandle,
        text: CrossAttentionLayer,
    ) -> torch.Tensor:
        """x [1, T, D] and the frames' condition [F, D] -> [1, T, D]."""
        parts = self.modulation(condition).repeat_interleave(TOKENS_PER_FRAME, dim=0).chunk(6, dim=-1)
        shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = parts  # [T, D] each

        n = F.layer_norm(x, (DIM,)) * (1 + scale_a) + shift_a
        q = rotate(F.rms_norm(_heads(self.q(n)), (HEAD_SIZE,)), rotary)
        k = rotate(F.rms_norm(_heads(self.k(n)), (HEAD_SIZE,)), rotary)  # cached after norm and rotation
        attended = kv.write_and_attend(q, k, _heads(self.v(n)))
        x = x + (1 + gate_a) * self.o(attended.flatten(-2))

        x = x + 2 * self.cross(F.layer_norm(x, (DIM,)), text)  # the text sets the tone

        n = F.layer_norm(x, (DIM,)) * (1 + scale_f) + shift_f
        return x + (1 + gate_f) * self.down(F.gelu(self.up(n), approximate="tanh"))


class ReferenceTransformer(nn.Module):
    """Predicts the clean latents of one chunk from noisy ones, camera, text and the cached past."""

    def __init__(self) -> None:
        super().__init__()
        self.texture_in = nn.Linear(CHANNELS - GEOMETRY_CHANNELS, DIM)
        self.points_in = nn.Linear(_POINT_FEATURES, DIM)
        self.time = nn.Sequential(nn.Linear(DIM, DIM), nn.SiLU(), nn.Linear(DIM, DIM))
        self.motion = nn.Linear(MOTION_SIZE, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.out = nn.Linear(DIM, CHANNELS)

    @classmethod
    def seeded(cls, generator: torch.Generator) -> ReferenceTransformer:
        """A model with random weights of unit gain, drawn from `generator` alone."""
        with torch.device("meta"):  # no draw from the process-wide random state
            model = cls()
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            if parameter.dim() == 1:
                nn.init.normal_(parameter, std=0.1, generator=generator)
            else:
                nn.init.normal_(parameter, std=1 / math.sqrt(parameter.shape[1]), generator=generator)
        return model.requires_grad_(False).eval()

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the weights."""
        return self.out.weight.dtype

    def text_kv(self, text: torch.Tensor) -> Iterator[LayerKV]:
        """K and V of every layer's cross-attention, in layer order; text is [1, tokens, D]."""
        for block in self._blocks():
            yield block.cross.project(text)

    def forward(
        self,
        latents: torch.Tensor,
        timestep: float,
        points: torch.Tensor,
        motion: torch.Tensor,
        *,
        start_frame: int,
        kv: Sequence[LayerKVHandle],
        text: Sequence[CrossAttentionLayer],
    ) -> torch.Tensor:
        """One pass; the handles decide whether its K and V stay.

        Args:
            latents: [1, C, F, GRID, GRID], float32, noisy (or clean, at timestep 0).
            timestep: noise level, 0 to 1000.
            points: [3, F, GRID, GRID], world points that the patches look at.
            motion: [F, MOTION_SIZE], camera motion of each frame.
            start_frame: absolute index of the first frame.
            kv: one handle a layer.
            text: cached cross-attention, one entry a layer.

        Returns:
            The clean latents, [1, C, F, GRID, GRID], float32.
        """
        frames, dtype = latents.shape[2], self.dtype
        texture = _to_tokens(latents[0, GEOMETRY_CHANNELS:]).to(dtype)
        x = 0.5 * self.texture_in(texture) + self.points_in(_point_features(points).to(dtype))
        step = sinusoid(torch.tensor([timestep], device=latents.device), DIM).to(dtype)
        condition = F.silu(0.5 * self.time(step) + 0.3 * self.motion(motion.to(dtype)))  # [F, D]
        rotary = rotary_table(start_frame, frames, latents.device)
        x = x.unsqueeze(0)
        for block, handle, words in zip(self._blocks(), kv, text, strict=True):
            x = block(x, condition, rotary, handle, words)
        out = self.out(F.layer_norm(x[0], (DIM,))).float()
        out = out.T.reshape(CHANNELS, frames, GRID, GRID).tanh()
        out[:GEOMETRY_CHANNELS] = (
            points + 0.1 * out[:GEOMETRY_CHANNELS]
        )  # geometry: a small change of what is given
        return out.unsqueeze(0)

    def _blocks(self) -> Iterator[Block]:
        for block in self.blocks:
            assert isinstance(block, Block)
            yield block


def _to_tokens(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(1).T  # [C, F, GRID, GRID] -> [T, C], in the order frame, row, column


def _point_features(points: torch.Tensor) -> torch.Tensor:
    """[3, F, GRID, GRID] -> [T, features]: sines and cosines, so that far places look like near ones."""
    octaves = 2.0 ** torch.arange(_OCTAVES, device=points.device) / 2
    angles = (_to_tokens(points).unsqueeze(-1) * octaves).flatten(1)
    return torch.cat((angles.sin(), angles.cos()), dim=-1)
