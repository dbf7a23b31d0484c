"""Calls in a thread of their own: results and errors come back to the loop, whatever happened to the caller."""

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from gpu_worker.call_thread import CallThread


@pytest.fixture
def thread() -> Iterator[CallThread]:
    made = CallThread("calls")
    yield made
    made.end()


async def test_calls_are_made_one_after_the_other_in_one_other_thread(thread: CallThread) -> None:
    made: list[int] = []

    def call(number: int) -> int:
        time.sleep(0.001)
        made.append(number)
        return threading.get_ident()

    threads = await asyncio.gather(*(thread.call(lambda n=n: call(n)) for n in range(20)))

    assert made == list(range(20))
    assert len(set(threads)) == 1
    assert threads[0] != threading.get_ident()


@pytest.mark.parametrize("error", [ValueError("bad"), SystemExit(3)])
async def test_what_a_call_raises_is_raised_to_the_caller(thread: CallThread, error: BaseException) -> None:
    def call() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        await thread.call(call)

    assert raised.value is error
    assert await thread.call(lambda: 1) == 1


async def test_a_stop_iteration_ends_no_coroutine(thread: CallThread) -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        await thread.call(lambda: next(iter(())))


async def test_the_loop_goes_on_meanwhile(thread: CallThread) -> None:
    gate = threading.Event()
    waiting = asyncio.create_task(thread.call(gate.wait))

    await asyncio.sleep(0.01)

    assert not waiting.done()
    gate.set()
    assert await waiting is True


async def test_a_call_is_made_although_its_caller_is_cancelled(thread: CallThread) -> None:
    made: list[int] = []
    waiting = asyncio.create_task(thread.call(lambda: (time.sleep(0.05), made.append(1))))
    await asyncio.sleep(0.01)

    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting

    assert await thread.call(lambda: 2) == 2
    assert made == [1]


def test_a_result_that_nobody_can_get_any_more_harms_nothing(thread: CallThread) -> None:
    done = threading.Event()

    async def leave() -> None:
        asyncio.get_running_loop().call_later(0.01, asyncio.current_task().cancel)
        await thread.call(lambda: time.sleep(0.1) or done.set())

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(leave())

    assert done.wait(2)
    assert asyncio.run(thread.call(lambda: 3)) == 3


async def test_what_a_call_returned_is_not_kept(thread: CallThread) -> None:
    class Large:
        alive = 0

        def __init__(self) -> None:
            Large.alive += 1

        def __del__(self) -> None:
            Large.alive -= 1

    await thread.call(Large)
    await thread.call(lambda: None)

    assert Large.alive == 0
