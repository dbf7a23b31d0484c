"""Starts a worker's watchdog, and starts it again should it end."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator
from typing import Final

import structlog

from gpu_worker.backoff import Backoff
from gpu_worker.config import WorkerSettings
from gpu_worker.watchdog import Assignment

LONGEST_POLL_MS: Final = 1_000
SHORTEST_POLL_MS: Final = 50
SHORTEST_GRACE_MS: Final = 5_000
"""As long as a worker may pause between two attempts to send a reply."""

log = structlog.get_logger(__name__)


def assignment_of(settings: WorkerSettings, incarnation: str) -> Assignment:
    """What the watchdog of a worker has to know."""
    limit_ms = settings.execution_limit_ms
    return Assignment(
        url=settings.url,
        prefix=settings.prefix,
        worker_id=settings.worker_id,
        incarnation=incarnation,
        limit_ms=limit_ms,
        grace_ms=max(settings.name_ttl_ms, SHORTEST_GRACE_MS),
        poll_ms=min(LONGEST_POLL_MS, max(SHORTEST_POLL_MS, limit_ms // 20)),
        log_level=settings.log_level,
        log_format=settings.log_format,
    )


@contextlib.asynccontextmanager
async def guarded(settings: WorkerSettings, incarnation: str) -> AsyncIterator[None]:
    """A watchdog runs beside the body, unless the settings say that there is none."""
    if not settings.watchdog:
        yield
        return
    keeping = asyncio.create_task(_keep(assignment_of(settings, incarnation)))
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])


async def _keep(assignment: Assignment) -> None:
    """Runs one watchdog after the other until cancelled."""
    backoff = Backoff(first_s=0.5, limit_s=30.0)
    while True:
        try:
            await _run(assignment)
            log.warning("the watchdog ended; it is started again")
        except OSError as error:
            log.warning("the watchdog can't be started", error=str(error))
        await asyncio.sleep(backoff.next_s())


async def _run(assignment: Assignment) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gpu_worker.watchdog", stdin=PIPE, stdout=DEVNULL
    )
    assert process.stdin is not None
    try:
        process.stdin.write(assignment.to_json() + b"\n")
        await process.wait()
    finally:
        process.stdin.close()
        if process.returncode is None:
            process.kill()
            await process.wait()
