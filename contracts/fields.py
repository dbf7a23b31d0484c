"""How messages are read, field by field, and written: what their modules share."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeVar

import orjson

from contracts.errors import InvalidArgumentError
from contracts.identity import check_index, check_text_id

Named = TypeVar("Named", bound=StrEnum)


def dumps(value: Any) -> str:
    """Compact JSON text."""
    return orjson.dumps(value).decode()


def mapping(value: object, name: str) -> dict[str, Any]:
    """`value` as a dict; InvalidArgumentError where it is no object."""
    if not isinstance(value, Mapping):
        raise InvalidArgumentError(f"{name} must be an object", field=name)
    return dict(value)


def named(kinds: type[Named], value: object, name: str) -> Named:
    """The member of `kinds` with that value; InvalidArgumentError lists the known ones."""
    try:
        return kinds(value)  # type: ignore[arg-type]
    except ValueError:
        known = ", ".join(kinds)
        raise InvalidArgumentError(f"{name} {value!r:.80} is none of: {known}", field=name) from None


def flat_text(fields: Mapping[bytes, bytes], what: str) -> dict[str, str]:
    """Flat fields as text."""
    try:
        return {name.decode(): value.decode() for name, value in fields.items()}
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"{what} is not valid UTF-8: {error}", field=what) from None


def optional_index(value: Mapping[str, Any], name: str) -> int | None:
    """The integer at `name`, or None where it is absent or null."""
    return None if value.get(name) is None else check_index(value[name], name)


def optional_id(value: Mapping[str, Any], name: str) -> str | None:
    """The text at `name`, or None where it is absent or null."""
    return None if value.get(name) is None else check_text_id(value[name], name)
