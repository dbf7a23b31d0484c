"""`worldline tombstones`: list, retry."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from actors.broker_pool import Broker, NoHostError
from actors.cli.confirm import confirm
from actors.cli.exit_codes import ExitCode
from actors.cli.options import HOST_WAIT_S, JsonOption, TimeoutOption
from actors.cli.output import clock, note, print_error, print_json, print_table
from actors.config import JanitorSettings
from actors.tombstones import (
    DEFAULT_REASON,
    Retried,
    Tombstone,
    all_failed_alike,
    find_tombstone,
    list_tombstones,
    retry_tombstones,
)
from contracts.config import load_settings
from contracts.errors import SessionNotFoundError, SessionStateError

app = typer.Typer(
    help="Sessions whose clean-up failed: their ids stay taken until a close succeeds.", no_args_is_help=True
)

_COLUMNS = ("session", "failures", "last failure", "next retry", "worker", "error")


@app.command("list")
def list_(as_json: JsonOption = False) -> None:
    """List the tombstones, those whose retry is due soonest first."""
    limit = load_settings(JanitorSettings).close_attempts_limit

    async def work() -> list[Tombstone]:
        async with Broker(host_wait_s=HOST_WAIT_S) as broker:
            return [tombstone async for tombstone in list_tombstones(broker)]

    found = asyncio.run(work())
    if as_json:
        print_json([tombstone.to_dict() | {"given_up": tombstone.failures >= limit} for tombstone in found])
    else:
        print_table(_COLUMNS, [_row(tombstone, limit) for tombstone in found])


@app.command()
def retry(
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]...", help="Sessions to close.", show_default=False)
    ] = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="Every tombstone.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be retried.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    reason: Annotated[str, typer.Option(help="For the sessions' history.")] = DEFAULT_REASON,
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Close tombstones now, also those that the janitor has given up. Safe while it works: each is closed once."""
    if bool(ids) == every:
        raise typer.BadParameter("name sessions, or give --all", param_hint="ID")

    async def work() -> list[Retried]:
        async with Broker(host_wait_s=HOST_WAIT_S) as broker:
            chosen, refused = await _choose(broker, ids)
            if dry_run:
                _print_plan(chosen, as_json=as_json)
                return refused
            if chosen and not yes and sys.stdin.isatty():
                confirm(f"Close {len(chosen)} sessions?")
            timeout_s = broker.settings.answer_timeout_s if timeout is None else timeout
            results = refused + await retry_tombstones(broker, chosen, reason=reason, timeout_s=timeout_s)
            if (nobody := all_failed_alike(results, NoHostError)) is not None:
                raise nobody
            _print_results(results, as_json=as_json)
            return results

    if any(result.error is not None for result in asyncio.run(work())):
        raise typer.Exit(ExitCode.SOME_FAILED)


async def _choose(broker: Broker, ids: Sequence[str] | None) -> tuple[list[Tombstone], list[Retried]]:
    """The tombstones that are meant, and what was named but is none; one alone that is none is an error."""
    if not ids:
        return [tombstone async for tombstone in list_tombstones(broker)], []
    chosen: list[Tombstone] = []
    refused: list[Retried] = []
    for session_id in dict.fromkeys(ids):
        try:
            chosen.append(await find_tombstone(broker, session_id))
        except (SessionNotFoundError, SessionStateError) as error:
            if len(ids) == 1:
                raise
            refused.append(Retried(session_id, error))
    return chosen, refused


def _row(tombstone: Tombstone, limit: int) -> tuple[object, ...]:
    given_up = tombstone.failures >= limit
    due = "given up" if given_up else clock(tombstone.due_ms)
    since = clock(tombstone.since_ms)
    return tombstone.session_id, tombstone.failures, since, due, tombstone.worker, tombstone.error


def _print_plan(chosen: Sequence[Tombstone], *, as_json: bool) -> None:
    if as_json:
        print_json([{"session_id": t.session_id, "life": t.life, "failures": t.failures} for t in chosen])
        return
    for tombstone in chosen:
        typer.echo(f"would close {tombstone.session_id} ({tombstone.failures} failures)")
    note(f"{len(chosen)} sessions; nothing was done")


def _print_results(results: Sequence[Retried], *, as_json: bool) -> None:
    if as_json:
        print_json([result.to_dict() for result in results])
        return
    for result in results:
        if result.error is None:
            typer.echo(f"session {result.session_id} is CLOSED")
        else:
            print_error(result.error, as_json=False)
    closed = sum(result.error is None for result in results)
    note(f"{closed} of {len(results)} closed")
