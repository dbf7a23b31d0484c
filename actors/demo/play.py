"""The demo from its first process to its last picture."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final, TypeVar

from actors.demo.drive import DemoChunk, Options, drive
from actors.demo.pictures import write_pictures
from actors.demo.report import Progress, document, summarize
from actors.demo.walk import read_walk
from actors.dev.embedded import free_port
from actors.dev.stack import Stack
from actors.dev.supervisor import StartFailedError, Supervisor

_LOOK_S: Final = 0.2

T = TypeVar("T")


def play(options: Options, folder: Path, progress: Progress) -> dict[str, Any]:
    """Runs the demo on processes and data of its own; returns what `--json` prints."""
    started = time.monotonic()
    walk = read_walk()
    with tempfile.TemporaryDirectory(prefix="worldline-demo-") as data_dir:
        made = _run(Path(data_dir), lambda url: drive(url, options, walk, progress.show), options, progress)
    files = write_pictures(made, options, folder)
    return document(made, options, summarize(made, time.monotonic() - started, files))


def _run(
    data_dir: Path,
    work: Callable[[str], Coroutine[Any, Any, list[DemoChunk]]],
    options: Options,
    progress: Progress,
) -> list[DemoChunk]:
    with Stack(data_dir, port=free_port(), model=options.model, say=progress.say) as stack:
        progress.say("starting broker, host and worker")
        stack.start_broker()
        stack.start_services(janitor=False)
        return asyncio.run(_guarded(work(stack.url), stack.supervisor))


async def _guarded(work: Coroutine[Any, Any, T], supervisor: Supervisor) -> T:
    """Runs `work`, which would only wait in vain once a process has died."""
    task = asyncio.create_task(work)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=_LOOK_S)
            if (dead := supervisor.dead()) is not None and not task.done():
                raise StartFailedError(f"the {dead.name} ended:\n{dead.tail()}", field=dead.name)
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
