"""An event loop in a thread of its own, for a library that is asynchronous under code that is not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from contracts.errors import KVStateError

T = TypeVar("T")


class LoopThread:
    """A loop that goes on between calls, so that what the library does in the background does too.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)

    @property
    def running(self) -> bool:
        """Whether it can run something."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine to its end, and waits for it; an exception in the waiting thread cancels it.

        KVStateError when the loop does not run: what it drove can't be reached any more.
        """
        if not self.running:
            coroutine.close()
            raise KVStateError(f"the event loop {self._thread.name!r} does not run")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Ends loop and thread; nothing happens if it never ran, or the second time."""
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
