"""CLIP's image tower from its formulas, in plain NumPy float64: bicubic pixels, patches, blocks."""

import math

import numpy as np

from support.dreamzero_oracles.transformer import Weights, affine_norm, attention, gelu_exact, linear

MEAN = np.array([0.48145466, 0.4578275, 0.40821073])
STD = np.array([0.26862954, 0.26130258, 0.27577711])


def cubic(distance: float) -> float:
    """The cubic convolution kernel with a = -0.75."""
    a, x = -0.75, abs(distance)
    if x <= 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    return a * (x**3 - 5 * x**2 + 8 * x - 4) if x < 2 else 0.0


def resize_line(values: np.ndarray, size: int) -> np.ndarray:
    """The last axis at `size` places: pixels are areas, the border repeats, nothing is smoothed."""
    length = values.shape[-1]
    out = np.zeros((*values.shape[:-1], size))
    for place in range(size):
        centre = (place + 0.5) * length / size - 0.5
        for near in range(math.floor(centre) - 1, math.floor(centre) + 3):
            out[..., place] += cubic(centre - near) * values[..., min(max(near, 0), length - 1)]
    return out


def preprocess(picture: np.ndarray, size: int) -> np.ndarray:
    """[3, H, W] in [-1, 1] -> [3, size, size]."""
    wide = resize_line(picture, size)
    square = resize_line(wide.transpose(0, 2, 1), size).transpose(0, 2, 1)
    return ((square + 1) / 2 - MEAN[:, None, None]) / STD[:, None, None]


def forward(w: Weights, picture: np.ndarray, *, size: int, patch: int, heads: int, blocks: int) -> np.ndarray:
    """[3, H, W] -> [tokens, width] after so many blocks."""
    eps = 1e-5
    pixels = preprocess(picture, size)
    kernel = w["patch_embedding.weight"].reshape(len(w["patch_embedding.weight"]), -1)
    tokens = [w["cls_embedding"][0, 0]]
    for row in range(0, size, patch):
        line = pixels[:, row : row + patch]
        tokens += [kernel @ line[:, :, left : left + patch].reshape(-1) for left in range(0, size, patch)]
    x = affine_norm(w, "pre_norm", np.stack(tokens) + w["pos_embedding"][0], eps)
    for index in range(blocks):
        name = f"transformer.{index}"
        parts = linear(w, f"{name}.attn.to_qkv", affine_norm(w, f"{name}.norm1", x, eps))
        q, k, v = (part.reshape(len(x), heads, -1) for part in np.split(parts, 3, axis=1))
        x = x + linear(w, f"{name}.attn.proj", attention(q, k, v))
        hidden = gelu_exact(linear(w, f"{name}.mlp.0", affine_norm(w, f"{name}.norm2", x, eps)))
        x = x + linear(w, f"{name}.mlp.2", hidden)
    return x
