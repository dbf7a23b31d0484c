"""Values out of JSON, each checked, and named where it is wrong. Torch-free."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

from contracts.errors import ConfigurationError

_MOST_BYTES: Final = 16 << 20


def finite_numbers(value: object, field: str) -> tuple[float, ...]:
    """A list of at least one number."""
    items = filled_list(value, field)
    try:
        numbers = tuple(float(item) for item in items if type(item) in (int, float))
    except OverflowError:
        numbers = ()
    if len(numbers) != len(items) or not all(map(math.isfinite, numbers)):
        raise ConfigurationError(f"{field} must hold finite numbers", field=field)
    return numbers


def different_names(value: object, field: str, *, empty: bool = False) -> tuple[str, ...]:
    """A list of texts that are neither blank nor twice there; `empty` allows none."""
    if empty and value == []:
        return ()
    items = filled_list(value, field)
    names = [item for item in items if isinstance(item, str) and item.strip()]
    if len(names) != len(items) or len(set(names)) != len(names):
        raise ConfigurationError(f"{field} must be a list of different names", field=field)
    return tuple(names)


def filled_list(value: object, field: str) -> Sequence[Any]:
    """A list of at least one item."""
    if not isinstance(value, list) or not value:
        raise ConfigurationError(f"{field} must be a list that is not empty", field=field)
    return value


def json_object(value: object, field: str) -> Mapping[str, Any]:
    """An object."""
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{field} must be an object", field=field)
    return value


def only_fields(raw: Mapping[str, Any], allowed: tuple[str, ...], what: str) -> None:
    """ConfigurationError naming a field of `raw` that is not among `allowed`."""
    for name in raw:
        if name not in allowed:
            raise ConfigurationError(
                f"{what} has no field {name!r:.80}; known: {', '.join(allowed)}", field=str(name)[:80]
            )


def text_of(raw: Mapping[str, Any], field: str) -> str:
    """The text at `field`."""
    value = raw.get(field)
    if not isinstance(value, str) or not value.strip():
        raise ConfigurationError(f"{field} must be a text that is not blank", field=field)
    return value


def inner_path(raw: Mapping[str, Any], field: str) -> str:
    """A path inside the checkpoint's folder."""
    value = text_of(raw, field)
    path = PurePosixPath(value)
    if path.is_absolute() or ".." in path.parts or "\\" in value or "\0" in value:
        raise ConfigurationError(f"{field} must lie inside the checkpoint's folder", field=field)
    return value


def read_json(checkpoint: Path, file: str) -> Any:
    """What a file of the checkpoint's folder holds."""
    try:
        with (checkpoint / file).open("rb") as opened:
            return json.loads(opened.read(_MOST_BYTES))
    except OSError:
        raise ConfigurationError(f"{file} is missing or can't be read", field=file) from None
    except (ValueError, RecursionError):
        raise ConfigurationError(f"{file} is no JSON", field=file) from None
