"""Janitors as real processes, and sessions that need one."""

import asyncio
from collections.abc import Callable
from typing import Any

from support.hosting import Caller
from support.processes import Process
from support.scripted_worker import ScriptedWorker, failing

PERIOD_MS = 500

Start = Callable[..., Process]
"""Starts a janitor; options, then settings: `start("--no-scheduler", WORLDLINE_JOBS_URL=...)`."""


async def ready(process: Process) -> Process:
    """The process, once it has done its first round."""
    await asyncio.to_thread(process.wait_for_line, "^ready janitor=")
    return process


async def tombstone(world: Caller, worker: ScriptedWorker, *, failures: int, **args: Any) -> None:
    """A session whose release has failed, and fails `failures - 1` times more."""
    worker.on_request = failing("model_error", "no release", kind="release", times=failures)
    await world.ok("create", model=worker.model, **args)
    await world.ok("next_chunk")
    error = await world.refused("close")
    assert error["retryable"] is True
    assert (await world.state())["status"] == "CLEANUP_FAILED"
    # The answer comes with the state; what the indexes still lack then is written before the inbox is empty.
    await eventually(lambda: _inbox_is_empty(world), "the host is done with the close")


async def _inbox_is_empty(world: Caller) -> bool:
    return bool(await world.client.xlen(world.inbox) == 0)


def releases(worker: ScriptedWorker) -> int:
    """How many releases reached the worker."""
    return worker.kinds().count("release")


async def eventually(condition: Callable[[], Any], what: str, timeout_s: float = 20.0) -> None:
    """Waits until `condition()`, which may be a coroutine function, is true."""
    async with asyncio.timeout(timeout_s):
        while True:
            holds = condition()
            if await holds if asyncio.iscoroutine(holds) else holds:
                return
            await asyncio.sleep(0.02)
