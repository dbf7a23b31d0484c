"""Kinds of robots: what they see, feel and do, as the model takes it. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from contracts.errors import ConfigurationError
from gpu_worker.models.dreamzero.reading import (
    different_names,
    filled_list,
    finite_numbers,
    json_object,
    only_fields,
    text_of,
)

PLACEHOLDER: Final = "{language}"

_MOST_SIDE: Final = 4096
_MOST_PLACES: Final = 16
_FIELDS: Final = ("prompt", "view_size", "layout", "optional_views", "state", "action", "relative")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a view stands in its row.

    Args:
        view: its name.
        stretch: places that it fills.
    """

    view: str
    stretch: int = 1


@dataclass(frozen=True, slots=True)
class Part:
    """One named part of a state or an action, with the quantiles that it is scaled by.

    Args:
        name: for example "joint_position".
        q01, q99: one number a dimension.
    """

    name: str
    q01: tuple[float, ...]
    q99: tuple[float, ...]

    @property
    def width(self) -> int:
        """Its dimensions."""
        return len(self.q01)


@dataclass(frozen=True, slots=True)
class Embodiment:
    """One kind of robot.

    Args:
        name: as the checkpoint's statistics call it.
        prompt: a sentence with one "{language}".
        view_height, view_width: of one place, in pixels.
        layout: rows of places, all of one width.
        optional_views: may be missing.
        state, action: parts, in the model's order.
        relative: names of the action parts that are offsets from the state.
    """

    name: str
    prompt: str
    view_height: int
    view_width: int
    layout: tuple[tuple[Place, ...], ...]
    optional_views: frozenset[str]
    state: tuple[Part, ...]
    action: tuple[Part, ...]
    relative: frozenset[str]

    @property
    def views(self) -> frozenset[str]:
        """Names of all views."""
        return frozenset(place.view for row in self.layout for place in row)

    @property
    def height(self) -> int:
        """Pixels of the stitched picture."""
        return self.view_height * len(self.layout)

    @property
    def width(self) -> int:
        """Pixels of the stitched picture."""
        return self.view_width * sum(place.stretch for place in self.layout[0])

    @property
    def state_width(self) -> int:
        """Numbers of a state."""
        return sum(part.width for part in self.state)

    @property
    def action_width(self) -> int:
        """Numbers of one action."""
        return sum(part.width for part in self.action)

    def sentence(self, language: str) -> str:
        """What the text encoder reads."""
        return self.prompt.replace(PLACEHOLDER, " ".join(language.lower().split()))


def read_embodiment(name: str, raw: Mapping[str, Any], entry: Mapping[str, Any]) -> Embodiment:
    """The embodiment that a deployment describes; ConfigurationError names the field.

    Args:
        name: its name.
        raw: what the deployment says.
        entry: what the checkpoint's metadata say: `{"statistics": {"state": {part: {"q01", "q99"}}, "action": ...}}`.
    """
    only_fields(raw, _FIELDS, name)
    prompt = text_of(raw, "prompt")
    if prompt.count(PLACEHOLDER) != 1:
        raise ConfigurationError(f"{name}: prompt must hold {PLACEHOLDER} once", field="prompt")
    statistics = json_object(entry.get("statistics"), "statistics")
    state = _parts(raw, "state", statistics)
    action = _parts(raw, "action", statistics)
    height, width = _size(raw.get("view_size"))
    layout = _layout(raw.get("layout"))
    embodiment = Embodiment(
        name=name,
        prompt=prompt,
        view_height=height,
        view_width=width,
        layout=layout,
        optional_views=frozenset(
            different_names(raw.get("optional_views", []), "optional_views", empty=True)
        ),
        state=state,
        action=action,
        relative=frozenset(different_names(raw.get("relative", []), "relative", empty=True)),
    )
    for view in sorted(embodiment.optional_views - embodiment.views):
        raise ConfigurationError(
            f"optional_views: the layout has no view {view!r:.80}", field="optional_views"
        )
    _check_relative(embodiment)
    return embodiment


def _check_relative(embodiment: Embodiment) -> None:
    states = {part.name: part.width for part in embodiment.state}
    actions = {part.name: part.width for part in embodiment.action}
    for name in sorted(embodiment.relative):
        if name not in actions or states.get(name) != actions[name]:
            raise ConfigurationError(
                f"relative: {name!r:.80} must be a part of action and state, of the same width",
                field="relative",
            )


def _layout(value: object) -> tuple[tuple[Place, ...], ...]:
    rows = tuple(
        tuple(_place(place) for place in filled_list(row, "layout")) for row in filled_list(value, "layout")
    )
    widths = {sum(place.stretch for place in row) for row in rows}
    if len(widths) != 1:
        raise ConfigurationError(f"layout: rows must be of one width, got {sorted(widths)}", field="layout")
    return rows


def _place(value: object) -> Place:
    if isinstance(value, str):
        value = {"view": value}
    raw = json_object(value, "layout")
    only_fields(raw, ("view", "stretch"), "layout")
    stretch = raw.get("stretch", 1)
    if isinstance(stretch, bool) or not isinstance(stretch, int) or not 1 <= stretch <= _MOST_PLACES:
        raise ConfigurationError(
            f"layout: stretch is 1 to {_MOST_PLACES}, got {stretch!r:.80}", field="layout"
        )
    view = raw.get("view")
    if not isinstance(view, str) or not view.strip():
        raise ConfigurationError(f"layout: a view is a name, got {view!r:.80}", field="layout")
    return Place(view, stretch)


def _parts(raw: Mapping[str, Any], field: str, statistics: Mapping[str, Any]) -> tuple[Part, ...]:
    known = json_object(statistics.get(field), f"statistics.{field}")
    parts = []
    for name in different_names(raw.get(field), field):
        where = f"statistics.{field}.{name}"
        entry = json_object(known.get(name), where)
        low, high = (
            finite_numbers(entry.get(quantile), f"{where}.{quantile}") for quantile in ("q01", "q99")
        )
        if len(low) != len(high) or any(a > b for a, b in zip(low, high, strict=True)):
            raise ConfigurationError(f"{where}: q01 must be at most q99, and as long", field=where)
        if not all(math.isfinite(b - a) for a, b in zip(low, high, strict=True)):
            raise ConfigurationError(f"{where}: q01 and q99 are too far apart", field=where)
        parts.append(Part(name, low, high))
    return tuple(parts)


def _size(value: object) -> tuple[int, int]:
    items = filled_list(value, "view_size")
    good = [i for i in items if isinstance(i, int) and not isinstance(i, bool) and 0 < i <= _MOST_SIDE]
    if len(items) != 2 or len(good) != 2:
        raise ConfigurationError(
            f"view_size must be height and width, 1 to {_MOST_SIDE} pixels", field="view_size"
        )
    return good[0], good[1]
