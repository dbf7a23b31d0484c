"""`worldline janitor`."""

from __future__ import annotations

from typing import Annotated

import typer

from actors.config import JanitorSettings
from contracts.config import load_settings
from contracts.logs import configure_logging


def janitor(
    janitor_id: Annotated[
        str | None,
        typer.Option(help="This janitor's name; by default made of machine and process.", show_default=False),
    ] = None,
    scheduler: Annotated[
        bool,
        typer.Option(help="Move jobs to the queue when they are due; one janitor must."),
    ] = True,
) -> None:
    """Retry what failed and repair what is left over, until SIGTERM or SIGINT; says `ready janitor=ID`."""
    settings = load_settings(JanitorSettings, janitor_id=janitor_id)
    configure_logging(settings.log_level, settings.log_format)

    from actors.janitor.process import run_janitor  # only this command needs the job library

    run_janitor(settings, scheduler=scheduler)
