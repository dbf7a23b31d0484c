"""The event loop in a thread: results, errors, exits, and an end that leaves nothing behind."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest

from contracts.errors import KVStateError
from gpu_worker.loop_thread import LoopThread


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread("test-loop")
    thread.start()
    yield thread
    thread.stop()


async def raising(error: BaseException) -> None:
    raise error


def test_a_coroutine_runs_in_the_thread_and_its_result_comes_back(loop: LoopThread) -> None:
    async def where() -> str:
        return threading.current_thread().name

    assert loop.run(where()) == "test-loop"


@pytest.mark.parametrize("error", [KeyError("x"), TimeoutError("late"), SystemExit(2), KeyboardInterrupt()])
def test_what_a_coroutine_raises_is_raised_and_the_loop_goes_on(
    loop: LoopThread, error: BaseException
) -> None:
    with pytest.raises(type(error)) as caught:
        loop.run(raising(error))
    assert caught.value.args == error.args
    assert loop.run(asyncio.sleep(0, "alive")) == "alive"


def test_what_a_coroutine_leaves_in_the_background_goes_on_between_calls(loop: LoopThread) -> None:
    done = threading.Event()
    kept: list[Any] = []

    async def later() -> None:
        await asyncio.sleep(0.01)
        done.set()

    async def begin() -> None:
        kept.append(asyncio.create_task(later()))

    loop.run(begin())
    assert done.wait(5)


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt()])
def test_a_background_task_that_takes_the_loop_down_fails_the_call_that_waits(
    loop: LoopThread, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    async def wait_beside() -> None:
        kept = asyncio.ensure_future(raising(error))
        await asyncio.sleep(60)
        await kept

    with pytest.raises((KVStateError, CancelledError)):
        loop.run(wait_beside())
    loop._thread.join(5)
    with pytest.raises(KVStateError, match="does not run"):
        loop.run(asyncio.sleep(0))


def test_a_loop_that_does_not_run_says_so() -> None:
    thread = LoopThread("test-loop")
    for act in (thread.stop, thread.start, thread.stop, thread.stop):
        if not thread.running:
            with pytest.raises(KVStateError, match="'test-loop' does not run"):
                thread.run(asyncio.sleep(0))
        act()
    assert not thread.running


def test_the_end_cancels_what_still_runs(loop: LoopThread) -> None:
    ended: list[str] = []
    kept: list[Any] = []

    async def endless() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def begin() -> None:
        kept.append(asyncio.create_task(endless()))
        await asyncio.sleep(0)

    loop.run(begin())
    loop.stop()
    assert ended == ["cancelled"]
    assert not loop.running
