"""Reducers by name. A package adds one by an entry point in the group `worldline.reducers`."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from actors.reducers.base import ControlReducer
from contracts.errors import InvalidArgumentError

GROUP: Final = "worldline.reducers"


@cache
def _installed() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def reducer_names() -> tuple[str, ...]:
    """The names that `make_reducer` knows, sorted."""
    return tuple(sorted(_installed()))


def make_reducer(name: str) -> ControlReducer:
    """A fresh reducer for one session.

    Raises:
        InvalidArgumentError: no such reducer, or what the entry point names is none; the field is `reducer`.
    """
    point = _installed().get(name)
    if point is None:
        known = ", ".join(reducer_names())
        raise InvalidArgumentError(f"reducer {name!r:.80} is unknown; known are: {known}", field="reducer")
    try:
        reducer = point.load()()
    except Exception as error:
        raise InvalidArgumentError(f"reducer {name} can't be loaded: {error}", field="reducer") from error
    if not isinstance(reducer, ControlReducer):
        raise InvalidArgumentError(f"reducer {name} ({point.value}) is no ControlReducer", field="reducer")
    return reducer
