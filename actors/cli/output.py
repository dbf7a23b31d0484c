"""What commands print: results on stdout, for people or as JSON; progress and errors on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import orjson
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from contracts.errors import WorldlineError


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    typer.echo(orjson.dumps(value, option=orjson.OPT_INDENT_2))


def print_json_line(value: Any) -> None:
    """One line of JSON Lines, written through at once so that a pipe sees it."""
    typer.echo(orjson.dumps(value))
    sys.stdout.flush()


def note(text: str) -> None:
    """Progress, on stderr."""
    typer.echo(text, err=True)


def print_error(error: WorldlineError, *, as_json: bool) -> None:
    """One clear line on stderr, or `{"error": {...}}` on stdout."""
    if as_json:
        print_json({"error": error.to_dict()})
    else:
        typer.secho("error: ", fg="red", bold=True, nl=False, err=True)
        typer.echo(" ".join(str(error).split()), err=True)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A plain table on stdout; numbers to the right. Values are shown as they are, never read as markup."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    cells = [[_cell(value) for value in row] for row in rows]
    for index, column in enumerate(columns):
        numbers = bool(cells) and all(isinstance(row[index], Number) for row in cells)
        table.add_column(column, justify="right" if numbers else "left", overflow="fold")
    for row in cells:
        table.add_row(*row)
    _console().print(table)


def print_fields(fields: Mapping[str, object]) -> None:
    """Names and values, one a line, without those that are None."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in fields.items():
        if value is not None:
            table.add_row(name, _cell(value))
    _console().print(table)


def clock(at_ms: int | None) -> str:
    """A broker time for people, in UTC."""
    if at_ms is None:
        return ""
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z"


class Number(Text):
    """A cell that holds a number."""


def _cell(value: object) -> Text:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Number(str(value))
    if isinstance(value, Mapping | list | tuple):
        return Text(orjson.dumps(value).decode())
    return Text("" if value is None else str(value))


def _console() -> Console:
    # A pipe has no width of its own; what is read by programs must not be wrapped at 80.
    return Console(width=None if sys.stdout.isatty() else 200, highlight=False)
