"""CLIP's ViT-H image tower, with the names of the checkpoint; what comes out of its last block but one is used.

Pictures may have any size: they are resized to the tower's square, whatever their shape was.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import nn

from contracts.errors import InvalidArgumentError, InvalidTypeError
from gpu_worker.kv.attention import attend
from gpu_worker.models.dreamzero.config import ClipGeometry

_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
_STD: Final = (0.26862954, 0.26130258, 0.27577711)
_MLP_RATIO: Final = 4


class _SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.to_qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self._heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.to_qkv(x).unflatten(-1, (3, self._heads, -1)).unbind(2)  # [B, T, H, S] each
        return self.proj(attend(q, k, v).flatten(2))


class _Block(nn.Module):
    def __init__(self, geometry: ClipGeometry) -> None:
        super().__init__()
        width = geometry.width
        self.norm1 = nn.LayerNorm(width, geometry.eps)
        self.attn = _SelfAttention(width, geometry.heads)
        self.norm2 = nn.LayerNorm(width, geometry.eps)
        self.mlp = nn.Sequential(
            nn.Linear(width, _MLP_RATIO * width), nn.GELU(), nn.Linear(_MLP_RATIO * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ClipImageTower(nn.Module):
    """Sees one picture.

    Args:
        geometry: its layout; None is the published one.
    """

    def __init__(self, geometry: ClipGeometry | None = None) -> None:
        super().__init__()
        self.geometry = geometry = ClipGeometry() if geometry is None else geometry
        width, patch = geometry.width, geometry.patch_size
        self.patch_embedding = nn.Conv2d(3, width, kernel_size=patch, stride=patch, bias=False)
        self.cls_embedding = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embedding = nn.Parameter(torch.zeros(1, geometry.tokens, width))
        self.pre_norm = nn.LayerNorm(width, geometry.eps)
        self.transformer = nn.Sequential(*(_Block(geometry) for _ in range(geometry.layers_run)))
        self.requires_grad_(False).eval()

    def unused(self, name: str) -> bool:
        """Whether a checkpoint may have a weight of that name that this tower has no use for."""
        last = f"transformer.{self.geometry.layers_run}."
        return name == "head" or name.startswith((last, "post_norm.", "head."))

    @torch.no_grad()
    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        """[1, 3, H, W] in [-1, 1] -> [1, tokens, width] of the tower's type."""
        if not isinstance(picture, torch.Tensor):
            raise InvalidTypeError(f"picture must be a tensor, got {type(picture).__name__}", field="picture")
        if picture.dim() != 4 or picture.shape[:2] != (1, 3) or 0 in picture.shape:
            raise InvalidArgumentError(
                f"picture must have shape [1, 3, H, W], got {list(picture.shape)}", field="picture"
            )
        weight = self.patch_embedding.weight
        pixels = preprocess(picture.to(weight.device), self.geometry.image_size).to(weight.dtype)
        x = self.patch_embedding(pixels).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_embedding, x), dim=1) + self.pos_embedding
        return self.transformer(self.pre_norm(x))


def preprocess(picture: torch.Tensor, size: int) -> torch.Tensor:
    """[1, 3, H, W] in [-1, 1] -> float32 [1, 3, size, size], as CLIP was shown its pictures."""
    resized = F.interpolate(picture.float(), (size, size), mode="bicubic", align_corners=False)
    mean, std = (picture.new_tensor(v, dtype=torch.float32).view(1, 3, 1, 1) for v in (_MEAN, _STD))
    return (resized * 0.5 + 0.5 - mean) / std
