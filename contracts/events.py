"""Events and controls: what a producer says to a world.

Control data is opaque here. It is deep-copied, deep-frozen and limited, so that what was accepted is what the model
sees, and so that it survives JSON, Lua and every other reader without changing its type.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

import orjson

from contracts.errors import InvalidArgumentError
from contracts.identity import MAX_INTEGER, check_index, check_session_id, check_text_id, parse_event_id

MAX_EVENT_BYTES: Final = 64 * 1024
MAX_DEPTH: Final = 32

_LONG_NUMBER: Final = b"0" * 19
_SCALARS: Final = frozenset({str, int, float, bool, type(None)})
_AS_ZEROS: Final = bytes.maketrans(b"123456789", b"0" * 9)
_CONTROL_FIELDS: Final = frozenset({"track", "schema", "data"})
_ENTRY_FIELDS: Final = frozenset({"event_id", "prompt", "controls"})


def freeze(value: object, field: str, depth: int = 0) -> Any:
    """A deep, immutable copy of JSON-like data: mappings become read-only, sequences tuples.

    Raises InvalidArgumentError (its text says "transport-safe") for anything that JSON would not carry unchanged:
    other types, keys that are no strings, floats that are not finite, integers beyond 2^53, lone surrogates, and
    nesting deeper than 32.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _plain_text(value, field)
    if isinstance(value, int):
        if abs(value) > MAX_INTEGER:
            raise InvalidArgumentError(f"{field} is not transport-safe: integer beyond 2^53", field=field)
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidArgumentError(f"{field} is not transport-safe: {value} is not finite", field=field)
        return float(value)
    if isinstance(value, Mapping):
        inside = _deeper(depth, field)
        return MappingProxyType(
            {_key(k, field): freeze(v, f"{field}.{k:.80}", inside) for k, v in value.items()}
        )
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        inside = _deeper(depth, field)
        return tuple(freeze(item, f"{field}[{i}]", inside) for i, item in enumerate(value))
    raise InvalidArgumentError(f"{field} is not transport-safe: {type(value).__name__}", field=field)


def _deeper(depth: int, field: str) -> int:
    if depth == MAX_DEPTH:
        raise InvalidArgumentError(
            f"{field} is not transport-safe: nested deeper than {MAX_DEPTH}", field=field
        )
    return depth + 1


def thaw(value: Any) -> Any:
    """The detached plain form (dict, list) of frozen data."""
    if type(value) in _SCALARS:
        return value
    if isinstance(value, Mapping):
        return {key: thaw(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [thaw(item) for item in value]
    return value


def _key(key: object, field: str) -> str:
    if not isinstance(key, str):
        raise InvalidArgumentError(
            f"{field} is not transport-safe: key {key!r:.40} is no string", field=field
        )
    return _plain_text(key, field)


def _plain_text(value: str, field: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidArgumentError(f"{field} is not transport-safe: lone surrogate", field=field) from None
    return str(value)


def check_prompt(value: object, field: str = "prompt") -> str | None:
    """`value` if it is None or text that UTF-8 can carry."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise InvalidArgumentError(
            f"{field} must be a string or None, got {type(value).__name__}", field=field
        )
    return _plain_text(value, field)


@dataclass(frozen=True, slots=True)
class ARDiffusionControlInput:
    """One value of one control track; what `data` means is the model's business.

    Args:
        track: what is controlled, for instance "camera".
        schema: how `data` is to be read, for instance "lingbot.camera_actions.v1".
        data: a mapping of JSON values; kept as an immutable copy.
    """

    track: str
    schema: str
    data: Mapping[str, Any]

    def __post_init__(self) -> None:
        check_text_id(_text(self.track, "track"), "track")
        check_text_id(_text(self.schema, "schema"), "schema")
        if not isinstance(self.data, Mapping):
            raise InvalidArgumentError("control data must be a transport-safe mapping", field="data")
        object.__setattr__(self, "data", freeze(self.data, "data"))

    def to_dict(self) -> dict[str, Any]:
        """A detached plain form: `{"track", "schema", "data"}`."""
        return {"track": self.track, "schema": self.schema, "data": thaw(self.data)}

    @classmethod
    def from_dict(cls, value: object, field: str = "controls") -> ARDiffusionControlInput:
        """Strict: exactly the three fields."""
        if not isinstance(value, Mapping):
            raise InvalidArgumentError(f"{field}: a control must be a mapping", field=field)
        if set(value) != _CONTROL_FIELDS:
            wrong = sorted(map(str, set(value) ^ _CONTROL_FIELDS))
            raise InvalidArgumentError(
                f"{field}: a control has track, schema and data; wrong: {wrong}", field=field
            )
        return cls(value["track"], value["schema"], value["data"])


def _text(value: object, field: str) -> object:
    return _plain_text(value, field) if isinstance(value, str) else value


def parse_controls(value: object, field: str = "controls") -> tuple[ARDiffusionControlInput, ...]:
    """Controls from their plain form: a sequence of mappings."""
    if type(value) is list and not value:
        return ()
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Sequence):
        raise InvalidArgumentError(f"{field} must be a sequence of controls", field=field)
    return tuple(ARDiffusionControlInput.from_dict(item, f"{field}[{i}]") for i, item in enumerate(value))


def controls_to_json(controls: Sequence[ARDiffusionControlInput]) -> str:
    """The JSON form of controls that streams and hashes carry."""
    return orjson.dumps([control.to_dict() for control in controls]).decode()


def controls_from_json(text: str | bytes, field: str = "controls") -> tuple[ARDiffusionControlInput, ...]:
    """The inverse of `controls_to_json`; strict."""
    return parse_controls(loads(text, field), field)


def loads(text: str | bytes, field: str) -> Any:
    """JSON with a typed error that names the field.

    orjson turns integers of more than 64 bits into floats, or refuses the whole text; where a number that long may stand
    in it, the standard reader is used, which keeps it, so that the limit of 2^53 can refuse it by name.
    """
    try:
        # Ten times as fast as a regular expression, and each message passes here several times.
        zeros = (text.encode() if isinstance(text, str) else text).translate(_AS_ZEROS)
        if _LONG_NUMBER in zeros:
            return json.loads(text, parse_constant=_refuse, parse_float=_finite)
        return orjson.loads(text)
    except ValueError as error:
        raise InvalidArgumentError(f"{field} is not valid JSON: {error}", field=field) from None
    except RecursionError:
        raise InvalidArgumentError(f"{field} is nested too deeply", field=field) from None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.40} is too large a number")
    return value


@dataclass(frozen=True, slots=True)
class ARDiffusionSessionEvent:
    """One prompt and/or control update, identified by an id that grows within the session.

    Args:
        event_id: integer >= 0, unique and increasing within a session, across reset too.
        prompt: the new prompt, or None to leave it.
        controls: the new value of each named track; a track at most once.
    """

    event_id: int
    prompt: str | None = None
    controls: tuple[ARDiffusionControlInput, ...] = ()

    def __post_init__(self) -> None:
        check_index(self.event_id, "event_id")
        check_prompt(self.prompt)
        object.__setattr__(self, "controls", check_controls(self.controls))
        if self.prompt is None and not self.controls:
            raise InvalidArgumentError("an event carries a prompt or at least one control", field="prompt")
        tracks = [control.track for control in self.controls]
        if len(set(tracks)) != len(tracks):
            raise InvalidArgumentError("an event names each control track at most once", field="controls")
        size = self.size_bytes()
        if size > MAX_EVENT_BYTES:
            raise InvalidArgumentError(
                f"the event has {size} bytes, the limit is {MAX_EVENT_BYTES}", field="event"
            )

    def size_bytes(self) -> int:
        """Bytes of the event's fields as the stream carries them."""
        return sum(len(value.encode()) for value in self.to_entry().values())

    def to_entry(self) -> dict[str, str]:
        """The fields of its stream entry; absent ones are left out."""
        entry = {"event_id": str(self.event_id)}
        if self.prompt is not None:
            entry["prompt"] = self.prompt
        if self.controls:
            entry["controls"] = controls_to_json(self.controls)
        return entry

    @classmethod
    def from_entry(cls, fields: Mapping[bytes, bytes]) -> ARDiffusionSessionEvent:
        """Decodes one entry of the events stream, as any producer may have written it; strict.

        Raises InvalidArgumentError naming the field.
        """
        if sum(map(len, fields.values())) > MAX_EVENT_BYTES:
            raise InvalidArgumentError(f"the event exceeds {MAX_EVENT_BYTES} bytes", field="event")
        text = {_utf8(name, "field name"): _utf8(value, _label(name)) for name, value in fields.items()}
        unknown = sorted(set(text) - _ENTRY_FIELDS)
        if unknown:
            raise InvalidArgumentError(f"unknown field {unknown[0]!r:.80}", field=unknown[0][:80])
        if "event_id" not in text:
            raise InvalidArgumentError("event_id is missing", field="event_id")
        controls = controls_from_json(text["controls"]) if "controls" in text else ()
        return cls(parse_event_id(text["event_id"]), text.get("prompt"), controls)


def _utf8(value: bytes, field: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise InvalidArgumentError(f"{field} is not valid UTF-8", field=field) from None


def _label(name: bytes) -> str:
    return name[:80].decode(errors="replace")


def check_controls(value: object, field: str = "controls") -> tuple[ARDiffusionControlInput, ...]:
    """A tuple of control objects; lists are converted."""
    if type(value) is tuple and not value:
        return ()
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise InvalidArgumentError(f"{field} must be a sequence of controls", field=field)
    if not all(isinstance(item, ARDiffusionControlInput) for item in value):
        raise InvalidArgumentError(f"{field} must hold ARDiffusionControlInput only", field=field)
    return tuple(value)


class AcceptStatus(StrEnum):
    """How an event was received."""

    ACCEPTED = "ACCEPTED"
    DUPLICATE = "DUPLICATE"


@dataclass(frozen=True, slots=True)
class ARDiffusionEventReceipt:
    """What `accept_event` answers."""

    session_id: str
    event_id: int
    status: AcceptStatus
    pending_event_count: int

    def __post_init__(self) -> None:
        check_session_id(self.session_id)
        check_index(self.event_id, "event_id")
        check_index(self.pending_event_count, "pending_event_count")


class RejectReason(StrEnum):
    """Why an entry of the events stream was not applied."""

    INVALID = "invalid"
    DUPLICATE = "duplicate"
    STALE = "stale"
    QUEUE_FULL = "queue_full"
    NOT_ACTIVE = "not_active"
    INVALID_CONTROL = "invalid_control"
    RESET = "reset"
    CLOSED = "closed"
