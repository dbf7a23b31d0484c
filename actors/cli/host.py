"""`worldline host`."""

from __future__ import annotations

import asyncio
import signal
from typing import Annotated

import typer

from actors.config import HostSettings
from contracts import failpoints
from contracts.config import load_settings
from contracts.event_loop import run
from contracts.logs import configure_logging


def host(
    host_id: Annotated[
        str | None,
        typer.Option(help="This host's name; by default made of machine and process.", show_default=False),
    ] = None,
) -> None:
    """Run a session host until SIGTERM or SIGINT; says `ready host=ID` once it owns its partitions."""
    settings = load_settings(HostSettings, host_id=host_id)
    configure_logging(settings.log_level, settings.log_format)
    failpoints.arm(settings.failpoints)
    run(_run(settings))


async def _run(settings: HostSettings) -> None:
    from actors.host import run_host  # only this command needs it

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await run_host(settings, stop=stop)
