"""The janitor's process: jobs in the main thread, which has the signals, the reconciler's loop in another."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading

import structlog

from actors.broker_pool import Broker
from actors.config import JanitorSettings
from actors.janitor.reconciler import Reconciler
from actors.jobs import JobQueue, JobRunner


def run_janitor(settings: JanitorSettings, *, scheduler: bool = True) -> None:
    """Runs until SIGTERM or SIGINT; says `ready janitor=ID` on stdout after the first round.

    Args:
        settings: see `JanitorSettings`.
        scheduler: whether this janitor may be the one that moves jobs to the queue when they are due.

    Raises BrokerError if the broker can't be reached at the start, and whatever ended the reconciler against its will.
    """
    asyncio.run(_reach(settings))
    reconciler = _ReconcilerThread(settings)
    reconciler.start()
    try:
        JobRunner(settings, threading.Event(), scheduler=scheduler).run()
    finally:
        reconciler.stop()
    if reconciler.failure is not None:
        raise reconciler.failure


async def _reach(settings: JanitorSettings) -> None:
    async with Broker(settings=settings):
        return


class _ReconcilerThread(threading.Thread):
    """Runs the reconciler in a loop of its own."""

    def __init__(self, settings: JanitorSettings) -> None:
        super().__init__(name="reconciler")
        self.failure: BaseException | None = None
        self._settings = settings
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Ends the loop after the round in hand, and waits for it."""
        with contextlib.suppress(RuntimeError):  # it has ended by itself
            self._loop.call_soon_threadsafe(self._stopping.set)
        self.join()

    def run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._main())
        except BaseException as error:  # noqa: BLE001 -- told to the main thread, which raises it
            structlog.get_logger("janitor").exception("the reconciler ended")
            self.failure = error
            os.kill(os.getpid(), signal.SIGTERM)

    async def _main(self) -> None:
        queue = JobQueue(self._settings)
        try:
            await Reconciler(self._settings, queue.enqueue).run(self._stopping, on_ready=self._say_ready)
        finally:
            queue.close()

    def _say_ready(self) -> None:
        ready = f"ready janitor={self._settings.janitor_id}"
        print(ready, flush=True)  # noqa: T201 - who started it waits for it
