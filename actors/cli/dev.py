"""`worldline dev`."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from actors.cli.options import JsonOption
from actors.cli.output import note, print_json
from actors.config import ClientSettings
from actors.dev.embedded import choose_port
from actors.dev.stack import Stack
from contracts.config import load_settings


def dev(
    port: Annotated[
        int | None,
        typer.Option(
            min=1, max=65535, help="Of the broker; 6379, or a free one, by default.", show_default=False
        ),
    ] = None,
    data_dir: Annotated[Path, typer.Option(help="Keeps the sessions from one start to the next.")] = Path(
        ".worldline"
    ),
    model: Annotated[str, typer.Option(help="What the worker serves.")] = "reference",
    as_json: JsonOption = False,
) -> None:
    """Run a broker, a host, a worker and a janitor until SIGINT or SIGTERM, and start again what dies. Ignores REDIS_URL."""
    load_settings(ClientSettings)  # a bad setting is told here, not in three logs
    with Stack(data_dir, port=choose_port(port), model=model, say=note) as stack:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stack.stopping.set())
        if not stack.start_broker():
            return
        if not as_json:
            typer.echo(f"REDIS_URL={stack.url}")
        if not stack.start_services(janitor=True):
            return
        if as_json:
            print_json({"redis_url": stack.url, "ready": True})
        else:
            typer.echo("ready")
        stack.supervisor.watch(stack.stopping)
