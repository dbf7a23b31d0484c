"""A checkpoint directory in the published layout, read strictly, and from there only.

    config.json                                      see `config.py`
    model.safetensors, or model-*.safetensors with model.safetensors.index.json
        action_head.model.*                          the transformer
        action_head.text_encoder.*                   UMT5
        action_head.image_encoder.model.visual.*     CLIP's image tower
        action_head.vae.model.*                      the Wan VAE

All names are checked before the first weight is read. Messages name weights and files, never a path.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import safetensors
import torch

from contracts.errors import ConfigurationError

PREFIXES: Final[Mapping[str, str]] = {
    "the transformer": "action_head.model.",
    "the text encoder": "action_head.text_encoder.",
    "the image tower": "action_head.image_encoder.model.visual.",
    "the VAE": "action_head.vae.model.",
}

_WHOLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_MOST_JSON_BYTES: Final = 64 << 20
_WEIGHT_TYPES: Final = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class DreamZeroCheckpoint:
    """A local directory.

    Args:
        directory: where it is.

    Raises:
        ConfigurationError: it is not there, its index is none, or a weight belongs to no part; named.
    """

    def __init__(self, directory: object) -> None:
        if not isinstance(directory, str | Path) or not str(directory):
            raise ConfigurationError("dreamzero needs a checkpoint directory", field="checkpoint")
        self._root = Path(directory)
        if not self._root.is_dir():
            raise ConfigurationError("the checkpoint directory does not exist", field="checkpoint")
        self._indexed = (self._root / _INDEX).exists()
        self._files = self._indexed_files() if self._indexed else self._single_file()
        for name in sorted(self._files):
            if not name.startswith(tuple(PREFIXES.values())):
                raise ConfigurationError(f"no part of dreamzero has a weight {name!r:.120}", field=name[:120])

    @property
    def names(self) -> Collection[str]:
        """Names of all weights."""
        return self._files.keys()

    def config(self) -> Mapping[str, Any]:
        """The content of `config.json`; ConfigurationError where it is missing or no JSON object."""
        return self.json("config.json")

    def folder(self, name: str | Path) -> Path:
        """Where something beside the weights is; an absolute path is itself."""
        return self._root / name

    def json(self, file: str) -> Mapping[str, Any]:
        """The content of a JSON file of the checkpoint; ConfigurationError where it is missing or no object."""
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

    def read(self, names: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Some weights, one at a time, on the CPU; file after file.

        Raises:
            ConfigurationError: a file is missing or damaged, or does not hold exactly what the index says.
        """
        by_file: dict[str, list[str]] = {}
        for name in sorted(names):
            by_file.setdefault(self._files[name], []).append(name)
        for file, wanted in by_file.items():
            try:
                with safetensors.safe_open(self._root / file, framework="pt") as opened:
                    self._check_file(file, set(opened.keys()))
                    for name in wanted:
                        yield name, _checked_type(name, opened.get_tensor(name))
            except OSError:
                raise ConfigurationError(f"{file} is missing or can't be read", field=file) from None
            except safetensors.SafetensorError:
                raise ConfigurationError(f"{file} is damaged", field=file) from None

    def _check_file(self, file: str, held: set[str]) -> None:
        promised = {name for name, where in self._files.items() if where == file}
        for name in sorted(held ^ promised):
            raise ConfigurationError(f"{file} and its index disagree about {name:.120}", field=name)

    def _single_file(self) -> dict[str, str]:
        try:
            with safetensors.safe_open(self._root / _WHOLE, framework="pt") as opened:
                return dict.fromkeys(opened.keys(), _WHOLE)
        except OSError:
            raise ConfigurationError(f"{_WHOLE} is missing or can't be read", field=_WHOLE) from None
        except safetensors.SafetensorError:
            raise ConfigurationError(f"{_WHOLE} is damaged", field=_WHOLE) from None

    def _indexed_files(self) -> dict[str, str]:
        found = self.json(_INDEX).get("weight_map")
        if not isinstance(found, Mapping) or not found:
            raise ConfigurationError(f"{_INDEX} has no weight_map", field="weight_map")
        for name, file in found.items():
            plain = isinstance(file, str) and file.isprintable() and Path(file).name == file
            if not plain or file == "..":
                raise ConfigurationError(
                    f"{_INDEX}: the file of {name!r:.120} must be a plain name", field="weight_map"
                )
        return dict(found)


def _checked_type(name: str, tensor: torch.Tensor) -> torch.Tensor:
    # Others would be cast without complaint, and quantised weights mean nothing without their scale.
    if tensor.dtype not in _WEIGHT_TYPES:
        raise ConfigurationError(
            f"weight {name:.120} must be of floating point numbers, got {tensor.dtype}", field=name[:120]
        )
    return tensor
