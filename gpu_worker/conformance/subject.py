"""What is put through the checks, and how a check says no."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from contracts.events import ARDiffusionControlInput
from contracts.kv_spec import ARDiffusionKVCacheSpec
from gpu_worker.registry import PipelineFactory

PROMPT: Final = "a quiet valley by the sea"
OTHER_PROMPT: Final = "a city of glass at night"


class ViolationError(Exception):
    """Raised by a check: the pipeline does not do what the check asks."""


class NotApplicableError(Exception):
    """Raised by a check that has nothing to ask of this pipeline."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A pipeline and the circumstances it is checked under.

    Args:
        factory: builds it, as an entry point does: `factory(device=, dtype=, config=)`. Called again after a check
            that failed, so that one fault is not told twice.
        device: where it runs.
        dtype: element type of weights and KV.
        config: the model's own settings.
        params: creation parameters of the sessions, for a model that asks for some; `images` may be bytes.
        planned_spec: what `worldline plan` works with, configuration in, spec out; None where the model offers none.
        prompts: two prompts that ought to make a difference.
        controls: what every tick of a prompt carries, for a model that does nothing without.
    """

    factory: PipelineFactory
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    config: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    planned_spec: Callable[[Mapping[str, Any]], ARDiffusionKVCacheSpec] | None = None
    prompts: tuple[str, str] = (PROMPT, OTHER_PROMPT)
    controls: Callable[[str], tuple[ARDiffusionControlInput, ...]] = lambda _prompt: ()

    def build(self) -> object:
        """A new pipeline."""
        return self.factory(device=self.device, dtype=self.dtype, config=dict(self.config))


def require(condition: bool, message: str) -> None:
    """ViolationError unless `condition`."""
    if not condition:
        raise ViolationError(message)
