"""The transformer from its formulas, in plain NumPy float64, without any cache.

A forward is computed over its whole history at once: the blocks of frames that stayed, each at its own timestep, and the
present one, with a mask that lets a block see itself, what stayed before it, and nothing after it. `w` maps names of the
checkpoint, without their prefix, to arrays.
"""

import math
from dataclasses import dataclass

import numpy as np

Weights = dict[str, np.ndarray]


@dataclass(frozen=True)
class Sizes:
    """What the weights do not say."""

    layers: int
    heads: int
    freq_dim: int
    frames_per_block: int
    window_frames: int
    eps: float = 1e-6


@dataclass(frozen=True)
class Block:
    """Frames that go through the model together.

    Args:
        latents: [16, F, h, w].
        condition: [20, F, h, w].
        start: absolute index of the first frame.
        timesteps: one a frame.
    """

    latents: np.ndarray
    condition: np.ndarray
    start: int
    timesteps: tuple[float, ...]

    @property
    def frames(self) -> range:
        return range(self.start, self.start + self.latents.shape[1])


@dataclass(frozen=True)
class Registers:
    """actions [A, D_a], one timestep each, and states [S, D_s]."""

    actions: np.ndarray
    timesteps: tuple[float, ...]
    states: np.ndarray


# ---------------------------------------------------------------------------------------------------- small formulas


def linear(w: Weights, name: str, x: np.ndarray) -> np.ndarray:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def category(w: Weights, name: str, x: np.ndarray) -> np.ndarray:
    return x @ w[f"{name}.W"][0] + w[f"{name}.b"][0]


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu_exact(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def plain_norm(x: np.ndarray, eps: float) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)


def affine_norm(w: Weights, name: str, x: np.ndarray, eps: float) -> np.ndarray:
    return plain_norm(x, eps) * w[f"{name}.weight"] + w[f"{name}.bias"]


def rms_norm(w: Weights, name: str, x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * w[f"{name}.weight"]


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, sees: np.ndarray | None = None) -> np.ndarray:
    """[T, H, S], [K, H, S], [K, H, S] -> [T, H * S]; `sees` [T, K] says what each query attends to."""
    heads = []
    for h in range(q.shape[1]):
        scores = q[:, h] @ k[:, h].T / math.sqrt(q.shape[2])
        if sees is not None:
            scores = np.where(sees, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        heads.append(weights / weights.sum(-1, keepdims=True) @ v[:, h])
    return np.concatenate(heads, -1)


# ---------------------------------------------------------------------------------------------------- positions


def video_angles(place: tuple[int, int, int], size: int) -> list[float]:
    """One a pair of a head, shared out as [time | height | width]."""
    side = 2 * (size // 6)
    return [
        position * 10000.0 ** (-2 * j / width)
        for position, width in zip(place, (size - 2 * side, side, side), strict=True)
        for j in range(width // 2)
    ]


def line_angles(position: int, size: int) -> list[float]:
    """One a pair, the whole head by one position."""
    return [position * 10000.0 ** (-2 * j / size) for j in range(size // 2)]


def turn(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Neighbouring values of x [T, H, S] as complex numbers, turned by angles [T, S / 2]."""
    numbers = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)[:, None, :]
    return np.stack((numbers.real, numbers.imag), -1).reshape(x.shape)


def places(start: int, frames: int, rows: int, columns: int) -> list[tuple[int, int, int]]:
    return [(start + f, r, c) for f in range(frames) for r in range(rows) for c in range(columns)]


# ---------------------------------------------------------------------------------------------------- tokens


def patches(x: np.ndarray) -> np.ndarray:
    """[C, F, H, W] -> [T, C * 4], values (c, dy, dx)."""
    channels, frames, height, width = x.shape
    return np.stack(
        [
            x[:, f, 2 * r : 2 * r + 2, 2 * c : 2 * c + 2].reshape(channels * 4)
            for f, r, c in places(0, frames, height // 2, width // 2)
        ]
    )


def time_embedding(w: Weights, timestep: float, freq_dim: int) -> np.ndarray:
    half = freq_dim // 2
    angles = np.array([timestep * 10000.0 ** (-i / half) for i in range(half)])
    sinusoid = np.concatenate((np.cos(angles), np.sin(angles)))
    return linear(w, "time_embedding.2", silu(linear(w, "time_embedding.0", sinusoid)))


def action_tokens(w: Weights, registers: Registers) -> np.ndarray:
    dim = w["action_encoder.W1.W"].shape[2]
    half = dim // 2
    tokens = []
    for action, timestep in zip(registers.actions, registers.timesteps, strict=True):
        angles = np.array([timestep * math.exp(-i * math.log(10000) / half) for i in range(half)])
        lifted = category(w, "action_encoder.W1", action)
        both = np.concatenate((lifted, np.sin(angles), np.cos(angles)))
        tokens.append(category(w, "action_encoder.W3", silu(category(w, "action_encoder.W2", both))))
    return np.stack(tokens)


def relu_mlp(w: Weights, name: str, x: np.ndarray) -> np.ndarray:
    return category(w, f"{name}.layer2", np.maximum(category(w, f"{name}.layer1", x), 0))


def embed_text(w: Weights, text: np.ndarray) -> np.ndarray:
    return linear(w, "text_embedding.2", gelu_tanh(linear(w, "text_embedding.0", text)))


def embed_image(w: Weights, image: np.ndarray) -> np.ndarray:
    x = affine_norm(w, "img_emb.proj.0", image, 1e-5)
    x = linear(w, "img_emb.proj.3", gelu_exact(linear(w, "img_emb.proj.1", x)))
    return affine_norm(w, "img_emb.proj.4", x, 1e-5)


# ---------------------------------------------------------------------------------------------------- one layer


def layer(
    w: Weights,
    name: str,
    x: np.ndarray,
    *,
    projection: np.ndarray,
    angles: np.ndarray,
    sees: np.ndarray,
    text: np.ndarray,
    image: np.ndarray,
    sizes: Sizes,
) -> np.ndarray:
    """x [T, D] after one block of the model; `projection` is [T, 6, D], `text` and `image` are embedded."""
    eps = sizes.eps
    parts = w[f"{name}.modulation"][0] + projection
    shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = (parts[:, i] for i in range(6))

    def split(y: np.ndarray) -> np.ndarray:
        return y.reshape(len(y), sizes.heads, -1)

    own = f"{name}.self_attn"
    n = plain_norm(x, eps) * (1 + scale_a) + shift_a
    q = turn(split(rms_norm(w, f"{own}.norm_q", linear(w, f"{own}.q", n), eps)), angles)
    k = turn(split(rms_norm(w, f"{own}.norm_k", linear(w, f"{own}.k", n), eps)), angles)
    x = x + linear(w, f"{own}.o", attention(q, k, split(linear(w, f"{own}.v", n)), sees)) * gate_a

    own = f"{name}.cross_attn"
    n = affine_norm(w, f"{name}.norm3", x, eps)
    q = split(rms_norm(w, f"{own}.norm_q", linear(w, f"{own}.q", n), eps))
    text_k = split(rms_norm(w, f"{own}.norm_k", linear(w, f"{own}.k", text), eps))
    image_k = split(rms_norm(w, f"{own}.norm_k_img", linear(w, f"{own}.k_img", image), eps))
    seen = attention(q, text_k, split(linear(w, f"{own}.v", text)))
    seen = seen + attention(q, image_k, split(linear(w, f"{own}.v_img", image)))
    x = x + linear(w, f"{own}.o", seen)

    n = plain_norm(x, eps) * (1 + scale_f) + shift_f
    return x + linear(w, f"{name}.ffn.2", gelu_tanh(linear(w, f"{name}.ffn.0", n))) * gate_f


# ---------------------------------------------------------------------------------------------------- one forward


def forward(
    w: Weights,
    present: Block,
    *,
    history: list[Block],
    registers: Registers | None,
    text: np.ndarray,
    image: np.ndarray,
    sizes: Sizes,
) -> tuple[np.ndarray, np.ndarray | None]:
    """The flow of video [16, F, h, w] and actions [A, D_a].

    Args:
        w: the weights.
        present: the frames at hand.
        history: what stayed since the rollout began, in order.
        registers: beside `present`.
        text: [L, text_dim] as the text encoder gives it.
        image: [N, width] as the image tower gives it.
        sizes: of the model.
    """
    blocks = [*history, present]
    _, _, height, width = present.latents.shape
    rows, columns = height // 2, width // 2
    head_size = w["patch_embedding.bias"].size // sizes.heads

    tokens, times, angles, owner, frame = [], [], [], [], []
    kernel = w["patch_embedding.weight"].reshape(w["patch_embedding.bias"].size, -1)
    for index, block in enumerate(blocks):
        both = np.concatenate((block.latents, block.condition))
        tokens.extend(patches(both) @ kernel.T + w["patch_embedding.bias"])
        for place in places(block.start, len(block.frames), rows, columns):
            times.append(block.timesteps[place[0] - block.start])
            angles.append(video_angles(place, head_size))
            owner.append(index)
            frame.append(place[0])
    if registers is not None:
        counts = len(registers.actions), len(registers.states)
        tokens.extend([*action_tokens(w, registers), *relu_mlp(w, "state_encoder", registers.states)])
        times.extend(registers.timesteps)
        times.extend(registers.timesteps[:: counts[0] // counts[1]])
        block_index = max(0, (present.start - 1) // sizes.frames_per_block)
        for count in counts:
            angles.extend(line_angles(block_index * count + i, head_size) for i in range(count))
        owner.extend([len(history)] * sum(counts))
        frame.extend([present.frames[-1]] * sum(counts))

    embeddings = {time: time_embedding(w, time, sizes.freq_dim) for time in set(times)}
    embedding = np.stack([embeddings[time] for time in times])
    projection = linear(w, "time_projection.1", silu(embedding)).reshape(len(times), 6, -1)

    owners, frames = np.array(owner), np.array(frame)
    ends = np.array([block.frames[-1] + 1 for block in blocks])[owners]
    sees = owners[None, :] <= owners[:, None]
    sees &= frames[None, :] >= ends[:, None] - sizes.window_frames

    x = np.stack(tokens)
    words, picture = embed_text(w, text), embed_image(w, image)
    for number in range(sizes.layers):
        x = layer(
            w,
            f"blocks.{number}",
            x,
            projection=projection,
            angles=np.array(angles),
            sees=sees,
            text=words,
            image=picture,
            sizes=sizes,
        )

    first = sum(len(block.frames) for block in history) * rows * columns
    last = first + len(present.frames) * rows * columns
    video = head(w, x[first:last], embedding[first:last], present.latents.shape, sizes.eps)
    if registers is None:
        return video, None
    return video, relu_mlp(w, "action_decoder", x[last : last + len(registers.actions)])


def head(w: Weights, x: np.ndarray, embedding: np.ndarray, shape: tuple[int, ...], eps: float) -> np.ndarray:
    """Video tokens [T, D] to [16, F, h, w]; a token's values are (dy, dx, channel)."""
    shift = w["head.modulation"][0, 0] + embedding
    scale = w["head.modulation"][0, 1] + embedding
    values = linear(w, "head.head", plain_norm(x, eps) * (1 + scale) + shift)
    flow = np.zeros(shape)
    for token, (f, r, c) in enumerate(places(0, shape[1], shape[2] // 2, shape[3] // 2)):
        for dy in range(2):
            for dx in range(2):
                flow[:, f, 2 * r + dy, 2 * c + dx] = values[token].reshape(2, 2, -1)[dy, dx]
    return flow
