"""One transformer forward from its formulas, in plain NumPy float64: token by token, head by head.

`w` maps checkpoint names to arrays. Nothing here knows of caches: self-attention gets the visible K and V.
"""

import math

import numpy as np

Weights = dict[str, np.ndarray]


def linear(w: Weights, name: str, x: np.ndarray) -> np.ndarray:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def plain_norm(x: np.ndarray, eps: float) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def rope(x: np.ndarray, positions: list[tuple[int, int, int]]) -> np.ndarray:
    """x [T, H, S] with each token's (frame, row, column)."""
    size = x.shape[-1]
    side = 2 * (size // 6)
    out = x.copy()
    for token, place in enumerate(positions):
        pair = 0
        for position, width in zip(place, (size - 2 * side, side, side), strict=True):
            for j in range(width // 2):
                angle = position * 10000.0 ** (-2 * j / width)
                even, odd = x[token, :, 2 * pair], x[token, :, 2 * pair + 1]
                out[token, :, 2 * pair] = even * math.cos(angle) - odd * math.sin(angle)
                out[token, :, 2 * pair + 1] = even * math.sin(angle) + odd * math.cos(angle)
                pair += 1
    return out


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """[T, H, S], [K, H, S], [K, H, S] -> [T, H * S]."""
    heads = []
    for h in range(q.shape[1]):
        scores = q[:, h] @ k[:, h].T / math.sqrt(q.shape[2])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        heads.append(weights / weights.sum(-1, keepdims=True) @ v[:, h])
    return np.concatenate(heads, -1)


def places(start: int, frames: int, rows: int, columns: int) -> list[tuple[int, int, int]]:
    return [(start + f, r, c) for f in range(frames) for r in range(rows) for c in range(columns)]


def patches(x: np.ndarray) -> np.ndarray:
    """[C, F, H, W] -> [T, C * 4], values (c, dy, dx)."""
    channels, frames, height, width = x.shape
    return np.stack(
        [
            x[:, f, 2 * r : 2 * r + 2, 2 * c : 2 * c + 2].reshape(channels * 4)
            for f, r, c in places(0, frames, height // 2, width // 2)
        ]
    )


def block(
    w: Weights,
    name: str,
    x: np.ndarray,
    *,
    projection: np.ndarray,
    camera: np.ndarray,
    text: np.ndarray,
    where: list[tuple[int, int, int]],
    past: tuple[np.ndarray, np.ndarray],
    heads: int,
    eps: float,
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """x [T, D] after one block, and the K and V that it would keep. `projection` is [T, 6, D], `past` the visible K, V."""
    parts = w[f"{name}.modulation"][0] + projection
    shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = (parts[:, i] for i in range(6))

    def split(y: np.ndarray) -> np.ndarray:
        return y.reshape(len(y), heads, -1)

    n = plain_norm(x, eps) * (1 + scale_a) + shift_a
    own = f"{name}.self_attn"
    q = rope(split(rms_norm(linear(w, f"{own}.q", n), w[f"{own}.norm_q.weight"], eps)), where)
    k = rope(split(rms_norm(linear(w, f"{own}.k", n), w[f"{own}.norm_k.weight"], eps)), where)
    v = split(linear(w, f"{own}.v", n))
    seen = attention(q, np.concatenate((past[0], k)), np.concatenate((past[1], v)))
    x = x + linear(w, f"{own}.o", seen) * gate_a

    hidden = silu(linear(w, f"{name}.cam_injector_layer1", camera))
    f = linear(w, f"{name}.cam_injector_layer2", hidden) + camera
    x = (1 + linear(w, f"{name}.cam_scale_layer", f)) * x + linear(w, f"{name}.cam_shift_layer", f)

    n = plain_norm(x, eps) * w[f"{name}.norm3.weight"] + w[f"{name}.norm3.bias"]
    own = f"{name}.cross_attn"
    q = split(rms_norm(linear(w, f"{own}.q", n), w[f"{own}.norm_q.weight"], eps))
    text_k = split(rms_norm(linear(w, f"{own}.k", text), w[f"{own}.norm_k.weight"], eps))
    x = x + linear(w, f"{own}.o", attention(q, text_k, split(linear(w, f"{own}.v", text))))

    n = plain_norm(x, eps) * (1 + scale_f) + shift_f
    return x + linear(w, f"{name}.ffn.2", gelu(linear(w, f"{name}.ffn.0", n))) * gate_f, (k, v)


def forward(
    w: Weights,
    latents: np.ndarray,
    timestep: float,
    *,
    camera: np.ndarray,
    text: np.ndarray,
    start_frame: int,
    past: list[tuple[np.ndarray, np.ndarray]],
    layers: int,
    heads: int,
    freq_dim: int,
    eps: float = 1e-6,
) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
    """The flow [16, F, h, w] of latents [36, F, h, w], camera [384, F, h, w], text [L, C]; K and V of each layer."""
    _, frames, height, width = latents.shape
    where = places(start_frame, frames, height // 2, width // 2)
    weight = w["patch_embedding.weight"]
    x = patches(latents) @ weight.reshape(len(weight), -1).T + w["patch_embedding.bias"]
    cam = linear(w, "patch_embedding_wancamctrl", patches(camera))
    cam = cam + linear(w, "c2ws_hidden_states_layer2", silu(linear(w, "c2ws_hidden_states_layer1", cam)))

    half = freq_dim // 2
    angles = [timestep * 10000.0 ** (-i / half) for i in range(half)]
    sinusoid = np.array([math.cos(a) for a in angles] + [math.sin(a) for a in angles])
    embedding = linear(w, "time_embedding.2", silu(linear(w, "time_embedding.0", sinusoid)))
    projection = linear(w, "time_projection.1", silu(embedding)).reshape(6, -1)
    words = linear(w, "text_embedding.2", gelu(linear(w, "text_embedding.0", text)))

    kept = []
    per_token = np.broadcast_to(projection, (len(x), *projection.shape))
    for layer in range(layers):
        x, kv = block(
            w,
            f"blocks.{layer}",
            x,
            projection=per_token,
            camera=cam,
            text=words,
            where=where,
            past=past[layer],
            heads=heads,
            eps=eps,
        )
        kept.append(kv)

    shift, scale = w["head.modulation"][0] + embedding
    values = linear(w, "head.head", plain_norm(x, eps) * (1 + scale) + shift)
    flow = np.zeros((values.shape[1] // 4, frames, height, width))
    for token, (f, r, c) in enumerate(places(0, frames, height // 2, width // 2)):
        for dy in range(2):
            for dx in range(2):
                flow[:, f, 2 * r + dy, 2 * c + dx] = values[token].reshape(2, 2, -1)[dy, dx]
    return flow, kept
