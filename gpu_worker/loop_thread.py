"""An event loop in a thread of its own, for a library that is asynchronous under code that is not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import wait
from typing import Any, Final, TypeVar

from contracts.errors import KVStateError

T = TypeVar("T")

_LOOK_PERIOD_S: Final = 1.0


class LoopThread:
    """A loop that goes on between calls, so that what the library does in the background does too.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    @property
    def running(self) -> bool:
        """Whether it can run something."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Starts the thread, once."""
        assert self._loop is None, "it has been started"
        self._loop = asyncio.new_event_loop()
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine to its end, and waits for it; an exception in the waiting thread cancels it.

        KVStateError when the loop does not run: what it drove can't be reached any more.
        """
        if self._loop is None or not self.running:
            coroutine.close()
            raise self._not_running()
        future = asyncio.run_coroutine_threadsafe(_kept(coroutine), self._loop)
        try:
            while not wait([future], _LOOK_PERIOD_S).done:
                if not self.running:  # a task in the background took the loop down with it
                    raise self._not_running()
            result, exit_ = future.result()
        except BaseException:
            future.cancel()
            raise
        if exit_ is not None:
            raise exit_
        return result  # type: ignore[return-value]

    def stop(self) -> None:
        """Ends loop and thread, and cancels what still runs; nothing happens if it never ran, or the second time."""
        if self._loop is not None and self.running:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _not_running(self) -> KVStateError:
        return KVStateError(f"the event loop {self._thread.name!r} does not run")

    def _work(self) -> None:
        loop = self._loop
        assert loop is not None, "start() made it"
        try:
            loop.run_forever()
        finally:
            loop.run_until_complete(_end_all(asyncio.all_tasks(loop)))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()


async def _kept(coroutine: Coroutine[Any, Any, T]) -> tuple[T | None, BaseException | None]:
    """Keeps an exit as a value: a task that raises one ends the loop, and whoever waits for it waits for ever."""
    try:
        return await coroutine, None
    except (SystemExit, KeyboardInterrupt) as exit_:
        return None, exit_


async def _end_all(tasks: set[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
