"""A checkpoint directory in the published layout: its configurations and its weights, strictly, and from there only.

    model_index.json                      class of each component
    transformer/  vae/                    config.json, diffusion_pytorch_model*.safetensors
    text_encoder/                         config.json, model*.safetensors
    tokenizer/                            tokenizer.json and its settings
    scheduler/                            scheduler_config.json

Weights are one file, or shards with an index. Messages name components and files, never a path.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import safetensors
import torch

from contracts.errors import ConfigurationError
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
_MOST_JSON_BYTES: Final = 64 << 20
_WEIGHT_TYPES: Final = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Checkpoint:
    """A local directory.

    Args:
        directory: where it is.

    Raises:
        ConfigurationError: it is not there, or `model_index.json` names another class; names the component.
    """

    def __init__(self, directory: object) -> None:
        if not isinstance(directory, str | Path) or not str(directory):
            raise ConfigurationError("lingbot-world needs a checkpoint directory", field="checkpoint")
        self._root = Path(directory)
        if not self._root.is_dir():
            raise ConfigurationError("the checkpoint directory does not exist", field="checkpoint")
        index = self._json("model_index.json")
        self._check_class("_class_name", index.get("_class_name"), PIPELINE_CLASS)
        for name, expected in COMPONENTS.items():
            entry = index.get(name)
            found = entry[-1] if isinstance(entry, list) and len(entry) == 2 else entry
            self._check_class(name, found, expected)

    def folder(self, component: str) -> Path:
        """Where a component's files are."""
        return self._root / component

    def config(self, component: str) -> Mapping[str, Any]:
        """The component's configuration; ConfigurationError where it is missing or no JSON object."""
        name = "scheduler_config.json" if component == "scheduler" else "config.json"
        return self._json(f"{component}/{name}")

    def weights(self, component: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors, one at a time, on the CPU.

        Raises:
            ConfigurationError: a file is missing or damaged, or a shard does not hold what the index says.
        """
        stem = _STEMS.get(component, _STEM)
        index = f"{component}/{stem}.safetensors.index.json"
        if (self._root / index).exists():
            for shard, names in _shards(index, self._json(index).get("weight_map")).items():
                yield from self._file(f"{component}/{shard}", names)
        else:
            yield from self._file(f"{component}/{stem}.safetensors", None)

    def _file(self, file: str, names: set[str] | None) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            with safetensors.safe_open(self._root / file, framework="pt") as opened:
                held = set(opened.keys())
                for name in sorted(held ^ (held if names is None else names)):
                    raise ConfigurationError(f"{file} and its index disagree about {name:.120}", field=name)
                for name in sorted(held):
                    yield name, _checked_type(name, opened.get_tensor(name))
        except OSError:
            raise ConfigurationError(f"{file} is missing or can't be read", field=file) from None
        except safetensors.SafetensorError:
            raise ConfigurationError(f"{file} is damaged", field=file) from None

    def _json(self, file: str) -> Mapping[str, Any]:
        try:
            with (self._root / file).open("rb") as opened:
                value = json.loads(opened.read(_MOST_JSON_BYTES))
        except OSError:
            raise ConfigurationError(f"{file} is missing or can't be read", field=file) from None
        except (ValueError, RecursionError):
            raise ConfigurationError(f"{file} is no JSON", field=file) from None
        if not isinstance(value, Mapping):
            raise ConfigurationError(f"{file} must hold an object", field=file)
        return value

    @staticmethod
    def _check_class(name: str, found: object, expected: str) -> None:
        if found != expected:
            raise ConfigurationError(
                f"model_index.json: {name} must be {expected}, the checkpoint says {found!r:.80}", field=name
            )


def _checked_type(name: str, tensor: torch.Tensor) -> torch.Tensor:
    # Anything else would be cast without complaint: quantised weights lose their scale, complex ones half of themselves.
    if tensor.dtype not in _WEIGHT_TYPES:
        raise ConfigurationError(
            f"weight {name:.120} must be of floating point numbers, got {tensor.dtype}", field=name[:120]
        )
    return tensor


def _shards(index: str, weight_map: object) -> dict[str, set[str]]:
    """Names by shard; ConfigurationError for an index that is none, or that leads out of its folder."""
    shards: dict[str, set[str]] = {}
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise ConfigurationError(f"{index} has no weight_map", field="weight_map")
    for name, shard in weight_map.items():
        if (
            not isinstance(shard, str)
            or not shard.isprintable()
            or Path(shard).name != shard
            or shard == ".."
        ):
            raise ConfigurationError(
                f"{index}: the file of {name!r:.120} must be a plain name", field="weight_map"
            )
        shards.setdefault(shard, set()).add(name)
    return shards


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
