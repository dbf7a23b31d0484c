"""Where `worldline` begins. The commands are imported late: it takes a second, in which Ctrl-C is Ctrl-C as well."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final, NoReturn

_INTERRUPTED: Final = 130


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs one command and exits with its status."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Runs one command and returns its exit status."""
    try:
        from actors.cli.commands import run_command

        return run_command(arguments)
    except KeyboardInterrupt:
        return _INTERRUPTED
