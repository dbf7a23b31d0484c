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

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from contracts.errors import ConfigurationError
from gpu_worker.models.checkpoint_folder import CheckpointFolder

PREFIXES: Final[Mapping[str, str]] = {
    "the transformer": "action_head.model.",
    "the text encoder": "action_head.text_encoder.",
    "the image tower": "action_head.image_encoder.model.visual.",
    "the VAE": "action_head.vae.model.",
}

_STEM: Final = "model"


class DreamZeroCheckpoint:
    """A local directory.

    Args:
        directory: where it is.

    Raises:
        ConfigurationError: it is not there, its index is none, or a weight belongs to no part; named.
    """

    def __init__(self, directory: object) -> None:
        self._folder = CheckpointFolder(directory, "dreamzero")
        self._files = self._folder.weight_files(_STEM)
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
        return self._folder.path(name)

    def json(self, file: str) -> Mapping[str, Any]:
        """The content of a JSON file of the checkpoint; ConfigurationError where it is missing or no object."""
        return self._folder.json(file)

    def read(self, names: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Some weights, one at a time, on the CPU; file after file.

        Raises:
            ConfigurationError: a file is missing or damaged, or does not hold exactly what the index says.
        """
        return self._folder.weights(self._files, names)
