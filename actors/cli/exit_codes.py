"""What a command's exit status means; the only place where an error becomes a number."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from actors.dev.stack import DataDirInUseError
from actors.processes import WorkerAliveError, WorkerNotFoundError
from contracts.broker import BrokerFullError
from contracts.errors import (
    BrokerError,
    ConfigurationError,
    CorruptDataError,
    EventStaleError,
    InvalidArgumentError,
    InvalidTypeError,
    OwnershipLostError,
    SessionNotFoundError,
    SessionStateError,
    WorldlineError,
)


class ExitCode(IntEnum):
    """Scripts may rely on these; those above 64 are the ones of sysexits.h."""

    OK = 0
    SOME_FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    REFUSED = 4
    CORRUPT_DATA = 65
    UNREACHABLE = 69
    TRY_LATER = 75
    BAD_CONFIGURATION = 78
    INTERRUPTED = 130


_BY_TYPE: Final[tuple[tuple[type[WorldlineError], ExitCode], ...]] = (
    (SessionNotFoundError, ExitCode.NOT_FOUND),
    (WorkerNotFoundError, ExitCode.NOT_FOUND),
    (WorkerAliveError, ExitCode.REFUSED),
    (SessionStateError, ExitCode.REFUSED),
    (EventStaleError, ExitCode.REFUSED),
    (OwnershipLostError, ExitCode.REFUSED),
    (DataDirInUseError, ExitCode.REFUSED),
    (CorruptDataError, ExitCode.CORRUPT_DATA),
    (InvalidArgumentError, ExitCode.USAGE),
    (InvalidTypeError, ExitCode.USAGE),
    (ConfigurationError, ExitCode.BAD_CONFIGURATION),
    (BrokerFullError, ExitCode.TRY_LATER),
    (BrokerError, ExitCode.UNREACHABLE),
)
"""The first type that fits decides, so a class stands before the class that it derives from."""


def exit_code(error: WorldlineError) -> ExitCode:
    """The exit status of a command that ended with `error`."""
    for cls, code in _BY_TYPE:
        if isinstance(error, cls):
            return code
    return ExitCode.TRY_LATER if error.retryable else ExitCode.SOME_FAILED
