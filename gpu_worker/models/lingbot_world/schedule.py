"""Noise levels of the four steps, and what may change them. Torch-free.

sigma = s b / ((1 - b) + s b)        b = label / 1000, labels 1000, 750, 500, 250; s is the flow shift
timestep = 1000 sigma
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from contracts.errors import ConfigurationError, InvalidArgumentError

DEFAULT_FLOW_SHIFT: Final = 5.0
NUM_STEPS: Final = 4
TRAIN_TIMESTEPS: Final = 1000

_LEVELS: Final = (1.0, 0.75, 0.5, 0.25)

_SCHEDULER: Final[tuple[tuple[str, object, object], ...]] = (
    # field, value it must have, value that its absence means
    ("_class_name", "UniPCMultistepScheduler", None),
    ("num_train_timesteps", TRAIN_TIMESTEPS, 1000),
    ("prediction_type", "flow_prediction", "epsilon"),
    ("predict_x0", True, True),
    ("use_flow_sigmas", True, False),
    ("use_dynamic_shifting", False, False),
    ("use_beta_sigmas", False, False),
    ("use_exponential_sigmas", False, False),
    ("use_karras_sigmas", False, False),
    ("final_sigmas_type", "zero", "zero"),
    ("timestep_spacing", "linspace", "linspace"),
)


@dataclass(frozen=True, slots=True)
class DMDSchedule:
    """Sigmas and timesteps of one flow shift, from pure noise downwards."""

    sigmas: tuple[float, ...]

    @classmethod
    def of(cls, flow_shift: float = DEFAULT_FLOW_SHIFT) -> DMDSchedule:
        """The levels for a positive shift: 5 gives timesteps 1000, 937.5, 833.3 and 625."""
        shift = parse_flow_shift(flow_shift)
        return cls(tuple(shift * level / ((1 - level) + shift * level) for level in _LEVELS))

    @property
    def timesteps(self) -> tuple[float, ...]:
        """What the model is told."""
        return tuple(TRAIN_TIMESTEPS * sigma for sigma in self.sigmas)


def parse_flow_shift(value: object, field: str = "flow_shift") -> float:
    """A positive, finite number; InvalidArgumentError for anything else, a bool included."""
    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:  # 10**400
        number = math.inf
    if not math.isfinite(number) or number <= 0:
        raise InvalidArgumentError(
            f"{field} must be a positive, finite number, got {_shown(value)}", field=field
        )
    return number


def resolve_flow_shift(request: object, deployment: object, scheduler: Mapping[str, Any]) -> float:
    """The shift in force: the request's, else the deployment's, else the scheduler's `flow_shift` or `shift`, else 5.

    None means not set. Nothing is written back: one request's shift is no other's.
    """
    for value in (request, deployment, scheduler.get("flow_shift"), scheduler.get("shift")):
        if value is not None:
            return parse_flow_shift(value)
    return DEFAULT_FLOW_SHIFT


def check_scheduler_config(config: Mapping[str, Any]) -> None:
    """ConfigurationError, naming the field, unless the checkpoint's scheduler is the one that the steps are made for."""
    for name, expected, default in _SCHEDULER:
        found = config.get(name, default)
        if type(found) is not type(expected) or found != expected:
            raise ConfigurationError(
                f"the scheduler's {name} must be {expected!r}, the checkpoint says {found!r:.80}", field=name
            )
    for name in ("flow_shift", "shift"):
        if config.get(name) is not None:
            try:
                parse_flow_shift(config[name], name)
            except InvalidArgumentError as error:
                raise ConfigurationError(f"the scheduler's {error.message}", field=name) from None


def _shown(value: object) -> str:
    # An integer of thousands of digits may not be printed.
    return (
        "an integer that is too large"
        if isinstance(value, int) and abs(value) > 1 << 64
        else f"{value!r:.80}"
    )
