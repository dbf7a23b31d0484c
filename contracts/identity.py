"""Identities, and how they are checked and minted.

A `session_id` names one world; a `request_id` one execution on a worker; a `life` is the request id of the creation
or reset that began the present world under that name; a `command_id` is one command of a client.
"""

from __future__ import annotations

import binascii
import re
import secrets
from typing import Final, Literal

from contracts.errors import InvalidArgumentError

MAX_INTEGER: Final = 2**53 - 1
"""The largest integer that every JSON reader, Lua included, keeps exactly."""

SESSION_ID_PATTERN: Final = "[A-Za-z0-9._:-]{1,128}"
DIGITS_PATTERN: Final = "(0|[1-9][0-9]{0,15})"
"""Canonical decimal digits of an integer that may be below 2^53."""

_SESSION_ID: Final = re.compile(SESSION_ID_PATTERN)
_DIGITS: Final = re.compile(DIGITS_PATTERN)
_SLOTS: Final = 16384

RequestKind = Literal["create", "reset", "release"]


def check_session_id(value: object, field: str = "session_id") -> str:
    """`value` if it is a legal session id, else InvalidArgumentError."""
    if not isinstance(value, str) or _SESSION_ID.fullmatch(value) is None:
        raise InvalidArgumentError(f"{field} must match {SESSION_ID_PATTERN}, got {value!r:.80}", field=field)
    return value


def check_text_id(value: object, field: str) -> str:
    """`value` if it is a string that is not blank, else InvalidArgumentError."""
    if not isinstance(value, str) or not value.strip():
        raise InvalidArgumentError(
            f"{field} must be a string that is not blank, got {value!r:.80}", field=field
        )
    return value


def check_index(value: object, field: str) -> int:
    """`value` if it is an int in [0, 2^53), no bool, else InvalidArgumentError."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_INTEGER:
        raise InvalidArgumentError(
            f"{field} must be an integer from 0 to 2^53 - 1, got {value!r:.80}", field=field
        )
    return value


def parse_event_id(text: str) -> int:
    """The event id of a stream entry: canonical decimal digits only, so "07", "+7" and "7.0" are refused."""
    return parse_index(text, "event_id")


def parse_index(text: str, field: str) -> int:
    """An integer in [0, 2^53) from its canonical digits, the form that flat fields carry."""
    if _DIGITS.fullmatch(text) is None:
        raise InvalidArgumentError(
            f"{field} must be a whole number from 0 to 2^53 - 1, got {text!r:.80}", field=field
        )
    return check_index(int(text), field)


def new_request_id(session_id: str, position: int | RequestKind) -> str:
    """`ar-<session>-<chunk>-<32 hex>`, with create, reset or release in place of the chunk for those."""
    return f"ar-{session_id}-{position}-{secrets.token_hex(16)}"


def new_command_id() -> str:
    """A fresh command id: 32 hex digits."""
    return secrets.token_hex(16)


def new_incarnation() -> str:
    """A fresh incarnation: one start of a worker."""
    return secrets.token_hex(8)


def key_slot(key: str) -> int:
    """The cluster slot of a key: CRC16 (XMODEM) of its hash tag, or of all of it without one, modulo 16384."""
    start = key.find("{")
    end = key.find("}", start + 1)
    tag = key[start + 1 : end] if start != -1 and end > start + 1 else key
    return binascii.crc_hqx(tag.encode(), 0) % _SLOTS


def partition_of(session_id: str, partitions: int) -> int:
    """The partition that owns a session, in [0, partitions)."""
    return binascii.crc_hqx(session_id.encode(), 0) % _SLOTS % partitions
