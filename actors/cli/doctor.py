"""`worldline doctor`."""

from __future__ import annotations

import asyncio
from typing import Final

import typer

from actors.broker_pool import Broker
from actors.cli.exit_codes import ExitCode
from actors.cli.options import HOST_WAIT_S, JsonOption
from actors.cli.output import print_json
from actors.doctor.broker_checks import broker_checks
from actors.doctor.checks import Check, Level
from actors.doctor.janitor_checks import janitor_checks
from actors.doctor.service_checks import service_checks

_COLOURS: Final = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red"}


def doctor(as_json: JsonOption = False) -> None:
    """Examine broker, hosts, workers and janitors; exit 1 if something would break a promise."""
    checks = asyncio.run(_examine())
    healthy = all(check.level is not Level.FAIL for check in checks)
    if as_json:
        print_json({"ok": healthy, "checks": [check.to_dict() for check in checks]})
    else:
        for check in checks:
            typer.secho(f"{check.level:<4} ", fg=_COLOURS[check.level], nl=False)
            typer.echo(f"{check.name:<11} {check.message}")
    if not healthy:
        raise typer.Exit(ExitCode.SOME_FAILED)


async def _examine() -> list[Check]:
    async with Broker(host_wait_s=HOST_WAIT_S) as broker:
        return [*await broker_checks(broker), *await service_checks(broker), *await janitor_checks(broker)]
