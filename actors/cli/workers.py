"""`worldline workers`: list, forget."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from actors.broker_pool import Broker
from actors.cli.confirm import confirm
from actors.cli.exit_codes import ExitCode
from actors.cli.options import HOST_WAIT_S, JsonOption
from actors.cli.output import clock, note, print_json, print_table
from actors.processes import forget_worker, list_workers

app = typer.Typer(help="The processes that hold sessions' memory.", no_args_is_help=True)

_NAMES = ("worker", "state", "model", "capacity", "reserved", "resident", "waiting")


@app.command("list")
def list_(as_json: JsonOption = False) -> None:
    """List workers: alive, silent (no heartbeat) or lost (silent for long)."""

    async def work() -> list[dict[str, Any]]:
        async with Broker(host_wait_s=HOST_WAIT_S) as broker:
            return await list_workers(broker)

    found = asyncio.run(work())
    if as_json:
        print_json(found)
        return
    rows = [
        (*(worker[name] for name in _NAMES), clock(worker["busy_since_ms"]), clock(worker["last_seen_ms"]))
        for worker in found
    ]
    print_table((*_NAMES, "busy since", "last seen"), rows)


@app.command()
def forget(
    worker_id: Annotated[str, typer.Argument(metavar="ID", help="The worker's name.", show_default=False)],
    *,
    force: Annotated[bool, typer.Option("--force", help="Even though it is alive.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Declare a worker lost: its sessions fail, or start on another worker where they have nothing to lose."""
    if not yes:
        confirm(f"Declare worker {worker_id} lost? Its sessions lose their memory.")

    async def work() -> tuple[int, list[str]]:
        async with Broker(host_wait_s=HOST_WAIT_S) as broker:
            return await forget_worker(broker, worker_id, force=force)

    told, unreadable = asyncio.run(work())
    if as_json:
        print_json({"worker": worker_id, "sessions_told": told, "unreadable": unreadable})
    else:
        typer.echo(f"worker {worker_id} is forgotten, {told} sessions were told")
        for session_id in unreadable:
            note(f"the reservation of {session_id} can't be read; see `worldline fsck`")
    if unreadable:
        raise typer.Exit(ExitCode.SOME_FAILED)
