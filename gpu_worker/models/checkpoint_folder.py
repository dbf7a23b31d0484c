"""The files of a checkpoint directory, read strictly, and from there only. Messages name weights and files, never a path."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import safetensors
import torch

from contracts.errors import ConfigurationError

_MOST_JSON_BYTES: Final = 64 << 20
_WEIGHT_TYPES: Final = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class CheckpointFolder:
    """A local directory.

    Args:
        directory: where it is.
        model: that needs it, for messages.

    Raises:
        ConfigurationError: it is not there.
    """

    def __init__(self, directory: object, model: str) -> None:
        if not isinstance(directory, str | Path) or not str(directory):
            raise ConfigurationError(f"{model} needs a checkpoint directory", field="checkpoint")
        self._root = Path(directory)
        if not self._root.is_dir():
            raise ConfigurationError("the checkpoint directory does not exist", field="checkpoint")

    def path(self, name: str | Path) -> Path:
        """Where something in it is; an absolute path is itself."""
        return self._root / name

    def json(self, file: str) -> Mapping[str, Any]:
        """The content of a JSON file; ConfigurationError where it is missing or no object."""
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

    def weight_files(self, stem: str) -> dict[str, str]:
        """Which file each weight is in: one file `<stem>.safetensors`, or those that its index names.

        ConfigurationError where there is neither, for an index that is none, or one that leads out of its folder.
        """
        index, whole = f"{stem}.safetensors.index.json", f"{stem}.safetensors"
        if not (self._root / index).exists():
            with self._opened(whole) as opened:
                return dict.fromkeys(opened.keys(), whole)
        found = self.json(index).get("weight_map")
        if not isinstance(found, Mapping) or not found:
            raise ConfigurationError(f"{index} has no weight_map", field="weight_map")
        folder = stem.rpartition("/")[0]
        for name, file in found.items():
            if not _is_plain_name(file):
                raise ConfigurationError(
                    f"{index}: the file of {name!r:.120} must be a plain name", field="weight_map"
                )
        return {name: f"{folder}/{file}" if folder else file for name, file in found.items()}

    def weights(self, files: Mapping[str, str], names: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Some weights, one at a time, on the CPU; file after file.

        Args:
            files: which file each weight of the checkpoint is in, see `weight_files`.
            names: of those wanted.

        Raises:
            ConfigurationError: a file is missing or damaged, holds another weight than it should, or no numbers.
        """
        promised, wanted = _by_file(files, files), _by_file(files, names)
        for file in wanted:
            with self._opened(file) as opened:
                for name in sorted(set(opened.keys()) ^ set(promised[file])):
                    raise ConfigurationError(f"{file} and its index disagree about {name:.120}", field=name)
                for name in wanted[file]:
                    yield name, _checked_type(name, opened.get_tensor(name))

    @contextlib.contextmanager
    def _opened(self, file: str) -> Iterator[Any]:
        try:
            with safetensors.safe_open(self._root / file, framework="pt") as opened:
                yield opened
        except OSError:
            raise ConfigurationError(f"{file} is missing or can't be read", field=file) from None
        except safetensors.SafetensorError:
            raise ConfigurationError(f"{file} is damaged", field=file) from None


def _by_file(files: Mapping[str, str], names: Iterable[str]) -> dict[str, list[str]]:
    grouped: dict[str, list[str]] = {}
    for name in sorted(names):
        grouped.setdefault(files[name], []).append(name)
    return grouped


def _is_plain_name(file: object) -> bool:
    return isinstance(file, str) and file.isprintable() and Path(file).name == file and file != ".."


def _checked_type(name: str, tensor: torch.Tensor) -> torch.Tensor:
    # Anything else would be cast without complaint: quantised weights lose their scale, complex ones half of themselves.
    if tensor.dtype not in _WEIGHT_TYPES:
        raise ConfigurationError(
            f"weight {name:.120} must be of floating point numbers, got {tensor.dtype}", field=name[:120]
        )
    return tensor
