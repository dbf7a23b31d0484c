"""Which session a request is for, and what happens to it around the forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from contracts.errors import InvalidArgumentError, InvalidTypeError, NotResidentError
from gpu_worker.capability import ARDiffusionRequest

DEFAULT_SESSION_ID: Final = "default"


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """Session and flags of one request: those of its tick, else those in `extra_args`.

    Args:
        session_id: the world; "default" where the request names none.
        reset: release the session before the forward.
        close_session: release it after a successful forward.
    """

    session_id: str
    reset: bool
    close_session: bool

    @classmethod
    def of(cls, request: ARDiffusionRequest) -> SessionRequest:
        """Reads them; InvalidArgumentError naming what is malformed."""
        if not isinstance(request, ARDiffusionRequest):
            raise InvalidTypeError(
                f"a request must be an ARDiffusionRequest, got {type(request).__name__}", field="request"
            )
        if request.tick is not None:
            return cls(request.tick.session_id, request.tick.reset, request.tick.close_session)
        extra = request.extra_args
        if not isinstance(extra, Mapping):
            raise InvalidArgumentError(
                f"extra_args must be a mapping, got {type(extra).__name__}", field="extra_args"
            )
        session_id = extra.get("session_id", DEFAULT_SESSION_ID)
        check_session_name(session_id)
        return cls(session_id, _flag(extra, "reset"), _flag(extra, "close_session"))


def _flag(extra_args: Mapping[str, Any], name: str) -> bool:
    value = extra_args.get(name, False)
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"extra_args.{name} must be a bool, got {value!r:.80}", field=name)
    return value


def check_session_name(value: object) -> None:
    """InvalidArgumentError unless `value` is a string that is not blank."""
    if not isinstance(value, str) or not value.strip():
        raise InvalidArgumentError(
            f"session_id must be a non-empty string, got {value!r:.80}", field="session_id"
        )


def check_begins(session_id: str, request: ARDiffusionRequest) -> None:
    """NotResidentError for a tick that needs a past, of a session that has none."""
    if request.tick is not None and request.tick.chunk_index > 0:
        raise NotResidentError(
            f"session {session_id!r} is not resident, so chunk {request.tick.chunk_index} can't continue it",
            field="session_id",
        )
