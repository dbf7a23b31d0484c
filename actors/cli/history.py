"""`worldline history`."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from actors.broker_pool import Broker
from actors.cli.options import HOST_WAIT_S, JsonOption, SessionArgument
from actors.cli.output import clock, print_json, print_table
from actors.history import read_history

_COLUMNS = ("at", "trigger", "from", "to", "by", "reason")


def history(
    session_id: SessionArgument,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the last so many.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a session has been through, oldest first: each transition with who and why."""

    async def work() -> list[dict[str, Any]]:
        async with Broker(host_wait_s=HOST_WAIT_S) as broker:
            return await read_history(broker, session_id, limit=limit)

    lines = asyncio.run(work())
    if as_json:
        print_json(lines)
    else:
        print_table(
            _COLUMNS, [(clock(line["at_ms"]), *(line.get(name) for name in _COLUMNS[1:])) for line in lines]
        )
