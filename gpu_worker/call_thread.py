"""A thread that makes one call after the other for an event loop.

An executor does the same with two futures, two locks and a semaphore a call. All of that runs while the caller still
holds the interpreter, so the thread wakes up, finds it taken and has to be woken again.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class CallThread:
    """Begins with its first call. It never keeps the process alive: a call that hangs can't be ended otherwise."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    async def call(self, function: Callable[[], T]) -> T:
        """What `function` returns or raises in the thread; it is made even if nobody waits for it any more."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[T] = loop.create_future()

        def make() -> None:
            try:
                tell = partial(_succeed, answered, function())
            except BaseException as error:  # noqa: BLE001 - whatever it is, the caller gets it
                tell = partial(_fail, answered, error)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(tell)

        self._calls.put(make)
        return await answered

    def end(self) -> None:
        """Lets the thread go once the calls that were asked for are made; does not wait for them."""
        self._calls.put(None)

    def _work(self) -> None:
        while (make := self._calls.get()) is not None:
            make()
            del make  # and with it what the call has returned


def _succeed(answered: asyncio.Future[T], result: T) -> None:
    if not answered.done():
        answered.set_result(result)


def _fail(answered: asyncio.Future[T], error: BaseException) -> None:
    if answered.done():
        return
    if isinstance(error, StopIteration):  # a future can't carry it: a coroutine would take it for its own end
        error = RuntimeError(f"StopIteration: {error}")
    answered.set_exception(error)
