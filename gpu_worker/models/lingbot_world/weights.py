"""A checkpoint directory in the published layout: its configurations and its weights, strictly, and from there only.

    model_index.json                      class of each component
    transformer/  vae/                    config.json, diffusion_pytorch_model*.safetensors
    text_encoder/                         config.json, model*.safetensors
    tokenizer/                            tokenizer.json and its settings
    scheduler/                            scheduler_config.json

Weights are one file, or shards with an index. Messages name components and files, never a path.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from contracts.errors import ConfigurationError
from gpu_worker.models.checkpoint_folder import CheckpointFolder
from gpu_worker.models.lingbot_world.config import CLASS_NAME

PIPELINE_CLASS: Final = "LingBotWorldCausalDMDPipeline"

COMPONENTS: Final[Mapping[str, str]] = {
    "transformer": CLASS_NAME,
    "vae": "AutoencoderKLWan",
    "text_encoder": "UMT5EncoderModel",
    "tokenizer": "T5TokenizerFast",
    "scheduler": "UniPCMultistepScheduler",
}

_STEMS: Final = {"text_encoder": "model"}
_STEM: Final = "diffusion_pytorch_model"


class Checkpoint:
    """A local directory.

    Args:
        directory: where it is.

    Raises:
        ConfigurationError: it is not there, or `model_index.json` names another class; names the component.
    """

    def __init__(self, directory: object) -> None:
        self._folder = CheckpointFolder(directory, "lingbot-world")
        index = self._folder.json("model_index.json")
        self._check_class("_class_name", index.get("_class_name"), PIPELINE_CLASS)
        for name, expected in COMPONENTS.items():
            entry = index.get(name)
            found = entry[-1] if isinstance(entry, list) and len(entry) == 2 else entry
            self._check_class(name, found, expected)

    def folder(self, component: str) -> Path:
        """Where a component's files are."""
        return self._folder.path(component)

    def config(self, component: str) -> Mapping[str, Any]:
        """The component's configuration; ConfigurationError where it is missing or no JSON object."""
        name = "scheduler_config.json" if component == "scheduler" else "config.json"
        return self._folder.json(f"{component}/{name}")

    def weights(self, component: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors, one at a time, on the CPU.

        Raises:
            ConfigurationError: a file is missing or damaged, or a shard does not hold what the index says.
        """
        files = self._folder.weight_files(f"{component}/{_STEMS.get(component, _STEM)}")
        yield from self._folder.weights(files, files)

    @staticmethod
    def _check_class(name: str, found: object, expected: str) -> None:
        if found != expected:
            raise ConfigurationError(
                f"model_index.json: {name} must be {expected}, the checkpoint says {found!r:.80}", field=name
            )


def fill_module(
    module: torch.nn.Module,
    weights: Iterable[tuple[str, torch.Tensor]],
    what: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    tied: Mapping[str, str] | None = None,
) -> None:
    """Gives a module from the meta device its weights.

    Args:
        module: without memory.
        weights: names and tensors.
        what: the module, in messages.
        device, dtype: of the weights.
        tied: name -> the weight that it is the same as; either may be missing then.

    Raises:
        ConfigurationError: a name is unknown or missing, or a shape is wrong; names the weight.
    """
    tied = tied or {}
    shapes = {name: value.shape for name, value in module.named_parameters(remove_duplicate=False)}
    loaded: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        if name not in shapes:
            raise ConfigurationError(f"{what} has no weight {name!r:.120}", field=name[:120])
        if tensor.shape != shapes[name]:
            raise ConfigurationError(
                f"{what}: weight {name} must have shape {list(shapes[name])}, got {list(tensor.shape)}",
                field=name,
            )
        loaded[tied.get(name, name)] = tensor.to(device=device, dtype=dtype)
    for name in shapes:
        if tied.get(name, name) not in loaded:
            raise ConfigurationError(f"{what}: weight {name} is missing", field=name)
    parameters = {name: torch.nn.Parameter(value, requires_grad=False) for name, value in loaded.items()}
    for name in shapes:
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, parameters[tied.get(name, name)])
    module.requires_grad_(False).eval()
