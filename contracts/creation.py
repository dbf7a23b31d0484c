"""The creation parameters of a session, and what is allowed for each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from contracts.errors import InvalidArgumentError
from contracts.events import MAX_EVENT_BYTES, check_prompt, freeze, thaw
from contracts.identity import DIGITS_PATTERN, check_index, check_text_id, parse_index

DEFAULT_MAX_PENDING_EVENTS: Final = 256
MAX_PENDING_EVENTS: Final = 10_000
DEFAULT_RECORDING: Final = "last 1000"
RECORDING_PATTERN: Final = f"(off|all|last {DIGITS_PATTERN})"
DEFAULT_REDUCER: Final = "latest"


def only_fields(value: Mapping[str, Any], allowed: frozenset[str], what: str) -> None:
    """InvalidArgumentError naming the first field of `value` that is not among `allowed`."""
    unknown = sorted(set(value) - allowed)
    if unknown:
        raise InvalidArgumentError(f"{what} has no field {unknown[0]!r:.80}", field=unknown[0][:80])


@dataclass(frozen=True, slots=True)
class CreateArgs:
    """Creation parameters of a session.

    Args:
        model: name of the model; a worker that serves it must be alive.
        reducer: entry point name of the control reducer.
        seed: all randomness of the session comes from it; None leaves the model's default.
        prompt: the first prompt.
        params: JSON object that only the model reads.
        recording: "off", "all" or "last N" committed ticks kept for export and replay.
        max_pending_events: length of the event queue.
        pace_ms: start free-running, one chunk each so many milliseconds (0: as fast as the worker goes).
        presence_ms: close when the client's presence has been gone this long.
        idle_ms: close when neither event nor command came for this long.
    """

    model: str
    reducer: str = DEFAULT_REDUCER
    seed: int | None = None
    prompt: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    recording: str = DEFAULT_RECORDING
    max_pending_events: int = DEFAULT_MAX_PENDING_EVENTS
    pace_ms: int | None = None
    presence_ms: int | None = None
    idle_ms: int | None = None

    def __post_init__(self) -> None:
        check_text_id(self.model, "model")
        check_text_id(self.reducer, "reducer")
        prompt = check_prompt(self.prompt)
        if prompt is not None and len(prompt.encode()) > MAX_EVENT_BYTES:
            raise InvalidArgumentError(f"prompt exceeds {MAX_EVENT_BYTES} bytes", field="prompt")
        for name in ("seed", "pace_ms", "presence_ms", "idle_ms"):
            if getattr(self, name) is not None:
                check_index(getattr(self, name), name)
        limit = check_index(self.max_pending_events, "max_pending_events")
        if not 0 < limit <= MAX_PENDING_EVENTS:
            raise InvalidArgumentError(
                f"max_pending_events must be 1 to {MAX_PENDING_EVENTS}, got {limit}",
                field="max_pending_events",
            )
        if not isinstance(self.params, Mapping):
            raise InvalidArgumentError("params must be an object", field="params")
        object.__setattr__(self, "params", freeze(self.params, "params"))
        if len(orjson.dumps(thaw(self.params))) > MAX_EVENT_BYTES:
            raise InvalidArgumentError(f"params exceed {MAX_EVENT_BYTES} bytes", field="params")
        recording_limit(self.recording)

    def to_dict(self) -> dict[str, Any]:
        """The command's `args`; what is unset is left out."""
        values = {name: thaw(getattr(self, name)) for name in CREATE_FIELDS}
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> CreateArgs:
        """Strict; `model` is required."""
        only_fields(value, CREATE_FIELDS, "create")
        if "model" not in value:
            raise InvalidArgumentError("create needs a model", field="model")
        return cls(**{name: item for name, item in value.items() if item is not None or name == "model"})


CREATE_FIELDS: Final = frozenset(CreateArgs.__dataclass_fields__)
"""The arguments that `create` knows."""


def recording_limit(recording: object) -> int | None:
    """How many committed ticks are kept: 0 for "off", None for "all", N for "last N"."""
    if not isinstance(recording, str) or re.fullmatch(RECORDING_PATTERN, recording) is None:
        raise InvalidArgumentError('recording must be "off", "all" or "last N"', field="recording")
    if recording == "all":
        return None
    return 0 if recording == "off" else parse_index(recording.removeprefix("last "), "recording")
