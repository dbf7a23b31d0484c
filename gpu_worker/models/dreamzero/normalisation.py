"""States and actions between a robot's units and the model's: -1 is the 1 % quantile, 1 the 99 % one.

state    2 (s - q01) / (q99 - q01) - 1, limited to [-1, 1]; where both quantiles are the same, s itself is
action   (a + 1) / 2 (q99 - q01) + q01; relative parts have the robot's own state added
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from contracts.errors import InvalidArgumentError
from gpu_worker.models.dreamzero.embodiment import Embodiment, Part

_MOST: Final = float(np.finfo(np.float32).max) / 2
"""Of a state's number; an action is added to it."""

Numbers = npt.NDArray[np.float64]


def raw_state(parts: Mapping[str, Sequence[float]], embodiment: Embodiment) -> Numbers:
    """The state as one row, in the model's order; InvalidArgumentError names the part at fault."""
    known = {part.name for part in embodiment.state}
    for name in sorted(set(parts) - known):
        raise InvalidArgumentError(
            f"state.{name}: there is no such part; known are: {', '.join(sorted(known))}",
            field=f"state.{name}",
        )
    for part in embodiment.state:
        if part.name not in parts:
            raise InvalidArgumentError(f"state.{part.name} is missing", field=f"state.{part.name}")
        found = len(parts[part.name])
        if found != part.width:
            raise InvalidArgumentError(
                f"state.{part.name} must have {part.width} numbers, got {found}", field=f"state.{part.name}"
            )
        if max(map(abs, parts[part.name])) > _MOST:  # actions that start from there are float32
            raise InvalidArgumentError(
                f"state.{part.name} must be numbers within float32", field=f"state.{part.name}"
            )
    return np.concatenate([np.asarray(parts[part.name], np.float64) for part in embodiment.state])


def normalise_state(state: Numbers, parts: Sequence[Part], width: int) -> Numbers:
    """A raw state [n] as the model sees it, [width], zero beyond its own numbers."""
    low, high = _quantiles(parts)
    span = high - low
    scaled = np.where(span == 0, state, 2 * (state - low) / np.where(span == 0, 1, span) - 1)
    return np.pad(np.clip(scaled, -1, 1), (0, width - len(scaled)))


def restore_actions(actions: Numbers, state: Numbers, embodiment: Embodiment) -> Numbers:
    """The model's actions [steps, width or more] in the robot's units, [steps, dims].

    Args:
        actions: normalised.
        state: the raw state that relative parts start from.
        embodiment: whose they are.
    """
    low, high = _quantiles(embodiment.action)
    restored = (actions[:, : len(low)] + 1) / 2 * (high - low) + low
    starts = _offsets(embodiment.state)
    for name, (begin, end) in _offsets(embodiment.action).items():
        if name in embodiment.relative:
            restored[:, begin:end] += state[slice(*starts[name])]
    return restored


def _quantiles(parts: Sequence[Part]) -> tuple[Numbers, Numbers]:
    return (
        np.array([value for part in parts for value in part.q01]),
        np.array([value for part in parts for value in part.q99]),
    )


def _offsets(parts: Sequence[Part]) -> dict[str, tuple[int, int]]:
    """Where each part lies in a row."""
    offsets, begin = {}, 0
    for part in parts:
        offsets[part.name] = begin, begin + part.width
        begin += part.width
    return offsets
