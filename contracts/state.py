"""The state hash of a session, typed. Only scripts write it; everybody may read it.

An absent field is None. What no writer of ours could have written raises CorruptDataError naming the field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, Final

from contracts.errors import CorruptDataError, InvalidArgumentError, WorldlineError
from contracts.events import ARDiffusionControlInput, controls_from_json, loads, thaw
from contracts.identity import check_index, check_text_id, parse_index
from contracts.lifecycle import Status
from contracts.messages import InFlight
from contracts.tick import check_event_ids

Flat = Mapping[bytes, bytes]
"""A hash, or the fields of a stream entry, as the broker answers them."""


@dataclass(frozen=True, slots=True)
class SessionState:
    """One session as the broker holds it.

    Args:
        chunk_index: index of the next chunk.
        event_floor: highest applied (or dropped) event id, -1 at first.
        pace_ms: set while the session runs free.
        rejected_total: count of rejected entries by reason.
    """

    session_id: str
    status: Status
    epoch: int = 0
    fence: int = 0
    life: str = ""
    chunk_index: int = 0
    event_floor: int = -1
    prompt: str | None = None
    controls: tuple[ARDiffusionControlInput, ...] = ()
    reducer: str = "latest"
    reducer_state: Any = None
    inflight: InFlight | None = None
    last_request_id: str | None = None
    model: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    worker: str | None = None
    worker_incarnation: str | None = None
    recording: str | None = None
    max_pending_events: int = 256
    pace_ms: int | None = None
    presence_ms: int | None = None
    idle_ms: int | None = None
    rejected_total: Mapping[str, int] = field(default_factory=dict)
    failure_code: str | None = None
    failure_message: str | None = None
    cleanup_error: str | None = None
    close_attempts: int = 0
    created_at_ms: int | None = None
    updated_at_ms: int | None = None
    schema_version: int = 1

    @classmethod
    def from_hash(cls, session_id: str, raw: Flat) -> SessionState | None:
        """None for an empty hash: no such session."""
        if not raw:
            return None
        values: dict[str, Any] = {}
        for name, read in _READERS.items():
            text = raw.get(name.encode())
            if text is not None:
                values[name] = _read_field(f"session {session_id}: state", name, text, read)
        if "status" not in values:
            raise CorruptDataError(f"session {session_id}: the state hash has no status", field="status")
        return cls(session_id=session_id, **values)

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable fields, for tools: the hash's fields, typed, and `session_id`."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        values["controls"] = [control.to_dict() for control in self.controls]
        values["params"] = thaw(self.params)
        values["inflight"] = None if self.inflight is None else _inflight_to_dict(self.inflight)
        return values

    def changed(self, **changes: Any) -> SessionState:
        """A copy with other values of some fields.

        `dataclasses.replace` takes four times as long, and each tick needs two.
        """
        copy = object.__new__(SessionState)
        for write, value in zip(_WRITERS, _values(self), strict=True):
            write(copy, value)
        for name, value in changes.items():
            object.__setattr__(copy, name, value)
        return copy

    @property
    def parent_request_id(self) -> str:
        """Request id of the last committed chunk, or the life at chunk 0."""
        return self.last_request_id if self.chunk_index > 0 and self.last_request_id else self.life


_FIELDS: Final = [item.name for item in fields(SessionState)]
_values: Final = attrgetter(*_FIELDS)
_WRITERS: Final = [getattr(SessionState, name).__set__ for name in _FIELDS]


def _inflight_to_dict(record: InFlight) -> dict[str, Any]:
    values = {item.name: thaw(getattr(record, item.name)) for item in fields(record)}
    values["controls"] = loads(record.controls, "controls")
    if record.reducer_state is not None:
        values["reducer_state"] = loads(record.reducer_state, "reducer_state")
    return values


def _read_field(where: str, name: str, text: bytes, read: Callable[[str], Any]) -> Any:
    try:
        return read(text.decode())
    except (ValueError, TypeError, KeyError, WorldlineError) as error:
        raise CorruptDataError(f"{where} field {name} is corrupt: {error}", field=name) from error


def _json(text: str) -> Any:
    return loads(text, "state")


def _object(text: str) -> dict[str, Any]:
    value = _json(text)
    if not isinstance(value, dict):
        raise InvalidArgumentError("not an object", field="state")
    return value


def _counts(text: str) -> dict[str, int]:
    return {reason: check_index(count, reason) for reason, count in _object(text).items()}


def _count(text: str) -> int:
    return parse_index(text, "state")


def _floor(text: str) -> int:
    return -1 if text == "-1" else _count(text)


_READERS: Final[Mapping[str, Callable[[str], Any]]] = {
    "status": Status,
    "epoch": _count,
    "fence": _count,
    "life": str,
    "chunk_index": _count,
    "event_floor": _floor,
    "prompt": str,
    "controls": controls_from_json,
    "reducer": str,
    "reducer_state": _json,
    "inflight": InFlight.from_json,
    "last_request_id": str,
    "model": str,
    "params": _object,
    "seed": _count,
    "worker": str,
    "worker_incarnation": str,
    "recording": str,
    "max_pending_events": _count,
    "pace_ms": _count,
    "presence_ms": _count,
    "idle_ms": _count,
    "rejected_total": _counts,
    "failure_code": str,
    "failure_message": str,
    "cleanup_error": str,
    "close_attempts": _count,
    "created_at_ms": _count,
    "updated_at_ms": _count,
    "schema_version": _count,
}


@dataclass(frozen=True, slots=True)
class CommittedChunk:
    """One entry of the `chunks` stream, typed; also the result of `next_chunk`.

    Args:
        queued_ms: from sending the tick to the worker's start on it.
        executed_ms: in the worker.
        accepted_to_applied_ms: from the acceptance of the oldest applied event to the commit; None without events.
        committed_at_ms: broker time.
    """

    life: str
    chunk_index: int
    request_id: str
    applied_event_ids: tuple[int, ...]
    payload: str
    content_type: str
    sha256: str
    bytes: int
    frames: str | None
    queued_ms: int
    executed_ms: int
    accepted_to_applied_ms: int | None
    committed_at_ms: int

    def to_dict(self) -> dict[str, Any]:
        """The answer's form; absent values are None."""
        return {item.name: thaw(getattr(self, item.name)) for item in fields(self)}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> CommittedChunk:
        """From the answer's form; CorruptDataError names the field at fault, unknown ones are left out."""
        try:
            return cls(**{name: check(value.get(name), name) for name, check in _CHUNK_CHECKS.items()})
        except InvalidArgumentError as error:
            raise CorruptDataError(f"no committed chunk: {error}", field=error.field) from error

    @classmethod
    def from_entry(cls, raw: Flat) -> CommittedChunk:
        """From the flat fields of the stream entry; CorruptDataError names the field at fault."""
        values: dict[str, Any] = {}
        for name, check in _CHUNK_CHECKS.items():
            text = raw.get(name.encode())
            if text is not None:
                read = _CHUNK_READERS.get(check, str)
                values[name] = _read_field("chunks entry", name, text, read)
        return cls.from_dict(values)


def _optional_index(value: object, field: str) -> int | None:
    return None if value is None else check_index(value, field)


def _optional_text(value: object, field: str) -> str | None:
    return None if value is None else check_text_id(value, field)


_CHUNK_CHECKS: Final[Mapping[str, Callable[[object, str], Any]]] = {
    "life": check_text_id,
    "chunk_index": check_index,
    "request_id": check_text_id,
    "applied_event_ids": check_event_ids,
    "payload": check_text_id,
    "content_type": check_text_id,
    "sha256": check_text_id,
    "bytes": check_index,
    "frames": _optional_text,
    "queued_ms": check_index,
    "executed_ms": check_index,
    "accepted_to_applied_ms": _optional_index,
    "committed_at_ms": check_index,
}

_CHUNK_READERS: Final[Mapping[Callable[[object, str], Any], Callable[[str], Any]]] = {
    check_index: _count,
    _optional_index: _count,
    check_event_ids: _json,
}
"""How the flat text of a field that is no string is read before it is checked."""
