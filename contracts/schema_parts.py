"""The words of the JSON Schemas: limits and names come from the constants that the code itself checks."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final

from contracts.events import MAX_DEPTH, MAX_EVENT_BYTES
from contracts.identity import DIGITS_PATTERN, MAX_INTEGER, SESSION_ID_PATTERN

Schema = dict[str, Any]

INDEX: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": MAX_INTEGER}
DIGITS: Final[Schema] = {"type": "string", "pattern": f"^{DIGITS_PATTERN}$"}
TEXT_ID: Final[Schema] = {"type": "string", "pattern": r"\S"}
SESSION_ID: Final[Schema] = {"type": "string", "pattern": f"^{SESSION_ID_PATTERN}$"}
PROMPT: Final[Schema] = {"type": "string", "maxLength": MAX_EVENT_BYTES}
OBJECT: Final[Schema] = {"type": "object"}
EVENT_IDS: Final[Schema] = {
    "type": "array",
    "items": INDEX,
    "uniqueItems": True,
    "description": "Strictly increasing.",
}
OPAQUE: Final[Schema] = {
    "type": "object",
    "description": f"Any JSON object: nested at most {MAX_DEPTH} deep, numbers finite, integers within 2^53 - 1.",
}


def described(part: Mapping[str, Any], text: str) -> Schema:
    """`part` with a description."""
    return {**part, "description": text}


def optional(part: Mapping[str, Any]) -> Schema:
    """`part` or null."""
    return {"anyOf": [part, {"type": "null"}]}


def enum(kinds: type[StrEnum]) -> Schema:
    """The names of an enumeration."""
    return {"enum": [str(kind) for kind in kinds]}


def record(required: Mapping[str, Schema], extra: Mapping[str, Schema] | None = None, **more: Any) -> Schema:
    """An object of exactly these fields; those in `extra` may be absent."""
    return {
        "type": "object",
        "properties": {**required, **(extra or {})},
        "required": list(required),
        "additionalProperties": False,
        **more,
    }


def json_text(content: Mapping[str, Any], **more: Any) -> Schema:
    """A string that holds JSON of that schema, as flat fields carry nested values."""
    return {"type": "string", "contentMediaType": "application/json", "contentSchema": content, **more}
