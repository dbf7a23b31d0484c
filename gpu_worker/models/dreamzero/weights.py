"""The weights of a checkpoint's parts: which names each must have, and how they come into its module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from contracts.errors import ConfigurationError
from gpu_worker.models.dreamzero.checkpoint import PREFIXES, DreamZeroCheckpoint
from gpu_worker.models.lingbot_world.weights import fill_module


def _same(name: str) -> str:
    return name


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a checkpoint and the module that it fills.

    Args:
        what: the part, a key of `PREFIXES`.
        module: on the meta device.
        published: the checkpoint's name, without its prefix, of the module's parameter of some name.
        tied: the module's name -> the one that it is the same as; the checkpoint has the latter only.
        ignored: whether a checkpoint may have a weight of some name, without prefix, that is not used.
    """

    what: str
    module: nn.Module
    published: Callable[[str], str] = _same
    tied: Mapping[str, str] = field(default_factory=dict)
    ignored: Callable[[str], bool] = lambda _name: False

    def names(self) -> dict[str, str]:
        """The checkpoint's name -> the module's, of all that must be there."""
        prefix = PREFIXES[self.what]
        own = [name for name, _ in self.module.named_parameters(remove_duplicate=False)]
        return {prefix + self.published(name): name for name in own if name not in self.tied}

    def check_names(self, checkpoint: DreamZeroCheckpoint) -> None:
        """ConfigurationError naming a weight that is missing, or that nobody knows."""
        prefix, expected = PREFIXES[self.what], self.names()
        found = {name for name in checkpoint.names if name.startswith(prefix)}
        for name in sorted(expected.keys() - found):
            raise ConfigurationError(f"{self.what}: weight {name} is missing", field=name)
        for name in sorted(found - expected.keys()):
            if not self.ignored(name.removeprefix(prefix)):
                raise ConfigurationError(f"{self.what} has no weight {name!r:.120}", field=name[:120])

    def load(self, checkpoint: DreamZeroCheckpoint, *, device: torch.device, dtype: torch.dtype) -> None:
        """Fills the module; ConfigurationError naming a weight of a wrong name or shape."""
        self.check_names(checkpoint)
        names = self.names()
        published = {own: name for name, own in names.items()}
        try:
            fill_module(
                self.module,
                ((names[name], tensor) for name, tensor in checkpoint.read(names)),
                self.what,
                device=device,
                dtype=dtype,
                tied=self.tied,
            )
        except ConfigurationError as error:
            name = published.get(str(error.field))  # say what the checkpoint calls it
            if name is None:
                raise
            raise ConfigurationError(error.message.replace(str(error.field), name), field=name) from None
