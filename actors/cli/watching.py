"""`worldline sessions watch`."""

from __future__ import annotations

from typing import Annotated

import typer

from actors.cli.options import JsonOption, SessionArgument, with_session
from actors.cli.output import print_json_line
from actors.cli.sessions import chunk_row
from actors.client import SessionClient
from contracts.state import CommittedChunk

_LINE = "{:>6}  {:<12}  {:>9}  {:>7}  {:>13}  {:>10}  {}"


def watch(
    session_id: SessionArgument,
    from_start: Annotated[
        bool, typer.Option(help="Begin with the oldest chunk that is still listed.")
    ] = False,
    count: Annotated[int | None, typer.Option(min=1, help="End after so many.", show_default=False)] = None,
    as_json: JsonOption = False,
) -> None:
    """Print chunks as they are committed, until the session is closed; with --json, one JSON line each."""

    async def work(session: SessionClient) -> None:
        printed = 0
        await session.state()  # a session that does not exist is told of before the head of the table
        if not as_json:
            typer.echo(
                _LINE.format("chunk", "events", "queued ms", "ran ms", "to applied ms", "bytes", "sha256")
            )
        async for chunk in session.watch(from_start):
            _print(chunk, as_json=as_json)
            printed += 1
            if printed == count:
                return

    with_session(session_id, None, work)


def _print(chunk: CommittedChunk, *, as_json: bool) -> None:
    if as_json:
        print_json_line(chunk.to_dict())
    else:
        typer.echo(_LINE.format(*chunk_row(chunk)))
