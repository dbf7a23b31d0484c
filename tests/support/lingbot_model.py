"""A LingBot transformer small enough for a test, with random weights, and inputs that fit it."""

import math
from typing import Any

import numpy as np
import torch

from contracts.kv_spec import ARDiffusionKVCacheSpec
from gpu_worker.models.lingbot_world.config import LingBotTransformerConfig
from gpu_worker.models.lingbot_world.spec import lingbot_kv_spec, owned_bytes
from gpu_worker.models.lingbot_world.transformer import CausalLingBotWorldTransformer3DModel
from support.kv_cache import CPU

HEIGHT, WIDTH = 32, 48
"""Pixels: latents of 4 x 6, so 2 x 3 tokens a frame."""

TEXT_TOKENS = 5

TINY = LingBotTransformerConfig(
    num_attention_heads=2,
    attention_head_dim=12,
    text_dim=10,
    freq_dim=8,
    ffn_dim=32,
    num_layers=2,
)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_weights(model: CausalLingBotWorldTransformer3DModel, seed: int = 0) -> dict[str, torch.Tensor]:
    """One float32 tensor a name: unit gain for matrices, small for vectors, around one for norms."""
    generator = seeded(seed)
    weights = {}
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if ".norm" in name and name.endswith("weight"):
            weights[name] = 1 + 0.1 * values
        elif parameter.dim() == 1 or name.endswith("modulation"):
            weights[name] = 0.2 * values
        else:
            weights[name] = values / math.sqrt(math.prod(parameter.shape[1:]))
    return weights


def tiny_model(
    config: LingBotTransformerConfig = TINY, *, parallel: Any = None, dtype: torch.dtype = torch.float32
) -> CausalLingBotWorldTransformer3DModel:
    """The same weights every time."""
    model = CausalLingBotWorldTransformer3DModel.from_config({}, pinned=config, parallel=parallel)
    model.load_weights(random_weights(model).items(), device=CPU, dtype=dtype)
    model.check_loaded()
    return model


def arrays(model: CausalLingBotWorldTransformer3DModel) -> dict[str, np.ndarray]:
    """The weights as float64 arrays."""
    return {name: value.double().numpy() for name, value in model.named_parameters()}


def tiny_spec(config: LingBotTransformerConfig = TINY, **options: Any) -> ARDiffusionKVCacheSpec:
    """The KV spec that fits `tiny_model` at this module's size."""
    owned = owned_bytes(HEIGHT, WIDTH, transformer=config, itemsize=4)
    return lingbot_kv_spec(HEIGHT, WIDTH, owned=owned, transformer=config, text_tokens=TEXT_TOKENS, **options)


def random_camera(frames: int = 3, *, batch: int = 1, seed: int = 1) -> torch.Tensor:
    return torch.randn(batch, 384, frames, HEIGHT // 8, WIDTH // 8, generator=seeded(seed))


def random_condition(frames: int = 3, *, seed: int = 2) -> torch.Tensor:
    return torch.randn(1, 20, frames, HEIGHT // 8, WIDTH // 8, generator=seeded(seed))


def random_text(seed: int = 3, *, batch: int = 1) -> torch.Tensor:
    text = torch.randn(batch, TEXT_TOKENS, TINY.text_dim, generator=seeded(seed))
    text[:, -2:] = 0  # padding is zero vectors, and is attended to
    return text
