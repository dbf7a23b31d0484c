"""UMT5's encoder from its formulas, in plain NumPy float64, with the names of the checkpoint without their prefix."""

import math

import numpy as np

from support.dreamzero_oracles.transformer import Weights, gelu_tanh


def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight


def bucket(distance: int, buckets: int, most: int) -> int:
    """Of key minus query: half of the buckets for either side, in each half exact ones first, then logarithmic ones."""
    half = buckets // 2
    exact = half // 2
    base, size = (half, distance) if distance > 0 else (0, -distance)
    if size < exact:
        return base + size
    return base + min(half - 1, exact + int(math.log(size / exact) / math.log(most / exact) * (half - exact)))


def forward(
    w: Weights, ids: list[int], length: int, *, layers: int, heads: int, buckets: int, most: int
) -> np.ndarray:
    """Embeddings [length, D] of token ids; zero behind them. Padding is not attended to."""
    x = w["token_embedding.weight"][ids]
    for index in range(layers):
        name = f"blocks.{index}"
        n = norm(x, w[f"{name}.norm1.weight"])
        q, k, v = (
            (n @ w[f"{name}.attn.{part}.weight"].T).reshape(len(ids), heads, -1) for part in ("q", "k", "v")
        )
        bias = w[f"{name}.pos_embedding.embedding.weight"]
        seen = []
        for head in range(heads):
            scores = q[:, head] @ k[:, head].T  # without a scale
            for i in range(len(ids)):
                for j in range(len(ids)):
                    scores[i, j] += bias[bucket(j - i, buckets, most), head]
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            seen.append(weights / weights.sum(-1, keepdims=True) @ v[:, head])
        x = x + np.concatenate(seen, -1) @ w[f"{name}.attn.o.weight"].T
        n = norm(x, w[f"{name}.norm2.weight"])
        gate = gelu_tanh(n @ w[f"{name}.ffn.gate.0.weight"].T)
        x = x + (gate * (n @ w[f"{name}.ffn.fc1.weight"].T)) @ w[f"{name}.ffn.fc2.weight"].T
    out = np.zeros((length, x.shape[1]))
    out[: len(ids)] = norm(x, w["norm.weight"])
    return out
