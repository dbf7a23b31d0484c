"""A tiny DreamZero checkpoint in the published layout, with random weights: what a real one has, every file small."""

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from gpu_worker.models.dreamzero.checkpoint import PREFIXES
from gpu_worker.models.dreamzero.config import DreamZeroTopology
from gpu_worker.models.dreamzero.parts import empty_parts
from support.dreamzero_model import TINY, random_weights
from support.lingbot_checkpoint import write_json, write_shards, write_tokenizer

EMBODIMENT = "oxe_droid"
STATISTICS = "experiment_cfg/metadata.json"

JOINTS, GRIPPER = 7, 1


def write_checkpoint(
    folder: Path, topology: DreamZeroTopology = TINY, *, shards: int = 2, seed: int = 0, **head: Any
) -> Path:
    """Writes it and returns the folder; `head` changes fields of `action_head_cfg.config`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", published_config(topology, **head))
    write_json(folder / STATISTICS, statistics())
    write_json(folder / "worldline.json", deployment(topology))
    assert write_tokenizer(folder / "tokenizer") <= topology.text.vocabulary
    write_shards(folder, "model", published_weights(topology, seed), shards)
    return folder


def published_config(topology: DreamZeroTopology = TINY, **head: Any) -> dict[str, Any]:
    """The content of `config.json`."""
    config = asdict(topology.head)
    model = config.pop("transformer")
    return {
        "action_head_cfg": {
            "_target_": "somebody.else",
            "config": {**config, "diffusion_model_cfg": {"_convert_": "object", **model}, **head},
        }
    }


def published_weights(topology: DreamZeroTopology = TINY, seed: int = 0) -> dict[str, torch.Tensor]:
    """All tensors by their published names; those that nothing uses are among them."""
    shapes: dict[str, torch.Size] = {}
    for part in empty_parts(topology).values():
        parameters = dict(part.module.named_parameters(remove_duplicate=False))
        shapes |= {name: parameters[own].shape for name, own in part.names().items()}
    tower, width = PREFIXES["the image tower"], topology.clip.width
    last, unused = f"{tower}transformer.{topology.clip.layers_run}.", f"{tower}transformer.0."
    shapes |= {name.replace(unused, last): shape for name, shape in shapes.items() if name.startswith(unused)}
    shapes |= {f"{tower}post_norm.{name}": torch.Size([width]) for name in ("weight", "bias")}
    shapes[f"{tower}head"] = torch.Size([width, 4])
    return random_weights(shapes, seed)


def statistics() -> dict[str, Any]:
    """The quantiles of states and actions of a made-up arm."""

    def parts(scale: float) -> dict[str, Any]:
        joints = [scale * (1 + 0.1 * joint) for joint in range(JOINTS)]
        return {
            "joint_position": {"q01": [-value for value in joints], "q99": joints},
            "gripper_position": {"q01": [0.0] * GRIPPER, "q99": [1.0] * GRIPPER},
        }

    return {EMBODIMENT: {"statistics": {"state": parts(2.0), "action": parts(0.2)}}}


def deployment(topology: DreamZeroTopology = TINY) -> dict[str, Any]:
    """The content of `worldline.json`."""
    embodiment = {
        "prompt": "a robot is to {language} over the snow",
        "view_size": [topology.height // 2, topology.width // 2],
        "layout": [[{"view": "wrist", "stretch": 2}], ["left", "right"]],
        "optional_views": [],
        "state": ["joint_position", "gripper_position"],
        "action": ["joint_position", "gripper_position"],
        "relative": ["joint_position"],
    }
    return {
        "embodiment": EMBODIMENT,
        "embodiments": {EMBODIMENT: embodiment},
        "negative_prompt": "rain and night",
        "tokenizer": "tokenizer",
        "statistics": STATISTICS,
        "topology": {name: changes(topology, name) for name in ("head", "clip", "text", "vae")},
    }


def changes(topology: DreamZeroTopology, name: str) -> dict[str, Any]:
    """What is different from the published one."""
    return _difference(getattr(topology, name), type(getattr(topology, name))())


def _difference(found: Any, published: Any) -> dict[str, Any]:
    different: dict[str, Any] = {}
    for entry in fields(found):
        own, theirs = getattr(found, entry.name), getattr(published, entry.name)
        if own != theirs:
            nested = hasattr(own, "__dataclass_fields__")
            different[entry.name] = _difference(own, theirs) if nested else own
    return different
