"""`worldline demo`."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from actors.cli.options import JsonOption
from actors.cli.output import note, print_json
from actors.config import ClientSettings
from contracts.config import load_settings


def demo(
    *,
    chunks: Annotated[int, typer.Option(min=1, max=1000, help="How many to make.")] = 12,
    out: Annotated[Path, typer.Option(help="Folder of the pictures.")] = Path("demo-out"),
    seed: Annotated[int, typer.Option(min=0, help="Another seed is another world.")] = 7,
    model: Annotated[str, typer.Option(help="What the worker serves.")] = "reference",
    lockstep: Annotated[
        bool, typer.Option("--lockstep", help="Chunk by chunk, so that a run can be repeated exactly.")
    ] = False,
    no_keys: Annotated[bool, typer.Option("--no-keys", help="Leave the key events out.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Drive a world on processes of its own, and make two pictures of it."""
    from actors.demo.drive import Options  # numpy and Pillow come with it
    from actors.demo.play import play
    from actors.demo.report import Progress, summary_lines

    load_settings(ClientSettings)
    signal.signal(signal.SIGTERM, _interrupt)
    options = Options(chunks=chunks, seed=seed, model=model, lockstep=lockstep, keys=not no_keys)
    report = play(options, out, Progress())
    committed = f"committed {report['summary']['committed']} chunks"
    if as_json:
        note(committed)
        print_json(report)
        return
    typer.echo(committed)
    for line in summary_lines(report["summary"]):
        typer.echo(line)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """SIGTERM ends the demo as Ctrl-C does: with everything stopped."""
    raise KeyboardInterrupt
