"""A tiny checkpoint in the published layout, with random weights: what a real one has, every file small."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from gpu_worker.models.lingbot_world.config import LingBotTransformerConfig
from gpu_worker.models.lingbot_world.spec import VaeGeometry
from gpu_worker.models.lingbot_world.vae import wan_vae_class
from support.lingbot_model import TINY, random_weights, seeded, tiny_model

TINY_VAE = VaeGeometry(base=4, mult=(1, 1, 1, 1), res_blocks=1)

WORDS = ("a", "valley", "river", "rain", "over", "the", "snow", "falls", "night", "and", "still", "water")

VAE_CONFIG: dict[str, Any] = {
    "_class_name": "AutoencoderKLWan",
    "base_dim": TINY_VAE.base,
    "z_dim": TINY_VAE.z,
    "dim_mult": list(TINY_VAE.mult),
    "num_res_blocks": TINY_VAE.res_blocks,
    "attn_scales": [],
    "temperal_downsample": list(TINY_VAE.temporal_downsample),
    "dropout": 0.0,
}
SCHEDULER_CONFIG = {
    "_class_name": "UniPCMultistepScheduler",
    "num_train_timesteps": 1000,
    "prediction_type": "flow_prediction",
    "predict_x0": True,
    "use_flow_sigmas": True,
    "solver_order": 2,
    "solver_type": "bh2",
    "final_sigmas_type": "zero",
    "timestep_spacing": "linspace",
    "flow_shift": 5.0,
}
MODEL_INDEX = {
    "_class_name": "LingBotWorldCausalDMDPipeline",
    "_diffusers_version": "0.40.0",
    "scheduler": ["diffusers", "UniPCMultistepScheduler"],
    "text_encoder": ["transformers", "UMT5EncoderModel"],
    "tokenizer": ["transformers", "T5TokenizerFast"],
    "transformer": ["diffusers", "CausalLingBotWorldTransformer3DModel"],
    "vae": ["diffusers", "AutoencoderKLWan"],
}


@cache
def tiny_vae(dtype: torch.dtype = torch.float32) -> Any:
    """The same weights every time; shared, since nothing may change it."""
    vae = wan_vae_class().from_config(VAE_CONFIG)
    generator = seeded(11)
    for name, parameter in vae.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if name.endswith("gamma"):
            values = 1 + 0.1 * values
        elif parameter.dim() == 1:
            values = 0.1 * values
        else:
            values = values / parameter[0].numel() ** 0.5
        parameter.data = values
    return vae.to(dtype).requires_grad_(False).eval()


def text_config(vocabulary: int) -> dict[str, Any]:
    return {
        "architectures": ["UMT5EncoderModel"],
        "model_type": "umt5",
        "vocab_size": vocabulary,
        "d_model": TINY.text_dim,
        "d_kv": 4,
        "d_ff": 16,
        "num_layers": 2,
        "num_heads": 2,
        "feed_forward_proj": "gated-gelu",
    }


def write_checkpoint(
    folder: Path, config: LingBotTransformerConfig = TINY, *, shards: int = 2, seed: int = 0
) -> Path:
    """Writes it and returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "model_index.json", MODEL_INDEX)
    write_json(folder / "scheduler" / "scheduler_config.json", SCHEDULER_CONFIG)
    write_json(folder / "vae" / "config.json", VAE_CONFIG)
    save_file(dict(tiny_vae().state_dict()), folder / "vae" / "diffusion_pytorch_model.safetensors")
    write_json(folder / "transformer" / "config.json", transformer_config(config))
    write_shards(
        folder / "transformer",
        "diffusion_pytorch_model",
        random_weights(tiny_model(config), seed),
        shards,
    )
    vocabulary = write_tokenizer(folder / "tokenizer")
    write_text_encoder(folder / "text_encoder", vocabulary)
    return folder


def transformer_config(config: LingBotTransformerConfig) -> dict[str, Any]:
    fields = {name: getattr(config, name) for name in config.__dataclass_fields__}
    return {"_class_name": "CausalLingBotWorldTransformer3DModel"} | fields


def write_shards(folder: Path, stem: str, weights: dict[str, torch.Tensor], count: int) -> None:
    """Spread over `count` files, with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for number in range(count):
        shard = f"{stem}-{number + 1:05}-of-{count:05}.safetensors"
        part = {name: weights[name].contiguous() for name in sorted(weights)[number::count]}
        weight_map |= dict.fromkeys(part, shard)
        save_file(part, folder / shard)
    total = sum(value.nbytes for value in weights.values())
    write_json(
        folder / f"{stem}.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": weight_map},
    )


def write_text_encoder(folder: Path, vocabulary: int) -> None:
    from transformers import UMT5Config, UMT5EncoderModel

    config = text_config(vocabulary)
    write_json(folder / "config.json", config)
    model = UMT5EncoderModel(UMT5Config(**{key: config[key] for key in config if key != "architectures"}))
    generator = seeded(12)
    weights = {
        name: torch.randn(value.shape, generator=generator) * 0.3 + (value.dim() == 1)
        for name, value in model.named_parameters()
    }
    write_shards(folder, "model", weights, 2)


def write_tokenizer(folder: Path) -> int:
    """A tokenizer of a dozen words; the size of its vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -4.0)]
    pieces += [(f"▁{word}", -2.0) for word in WORDS]
    pieces += [(letter, -6.0) for letter in "abcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "T5Tokenizer", "extra_ids": 0} | special)
    write_json(folder / "special_tokens_map.json", special)
    return len(pieces)


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def change_json(path: Path, **changes: Any) -> None:
    """Writes a JSON file anew with some fields changed."""
    write_json(path, json.loads(path.read_text(encoding="utf-8")) | changes)
