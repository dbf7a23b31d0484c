"""Runs workers in the loop of a test."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from contracts.fields import dumps
from gpu_worker.config import WorkerSettings
from gpu_worker.worker import Worker
from support.noop_engine import NoopEngine

QUICK: dict[str, Any] = {
    "model": "noop",
    "heartbeat_ms": 100,
    "worker_lost_after_ms": 1_000,
    "block_ms": 300,
    "reconcile_ms": 60_000,
}


class RunningWorker:
    """A worker, its engine and its task."""

    def __init__(self, settings: WorkerSettings, engine: NoopEngine) -> None:
        self.engine = engine
        self.ready = asyncio.Event()
        self.worker = Worker(settings, lambda: engine, on_ready=lambda _: self.ready.set())
        self.task = asyncio.create_task(self.worker.run())

    async def wait_until_ready(self) -> None:
        waiting = asyncio.create_task(self.ready.wait())
        await asyncio.wait({waiting, self.task}, timeout=10, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not self.ready.is_set():
            self.task.result()
            raise AssertionError("the worker is not ready")

    async def stop(self) -> None:
        """The orderly end; raises what the worker raised."""
        self.worker.stop()
        await asyncio.wait_for(self.task, 10)

    async def crash(self) -> None:
        """An end like a kill: nothing is finished, the name is not given back. (An engine that hangs stays so.)"""
        self.worker._link.leave = _nothing  # type: ignore[method-assign]
        while not self.task.done():  # the client library may lose a cancellation
            self.task.cancel()
            await asyncio.wait({self.task}, timeout=0.05)


async def _nothing() -> None:
    pass


class WorkerRunner:
    """Starts workers against one broker, and ends those that still run."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.started: list[RunningWorker] = []

    async def __call__(
        self, *, wait: bool = True, engine: NoopEngine | None = None, capacity: int = 64, **settings: Any
    ) -> RunningWorker:
        values = {"redis_url": self.url} | QUICK | settings
        running = RunningWorker(WorkerSettings(**values), engine or NoopEngine(capacity=capacity))
        self.started.append(running)
        if wait:
            await running.wait_until_ready()
        return running

    async def end(self) -> None:
        for running in self.started:
            if not running.task.done():
                running.worker.stop()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await asyncio.wait_for(running.task, 10)


def malformed(entry: dict[str, str], change: Callable[[dict[str, Any]], None]) -> dict[str, str]:
    """A request entry after `change` was applied to it."""
    changed = dict(entry)
    change(changed)
    return {name: value if isinstance(value, str) else dumps(value) for name, value in changed.items()}
