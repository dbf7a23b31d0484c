"""The commands put together, and the one place where errors end."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Final

import typer

from actors.cli import (
    demo,
    dev,
    doctor,
    fsck,
    history,
    host,
    hosts,
    janitor,
    plan,
    sessions,
    tombstones,
    watching,
    workers,
)
from actors.cli.exit_codes import ExitCode, exit_code
from actors.cli.output import print_error, print_json
from contracts.errors import WorldlineError

# What typer raises for a command line that it can't parse; it exports only this most special kind.
_UsageError: Final = typer.BadParameter.__bases__[0]

app = typer.Typer(
    name="worldline",
    help="Serve persistent, interactive worlds. The broker is REDIS_URL; other settings are WORLDLINE_*.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("dev")(dev.dev)
app.command("demo")(demo.demo)
app.command("host")(host.host)
app.command("janitor")(janitor.janitor)
app.command("doctor")(doctor.doctor)
app.command("plan")(plan.plan)
sessions.app.command("watch")(watching.watch)
app.add_typer(sessions.app, name="sessions")
app.command("history")(history.history)
app.add_typer(tombstones.app, name="tombstones")
app.add_typer(workers.app, name="workers")
app.add_typer(hosts.app, name="hosts")
app.command("fsck")(fsck.fsck)


def run_command(arguments: Sequence[str]) -> int:
    """Runs one command and returns its exit status."""
    as_json = "--json" in arguments
    try:
        status = app(list(arguments), prog_name="worldline", standalone_mode=False)
        sys.stdout.flush()
    except WorldlineError as error:
        print_error(error, as_json=as_json)
        return exit_code(error)
    except (BrokenPipeError, SystemExit):  # typer makes the one of the other
        _discard_stdout()  # the reader has had enough, as in `worldline sessions watch ID | head -1`
        return ExitCode.OK
    except (KeyboardInterrupt, typer.Abort):
        return ExitCode.INTERRUPTED
    except Exception as error:
        if not isinstance(error, _UsageError):
            raise
        return _usage(error, as_json=as_json)
    return status if isinstance(status, int) else ExitCode.OK


def _usage(error: Exception, *, as_json: bool) -> int:
    if as_json:
        text = error.format_message()  # type: ignore[attr-defined]
        print_json({"error": {"code": "usage", "message": text, "field": None, "retryable": False}})
    else:
        error.show()  # type: ignore[attr-defined]
    return ExitCode.USAGE


def _discard_stdout() -> None:
    sys.stdout = sys.__stdout__
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
