"""Every error that worldline raises, as one tree.

WorldlineError
 +-- InvalidArgumentError (ValueError)          invalid_argument
 |    +-- CorruptDataError                      corrupt_data
 +-- InvalidTypeError (TypeError)               invalid_argument
 +-- SessionError (RuntimeError)
 |    +-- SessionNotFoundError (LookupError)    not_found
 |    +-- SessionStateError                     invalid_state
 |    |    +-- SessionExistsError               already_exists
 |    +-- EventStaleError (ValueError)          stale
 |    +-- EventQueueFullError                   queue_full        retryable
 |    +-- NoCapacityError                       no_capacity       retryable
 |    +-- CommandExpiredError                   expired           retryable
 |    +-- CommandPoisonedError                  command_poisoned
 |    +-- TickFailedError                       any failure code
 |         +-- ModelError, ChunkMetadataError (ValueError), ReducerError, NotResidentError, ...
 +-- OwnershipLostError (RuntimeError)          fenced
 +-- BrokerError (ConnectionError)              broker_unreachable  retryable
 +-- ConfigurationError (ValueError)            bad_configuration
 |    +-- CapacityError                         cannot_fit
 +-- KVStateError (RuntimeError)                kv_state
      +-- PoolExhaustedError                    pool_exhausted

`code` and `retryable` are data: they cross the broker in an answer, and `error_from_dict` makes the same type again
(an InvalidTypeError comes back as InvalidArgumentError, with which it shares its code; a CapacityError is never sent).
Each class also derives from the builtin that plain Python code would catch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

FAILURE_CODES: Final = frozenset(
    {
        "model_error",
        "metadata_mismatch",
        "reducer_failed",
        "execution_timeout",
        "payload_lost",
        "worker_lost",
        "worker_restarted",
        "evicted",
        "not_resident",
        "parent_mismatch",
        "reset_failed",
        "state_lost",
    }
)


class WorldlineError(Exception):
    """Base of every error of this project.

    Args:
        message: what went wrong, for a person; names the field or key at fault.
        field: the field or key at fault, for a program.
    """

    code: str = "error"
    retryable: bool = False

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field

    def __str__(self) -> str:
        return self.message

    def to_dict(self) -> dict[str, Any]:
        """The wire form that an answer or a reply carries."""
        return {"code": self.code, "message": self.message, "field": self.field, "retryable": self.retryable}


class InvalidArgumentError(WorldlineError, ValueError):
    """Raised when a value is outside what the contract allows; `field` names it."""

    code = "invalid_argument"


class InvalidTypeError(WorldlineError, TypeError):
    """Raised when an object of the wrong kind is passed."""

    code = "invalid_argument"


class CorruptDataError(InvalidArgumentError):
    """Raised when a key of the broker holds what no writer of ours could have written."""

    code = "corrupt_data"


class SessionError(WorldlineError, RuntimeError):
    """Base of what a session answers instead of a result."""


class SessionNotFoundError(SessionError, LookupError):
    """Raised when no session of that id exists."""

    code = "not_found"


class SessionStateError(SessionError):
    """Raised when the session's state does not allow the operation; the message names the state."""

    code = "invalid_state"


class SessionExistsError(SessionStateError):
    """Raised when a session of that id exists already (a tombstone counts)."""

    code = "already_exists"


class EventStaleError(SessionError, ValueError):
    """Raised when an event id lies at or below the floor; the message names the floor."""

    code = "stale"


class EventQueueFullError(SessionError):
    """Raised when as many events are pending as the session allows."""

    code = "queue_full"
    retryable = True


class NoCapacityError(SessionError):
    """Raised when no worker of the model has room for one more session."""

    code = "no_capacity"
    retryable = True


class CommandExpiredError(SessionError):
    """Raised when a tick waited at the worker past its queue limit; the session stays ACTIVE."""

    code = "expired"
    retryable = True


class CommandPoisonedError(SessionError):
    """Raised when a command was found unfinished by three owners in a row."""

    code = "command_poisoned"


class TickFailedError(SessionError):
    """Raised when a chunk failed and the session is FAILED; `code` is the failure code."""

    def __init__(self, message: str, *, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message, field=field)
        if code is not None:
            self.code = code


class ModelError(TickFailedError):
    """Raised when the pipeline raised, or reported an error of its own."""

    code = "model_error"


class ChunkMetadataError(TickFailedError, ValueError):
    """Raised when the metadata that came back does not equal the tick."""

    code = "metadata_mismatch"


class ReducerError(TickFailedError):
    """Raised when the control reducer failed in `prepare` or `commit`."""

    code = "reducer_failed"


class NotResidentError(TickFailedError):
    """Raised when a tick beyond chunk 0 finds no resident session on the worker."""

    code = "not_resident"


class OwnershipLostError(WorldlineError, RuntimeError):
    """Raised when a write was refused because a newer epoch owns the session."""

    code = "fenced"


class BrokerError(WorldlineError, ConnectionError):
    """Raised when the broker can't be reached or refused the command."""

    code = "broker_unreachable"
    retryable = True


class ConfigurationError(WorldlineError, ValueError):
    """Raised at start-up when a setting is wrong; `field` names the setting."""

    code = "bad_configuration"


class CapacityError(ConfigurationError):
    """Raised when one session does not fit on the device.

    Args:
        available_bytes: what the device offers.
        required_bytes: what one session needs.
    """

    code = "cannot_fit"

    def __init__(self, message: str, *, available_bytes: int, required_bytes: int) -> None:
        super().__init__(message, field="available_bytes")
        self.available_bytes = available_bytes
        self.required_bytes = required_bytes


class KVStateError(WorldlineError, RuntimeError):
    """Raised when KV is used outside its life or order (closed state, uncommitted pages)."""

    code = "kv_state"


class PoolExhaustedError(KVStateError):
    """Raised when the paged pool has no free page left."""

    code = "pool_exhausted"


_BY_CODE: Final[Mapping[str, type[WorldlineError]]] = {
    cls.code: cls
    for cls in (
        InvalidArgumentError,
        CorruptDataError,
        SessionNotFoundError,
        SessionStateError,
        SessionExistsError,
        EventStaleError,
        EventQueueFullError,
        NoCapacityError,
        CommandExpiredError,
        CommandPoisonedError,
        ModelError,
        ChunkMetadataError,
        ReducerError,
        NotResidentError,
        OwnershipLostError,
        BrokerError,
        ConfigurationError,
        KVStateError,
        PoolExhaustedError,
    )
}


def error_from_dict(data: Mapping[str, Any]) -> WorldlineError:
    """The typed error that an answer or reply carries.

    Unknown codes (of a newer peer) become a plain `SessionError` that keeps code and message.
    """
    code, message = str(data.get("code")), str(data.get("message"))
    field = data["field"] if isinstance(data.get("field"), str) else None
    cls = _BY_CODE.get(code)
    if cls is not None:
        return cls(message, field=field)
    if code in FAILURE_CODES:
        return TickFailedError(message, field=field, code=code)
    error = SessionError(message, field=field)
    error.code = code
    error.retryable = bool(data.get("retryable", False))
    return error


def answer_codes() -> tuple[str, ...]:
    """Every code that has a class or names a failure, sorted."""
    return tuple(sorted(FAILURE_CODES | set(_BY_CODE)))
