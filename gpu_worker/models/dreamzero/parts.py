"""The models of a checkpoint, loaded and checked against the layout that they are made for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu_worker.models.dreamzero.checkpoint import DreamZeroCheckpoint
from gpu_worker.models.dreamzero.clip import ClipImageTower
from gpu_worker.models.dreamzero.config import DreamZeroConfig, DreamZeroTopology
from gpu_worker.models.dreamzero.text import TIED, DreamZeroText, published_name, text_model
from gpu_worker.models.dreamzero.transformer import DreamZeroTransformer
from gpu_worker.models.dreamzero.vae import published_names, wan_vae
from gpu_worker.models.dreamzero.weights import Part


@dataclass(frozen=True, slots=True)
class DreamZeroParts:
    """What a checkpoint holds.

    Args:
        config: its configuration, noise settings included.
        transformer: predicts the flow.
        clip: sees the first picture of a rollout.
        text: embeds prompts.
        vae: diffusers' `AutoencoderKLWan`.
    """

    config: DreamZeroConfig
    transformer: DreamZeroTransformer
    clip: ClipImageTower
    text: DreamZeroText
    vae: Any


def empty_parts(topology: DreamZeroTopology) -> dict[str, Part]:
    """The modules of that layout without memory, by what they are called in messages."""
    model = topology.head.transformer
    with torch.device("meta"):
        tower = ClipImageTower(topology.clip)
        modules = (
            Part("the transformer", DreamZeroTransformer(topology.head, topology.clip)),
            Part("the text encoder", text_model(topology.text, model.text_dim), published_name, TIED),
            Part("the image tower", tower, ignored=tower.unused),
            Part("the VAE", wan_vae(topology.vae), published_names(topology.vae)),
        )
    return {part.what: part for part in modules}


def load_parts(
    checkpoint: DreamZeroCheckpoint,
    topology: DreamZeroTopology | None = None,
    *,
    tokenizer: str | Path = "tokenizer",
    device: torch.device,
    dtype: torch.dtype,
) -> DreamZeroParts:
    """Loads everything; the configuration and all names are checked before the first weight is read.

    Args:
        checkpoint: the directory.
        topology: what it must be; None is the published one.
        tokenizer: a folder, of the checkpoint unless its path is absolute.
        device, dtype: of the weights.

    Raises:
        ConfigurationError: naming the field, the weight or the file.
    """
    expected = DreamZeroTopology() if topology is None else topology
    config = DreamZeroConfig.from_checkpoint(checkpoint.config(), expected.head)
    parts = empty_parts(expected)
    text_encoder: Any = parts["the text encoder"].module
    text = DreamZeroText.open(
        text_encoder,
        checkpoint.folder(tokenizer),
        vocabulary=expected.text.vocabulary,
        tokens=config.transformer.text_len,
    )
    for part in parts.values():
        part.check_names(checkpoint)
    for part in parts.values():
        part.load(checkpoint, device=device, dtype=dtype)
    transformer, clip = parts["the transformer"].module, parts["the image tower"].module
    assert isinstance(transformer, DreamZeroTransformer)
    assert isinstance(clip, ClipImageTower)
    transformer.config = config
    return DreamZeroParts(config, transformer, clip, text, parts["the VAE"].module)
