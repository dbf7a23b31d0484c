"""The models of a checkpoint, loaded and checked against the layout that this pipeline is made for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gpu_worker.models.lingbot_world.attention import SequenceParallel
from gpu_worker.models.lingbot_world.schedule import check_scheduler_config
from gpu_worker.models.lingbot_world.settings import LingBotTopology
from gpu_worker.models.lingbot_world.text import TextEncoder
from gpu_worker.models.lingbot_world.transformer import CausalLingBotWorldTransformer3DModel
from gpu_worker.models.lingbot_world.vae import check_vae_config, wan_vae_class
from gpu_worker.models.lingbot_world.weights import Checkpoint, fill_module


@dataclass(frozen=True, slots=True)
class LingBotParts:
    """What a checkpoint holds.

    Args:
        transformer: predicts the flow.
        vae: diffusers' `AutoencoderKLWan`.
        text: embeds prompts.
        scheduler: the scheduler's configuration; nobody writes into it.
    """

    transformer: CausalLingBotWorldTransformer3DModel
    vae: Any
    text: TextEncoder
    scheduler: Mapping[str, Any]


def load_parts(
    checkpoint: Checkpoint,
    topology: LingBotTopology,
    *,
    device: torch.device,
    dtype: torch.dtype,
    parallel: SequenceParallel | None = None,
) -> LingBotParts:
    """Loads everything; all configurations are checked before the first weight is read.

    Args:
        checkpoint: where.
        topology: what it must be.
        device, dtype: of all weights.
        parallel: ranks that share the transformer's sequence; each has all weights.

    Raises ConfigurationError naming the field, the weight or the file.
    """
    scheduler = checkpoint.config("scheduler")
    check_scheduler_config(scheduler)
    vae_config = checkpoint.config("vae")
    check_vae_config(vae_config, topology.vae)
    transformer = CausalLingBotWorldTransformer3DModel.from_config(
        checkpoint.config("transformer"), pinned=topology.transformer, parallel=parallel
    )
    text = TextEncoder.load(checkpoint, topology.transformer.text_dim, device=device, dtype=dtype)
    with torch.device("meta"):
        vae = wan_vae_class().from_config(vae_config)
    fill_module(vae, checkpoint.weights("vae"), "the VAE", device=device, dtype=dtype)
    transformer.load_weights(checkpoint.weights("transformer"), device=device, dtype=dtype)
    transformer.check_loaded()
    return LingBotParts(transformer, vae, text, scheduler)
