"""A DreamZero small enough for a test, with random weights, and inputs that fit it."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from gpu_worker.kv.state import ARDiffusionKVState
from gpu_worker.models.dreamzero.config import (
    ClipGeometry,
    DreamZeroConfig,
    DreamZeroTopology,
    DreamZeroTransformerConfig,
    TextGeometry,
)
from gpu_worker.models.dreamzero.passes import Frames, Registers
from gpu_worker.models.dreamzero.spec import IMAGE, POSITIVE, TEXT, dreamzero_kv_spec, owned_bytes
from gpu_worker.models.dreamzero.transformer import DreamZeroTransformer
from support.dreamzero_oracles.transformer import Sizes
from support.kv_cache import make_state
from support.lingbot_checkpoint import TINY_VAE
from support.lingbot_model import seeded

TINY = DreamZeroTopology(
    head=DreamZeroConfig(
        action_horizon=4,
        action_dim=10,
        max_action_dim=10,
        max_state_dim=12,
        transformer=DreamZeroTransformerConfig(
            dim=24,
            num_heads=2,
            num_layers=2,
            ffn_dim=32,
            freq_dim=8,
            text_dim=10,
            text_len=7,
            frame_seqlen=6,
            num_action_per_block=4,
            hidden_size=14,
        ),
    ),
    clip=ClipGeometry(image_size=28, patch_size=14, width=8, heads=2, layers=3),
    text=TextGeometry(vocabulary=60, heads=2, head_dim=4, ffn_dim=16, layers=2, buckets=8, max_distance=16),
    vae=TINY_VAE,
    height=32,
    width=48,
)
"""Two views of 16 x 24 below one of twice the width; a latent frame is 4 x 6, 2 x 3 tokens."""

SIZES = Sizes(
    layers=TINY.head.transformer.num_layers,
    heads=TINY.head.transformer.num_heads,
    freq_dim=TINY.head.transformer.freq_dim,
    frames_per_block=TINY.head.num_frame_per_block,
    window_frames=TINY.head.window_frames,
)
"""The same for the oracles."""


def random_weights(shapes: Mapping[str, torch.Size], seed: int = 0) -> dict[str, torch.Tensor]:
    """One float32 tensor a name: unit gain for matrices, small for vectors, around one for norms."""
    generator = seeded(seed)
    weights = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        fans = math.prod(shape[1:]) if not name.endswith(".W") else shape[1]
        if name.endswith("gamma") or (len(shape) == 1 and name.endswith("weight")):
            weights[name] = 1 + 0.1 * values
        elif len(shape) == 1 or name.endswith((".b", "modulation", "_embedding")):
            weights[name] = 0.2 * values
        else:
            weights[name] = values / math.sqrt(fans)
    return weights


def shapes_of(module: torch.nn.Module) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in module.named_parameters()}


def tiny_model(
    topology: DreamZeroTopology = TINY, *, dtype: torch.dtype = torch.float32
) -> DreamZeroTransformer:
    """The same weights every time."""
    model = DreamZeroTransformer(topology.head, topology.clip)
    fill(model, random_weights(shapes_of(model)))
    return model.to(dtype)


def fill(module: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    module.load_state_dict(dict(weights), strict=True)


def arrays(module: torch.nn.Module) -> dict[str, np.ndarray[Any, Any]]:
    """The weights as float64 arrays."""
    return {name: value.double().numpy() for name, value in module.named_parameters()}


def random_latents(frames: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(1, 16, frames, *TINY.latent_size, generator=seeded(seed))


def random_condition(frames: int, seed: int = 2) -> torch.Tensor:
    return torch.randn(1, 20, frames, *TINY.latent_size, generator=seeded(seed))


def random_text(seed: int = 3) -> torch.Tensor:
    model = TINY.head.transformer
    text = torch.randn(1, model.text_len, model.text_dim, generator=seeded(seed))
    text[:, -2:] = 0  # padding is zero vectors, and is attended to
    return text


def random_image(seed: int = 4) -> torch.Tensor:
    return torch.randn(1, TINY.clip.tokens, TINY.clip.width, generator=seeded(seed))


def random_action(seed: int = 5) -> torch.Tensor:
    head = TINY.head
    return torch.randn(1, head.action_horizon, head.max_action_dim, generator=seeded(seed))


def random_state(seed: int = 6) -> torch.Tensor:
    return torch.randn(1, 1, TINY.head.max_state_dim, generator=seeded(seed))


def array(x: torch.Tensor) -> np.ndarray[Any, Any]:
    """The only sample, in float64."""
    return x[0].double().numpy()


def frames_at(start: int, count: int, timestep: Any = 0.0, seed: int = 0) -> Frames:
    return Frames(random_latents(count, seed + 10), random_condition(count, seed + 11), start, timestep)


def registers(timestep: Any = 500.0, seed: int = 5) -> Registers:
    return Registers(random_action(seed), timestep, random_state())


def tiny_session(
    model: DreamZeroTransformer, *, text: torch.Tensor | None = None, image: torch.Tensor | None = None
) -> ARDiffusionKVState:
    """A session's KV with text and image of its positive branch published."""
    kv = make_state(dreamzero_kv_spec(TINY, owned=owned_bytes(TINY, itemsize=4), session_capacity=1))
    words, picture = random_text() if text is None else text, random_image() if image is None else image
    kv.populate_cross_attention(POSITIVE, TEXT, model.project_text(words))
    kv.populate_cross_attention(POSITIVE, IMAGE, model.project_image(picture))
    return kv
