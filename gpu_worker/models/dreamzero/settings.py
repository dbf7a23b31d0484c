"""Settings of a deployment. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from contracts.errors import ConfigurationError, InvalidArgumentError
from gpu_worker.models.dreamzero.spec import DreamZeroSpecSettings, checkpoint_folder

DEFAULT_SEED: Final = 1140
"""The published one, of sessions that name none."""

ENGINE_BACKEND: Final = "ar_diffusion"
"""What a deployment may say that it runs on; there is nothing else here."""

DEFAULT_SCALE: Final = 5.0
DEFAULT_STEPS: Final = 16
MOST_STEPS: Final = 1000

_MACHINE_WIDE: Final = ("lingbot_action_root",)
"""Settings that a worker hands to every model with a checkpoint; this one has no use for them."""


@dataclass(frozen=True, slots=True)
class DreamZeroSettings:
    """The pipeline's own settings.

    Args:
        checkpoint: its directory.
        cfg_scale: of sessions that name none; 1 is without guidance, and the negative branch never runs.
        num_inference_steps: of sessions that name none.
        step_cache: skip forwards whose flow hardly changes.
        cost: what changes the cost of a session: `session_capacity`, `cfg_parallel`.
    """

    checkpoint: Path
    cfg_scale: float
    num_inference_steps: int
    step_cache: bool
    cost: DreamZeroSpecSettings

    @classmethod
    def from_mapping(cls, config: Mapping[str, Any]) -> DreamZeroSettings:
        """From raw settings; ConfigurationError naming one that does not exist or is out of range."""
        rest = {name: value for name, value in config.items() if name not in _MACHINE_WIDE}
        backend = rest.pop("engine_backend", ENGINE_BACKEND)
        if not isinstance(backend, str) or ENGINE_BACKEND not in backend:
            raise ConfigurationError(
                f"dreamzero needs an engine_backend that names {ENGINE_BACKEND}, got {backend!r:.80}",
                field="engine_backend",
            )
        if "dtype" in rest:
            raise ConfigurationError("dtype is the worker's own setting", field="dtype")
        cache = rest.pop("step_cache", False)
        if not isinstance(cache, bool):
            raise ConfigurationError(f"step_cache must be a bool, got {cache!r:.80}", field="step_cache")
        try:
            scale = check_scale(rest.pop("cfg_scale", DEFAULT_SCALE))
            steps = check_steps(rest.pop("num_inference_steps", DEFAULT_STEPS))
        except InvalidArgumentError as error:
            raise ConfigurationError(error.message, field=error.field) from None
        folder = checkpoint_folder(rest.get("checkpoint"))
        return cls(folder, scale, steps, cache, DreamZeroSpecSettings.from_mapping(rest))


def check_scale(value: object) -> float:
    """`cfg_scale`, a finite number from 1."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and 1 <= value < math.inf
    if not good:
        raise InvalidArgumentError(f"cfg_scale must be a number from 1, got {value!r:.80}", field="cfg_scale")
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError:
        raise InvalidArgumentError("cfg_scale is too large", field="cfg_scale") from None


def check_steps(value: object) -> int:
    """`num_inference_steps`, an integer from 1 to 1000."""
    if type(value) is not int or not 1 <= value <= MOST_STEPS:
        raise InvalidArgumentError(
            f"num_inference_steps must be an integer from 1 to {MOST_STEPS}, got {value!r:.80}",
            field="num_inference_steps",
        )
    return value
