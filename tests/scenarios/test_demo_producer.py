"""The demo's producer ends with whoever started it, however that comes about."""

import asyncio

import pytest

from actors.demo.producer import Producer, ProducerError
from support.broker import RealBroker

NOWHERE = "redis://127.0.0.1:1/0"


def producer(url: str = NOWHERE, *, lockstep: bool = False) -> Producer:
    return Producer("world-1", url, prefix="wl", lockstep=lockstep, keys=True)


@pytest.mark.parametrize("lockstep", [False, True])
async def test_one_that_is_cancelled_while_it_starts_is_not_left_behind(lockstep: bool) -> None:
    starting = producer(lockstep=lockstep)
    task = asyncio.create_task(starting.__aenter__())
    while starting._process is None:
        await asyncio.sleep(0)

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert starting._process.returncode == -9
    assert starting._process.stdout.at_eof()  # type: ignore[union-attr]


async def test_one_whose_caller_fails_is_not_left_behind(broker: RealBroker) -> None:
    with pytest.raises(ZeroDivisionError):
        async with producer(broker.url, lockstep=True) as running:
            raise ZeroDivisionError

    assert running._running.returncode == -9


async def test_one_that_can_not_begin_says_why() -> None:
    with pytest.raises(ProducerError, match=r"the producer failed: .*[Cc]onnect"):
        await producer().__aenter__()
