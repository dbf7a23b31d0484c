"""Writes a DreamZero checkpoint that is small enough for a laptop: the published layout, tiny sizes, RANDOM weights.

    python tiny_checkpoint.py DIRECTORY

It has never seen a robot. What it is good for is to run everything around the model.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from gpu_worker.models.dreamzero.parts import empty_parts
from gpu_worker.models.dreamzero.topology import read_topology

HEAD = {"action_horizon": 8, "action_dim": 8, "max_action_dim": 8, "max_state_dim": 8}
TRANSFORMER = {"dim": 48, "num_heads": 2, "num_layers": 2, "ffn_dim": 64, "freq_dim": 16, "text_dim": 16}
TRANSFORMER |= {"text_len": 16, "frame_seqlen": 8, "num_action_per_block": 8, "hidden_size": 24}
TOPOLOGY = {
    "head": {**HEAD, "transformer": TRANSFORMER},
    "clip": {"image_size": 28, "patch_size": 14, "width": 16, "heads": 2, "layers": 2},
    "text": {"vocabulary": 64, "heads": 2, "head_dim": 8, "ffn_dim": 32, "layers": 1, "buckets": 8},
    "vae": {"base": 4, "mult": [1, 1, 1, 1], "res_blocks": 1},
}
VIEW = 32
DEPLOYMENT = {
    "embodiment": "toy_arm",
    "embodiments": {
        "toy_arm": {
            "prompt": "{language} with the arm",
            "view_size": [VIEW, VIEW],
            "layout": [["side", "wrist"]],
            "state": ["joint_position", "gripper_position"],
            "action": ["joint_position", "gripper_position"],
            "relative": ["joint_position"],
        }
    },
    "negative_prompt": "stand still",
    "tokenizer": "tokenizer",
    "statistics": "experiment_cfg/metadata.json",
    "topology": TOPOLOGY,
}


def part(joints: float) -> dict[str, dict[str, list[float]]]:
    """Quantiles of three joints and a gripper."""
    reach = {"q01": [-joints] * 3, "q99": [joints] * 3}
    return {"joint_position": reach, "gripper_position": {"q01": [0.0], "q99": [1.0]}}


def write(folder: Path) -> Path:
    """Writes all files of the checkpoint; the same weights every time."""
    statistics = {"toy_arm": {"statistics": {"state": part(2.0), "action": part(0.1)}}}
    config = {"action_head_cfg": {"config": {**HEAD, "diffusion_model_cfg": TRANSFORMER}}}
    for name, value in (
        ("worldline.json", DEPLOYMENT),
        ("config.json", config),
        ("experiment_cfg/metadata.json", statistics),
        ("tokenizer/tokenizer_config.json", {"tokenizer_class": "T5Tokenizer", "extra_ids": 0}),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(value, indent=2))
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -4.0)]
    tokenizer = Tokenizer(
        models.Unigram([*pieces, *((c, -6.0) for c in "abcdefghijklmnopqrstuvwxyz")], unk_id=2)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))

    generator = torch.Generator().manual_seed(0)
    weights = {}
    for module in empty_parts(read_topology(config, TOPOLOGY, height=VIEW, width=2 * VIEW)).values():
        shapes = {name: value.shape for name, value in module.module.named_parameters()}
        for name, own in module.names().items():
            values = torch.randn(shapes[own], generator=generator)
            fan = values[0].numel() if not name.endswith(".W") else values.shape[1]
            gain = name.endswith("gamma") or (values.dim() == 1 and name.endswith("weight"))
            weights[name] = 1 + 0.1 * values if gain else values * (0.1 if values.dim() == 1 else fan**-0.5)
    save_file(weights, folder / "model.safetensors")
    return folder


if __name__ == "__main__":
    print(f"random weights in {write(Path(sys.argv[1]))}")
