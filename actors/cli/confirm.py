"""The question before something that can't be taken back."""

from __future__ import annotations

import sys

import typer


def confirm(question: str) -> None:
    """Asks on the terminal; anything but yes ends the command. Raises a usage error where nobody can answer."""
    if not sys.stdin.isatty():
        raise typer.BadParameter("there is no terminal to ask on; give --yes", param_hint="--yes")
    typer.confirm(question, abort=True, err=True)
