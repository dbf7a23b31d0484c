"""`worldline fsck`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import typer

from actors.broker_pool import Broker
from actors.cli.exit_codes import ExitCode
from actors.cli.options import HOST_WAIT_S, JsonOption
from actors.cli.output import print_json, print_table
from actors.config import JanitorSettings
from actors.fsck import Finding, check_all
from contracts.config import load_settings


def fsck(as_json: JsonOption = False) -> None:
    """Check the invariants on live keys; exit 1 if one is broken, 65 if something can't have been written by us."""
    settings = load_settings(JanitorSettings)

    async def work() -> list[Finding]:
        async with Broker(settings=settings, host_wait_s=HOST_WAIT_S) as broker:
            return await check_all(
                broker,
                closed_retention_ms=settings.closed_retention_ms,
                reconcile_ms=settings.reconcile_ms,
            )

    found = asyncio.run(work())
    if as_json:
        print_json({"ok": not found, "findings": [finding.to_dict() for finding in found]})
    elif found:
        print_table(("code", "key", "message"), [(item.code, item.key, item.message) for item in found])
    else:
        typer.echo("every invariant holds")
    if found:
        raise typer.Exit(_status(found))


def _status(found: Sequence[Finding]) -> ExitCode:
    corrupt = any(finding.corrupt for finding in found)
    return ExitCode.CORRUPT_DATA if corrupt else ExitCode.SOME_FAILED
