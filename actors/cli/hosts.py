"""`worldline hosts`: list."""

from __future__ import annotations

import asyncio
from typing import Any

import typer

from actors.broker_pool import Broker
from actors.cli.options import HOST_WAIT_S, JsonOption
from actors.cli.output import clock, print_json, print_table
from actors.processes import list_hosts

app = typer.Typer(help="The processes that own sessions.", no_args_is_help=True)


@app.callback()
def hosts() -> None:
    """The processes that own sessions."""


@app.command("list")
def list_(as_json: JsonOption = False) -> None:
    """List session hosts and the partitions that each owns."""

    async def work() -> list[dict[str, Any]]:
        async with Broker(host_wait_s=HOST_WAIT_S) as broker:
            return await list_hosts(broker)

    found = asyncio.run(work())
    if as_json:
        print_json(found)
        return
    rows = [
        (
            host["host"],
            host["state"],
            ",".join(map(str, host["partitions"])) or "-",
            clock(host["last_seen_ms"]),
        )
        for host in found
    ]
    print_table(("host", "state", "partitions", "last seen"), rows)
