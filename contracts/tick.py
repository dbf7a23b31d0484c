"""The tick: an immutable snapshot that yields one chunk, and the metadata that must come back equal to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from contracts.errors import ChunkMetadataError, InvalidArgumentError
from contracts.events import ARDiffusionControlInput, check_controls, check_prompt, parse_controls
from contracts.identity import check_index, check_text_id

EXTRA_ARGS_KEY: Final = "ar_diffusion_tick"
METADATA_KEY: Final = "ar_diffusion"

_METADATA_FIELDS: Final = ("session_id", "request_id", "chunk_index", "applied_event_ids")
_METADATA_NAMES: Final = frozenset(_METADATA_FIELDS)
_TICK_NAMES: Final = _METADATA_NAMES | {"prompt", "controls", "reset", "close_session"}
_LISTS: Final = (list, tuple)


def check_event_ids(value: object, field: str = "applied_event_ids") -> tuple[int, ...]:
    """Event ids as a tuple: integers >= 0, unique and strictly increasing."""
    if type(value) in _LISTS and not value:
        return ()
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Sequence):
        raise InvalidArgumentError(f"{field} must be a sequence of event ids", field=field)
    ids = tuple(check_index(item, field) for item in value)
    if any(later <= earlier for earlier, later in pairwise(ids)):
        raise InvalidArgumentError(
            f"{field} must be unique and strictly increasing, got {ids!s:.200}", field=field
        )
    return ids


def _check_bool(value: object, field: str) -> None:
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"{field} must be a bool, got {value!r:.40}", field=field)


@dataclass(frozen=True, slots=True)
class ARDiffusionTickRequest:
    """Everything that one chunk is generated from.

    Args:
        session_id: the world.
        request_id: this execution; comes back in the metadata.
        chunk_index: position of the chunk, from 0, contiguous.
        applied_event_ids: ids of the events that this tick applies, strictly increasing.
        prompt: the prompt in force, or None.
        controls: the reduced controls, one a track.
        reset: drop the session's state before the forward.
        close_session: release the session after a successful forward.
    """

    session_id: str
    request_id: str
    chunk_index: int
    applied_event_ids: tuple[int, ...] = ()
    prompt: str | None = None
    controls: tuple[ARDiffusionControlInput, ...] = ()
    reset: bool = False
    close_session: bool = False

    def __post_init__(self) -> None:
        check_text_id(self.session_id, "session_id")
        check_text_id(self.request_id, "request_id")
        check_index(self.chunk_index, "chunk_index")
        object.__setattr__(self, "applied_event_ids", check_event_ids(self.applied_event_ids))
        check_prompt(self.prompt)
        object.__setattr__(self, "controls", check_controls(self.controls))
        _check_bool(self.reset, "reset")
        _check_bool(self.close_session, "close_session")

    def to_dict(self) -> dict[str, Any]:
        """The plain form, eight fields."""
        return {
            "session_id": self.session_id,
            "request_id": self.request_id,
            "chunk_index": self.chunk_index,
            "applied_event_ids": list(self.applied_event_ids),
            "prompt": self.prompt,
            "controls": [control.to_dict() for control in self.controls],
            "reset": self.reset,
            "close_session": self.close_session,
        }

    @classmethod
    def from_dict(cls, value: object) -> ARDiffusionTickRequest:
        """Strict: exactly the eight fields."""
        fields = _exact_fields(value, _TICK_NAMES, EXTRA_ARGS_KEY)
        controls = parse_controls(fields["controls"])
        return cls(**{**fields, "controls": controls})

    def to_extra_args(self) -> dict[str, Any]:
        """`{"ar_diffusion_tick": {...}}`, the form that sampling parameters carry."""
        return {EXTRA_ARGS_KEY: self.to_dict()}

    @classmethod
    def from_extra_args(cls, extra_args: Mapping[str, Any] | None) -> ARDiffusionTickRequest | None:
        """The tick in `extra_args`, or None for a request that carries none."""
        if extra_args is None or EXTRA_ARGS_KEY not in extra_args:
            return None
        return cls.from_dict(extra_args[EXTRA_ARGS_KEY])


@dataclass(frozen=True, slots=True)
class ARDiffusionChunkMetadata:
    """What the model says it made; it commits only if it equals the tick."""

    session_id: str
    request_id: str
    chunk_index: int
    applied_event_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        check_text_id(self.session_id, "session_id")
        check_text_id(self.request_id, "request_id")
        check_index(self.chunk_index, "chunk_index")
        object.__setattr__(self, "applied_event_ids", check_event_ids(self.applied_event_ids))

    @classmethod
    def from_tick(cls, tick: ARDiffusionTickRequest) -> ARDiffusionChunkMetadata:
        """The metadata that a pipeline returns for `tick`."""
        return cls(tick.session_id, tick.request_id, tick.chunk_index, tick.applied_event_ids)

    def to_dict(self) -> dict[str, Any]:
        """The plain form, four fields."""
        return {
            "session_id": self.session_id,
            "request_id": self.request_id,
            "chunk_index": self.chunk_index,
            "applied_event_ids": list(self.applied_event_ids),
        }

    @classmethod
    def from_dict(cls, value: object) -> ARDiffusionChunkMetadata:
        """Strict: exactly the four fields, each of its own type (a bool is no int)."""
        return cls(**_exact_fields(value, _METADATA_NAMES, METADATA_KEY))

    def check_equals(self, tick: ARDiffusionTickRequest) -> None:
        """ChunkMetadataError, naming the first field that does not match."""
        expected = ARDiffusionChunkMetadata.from_tick(tick)
        for name in _METADATA_FIELDS:
            if getattr(self, name) != getattr(expected, name):
                raise ChunkMetadataError(
                    f"chunk metadata does not match the tick: {name} is {getattr(self, name)!r:.120}, "
                    f"submitted was {getattr(expected, name)!r:.120}",
                    field=name,
                )


def metadata_from_envelope(metadata: object) -> ARDiffusionChunkMetadata:
    """Decodes the output envelope `{"ar_diffusion": {...}}`; ChunkMetadataError where it is not one."""
    if not isinstance(metadata, Mapping) or METADATA_KEY not in metadata:
        raise ChunkMetadataError(f"the output's metadata has no {METADATA_KEY!r}", field=METADATA_KEY)
    try:
        return ARDiffusionChunkMetadata.from_dict(metadata[METADATA_KEY])
    except InvalidArgumentError as error:
        raise ChunkMetadataError(f"malformed chunk metadata: {error}", field=error.field) from error


def _exact_fields(value: object, names: frozenset[str], what: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidArgumentError(f"{what} must be a mapping, got {type(value).__name__}", field=what)
    if value.keys() != names:
        wrong = sorted(map(str, set(value) ^ names))
        raise InvalidArgumentError(f"{what} has missing or unknown fields: {wrong}", field=wrong[0])
    return dict(value)
