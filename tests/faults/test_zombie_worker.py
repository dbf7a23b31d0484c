"""A worker stops with a chunk in hand and is held for lost. When it wakes, its session lives elsewhere."""

import asyncio

import pytest

from actors.fsck import check_all
from contracts.errors import TickFailedError
from contracts.lifecycle import Status
from support.broker import RealBroker
from support.forked_stack import Stack, digest_of, ready, until
from support.forker import Forker, is_stopped

pytestmark = [pytest.mark.processes, pytest.mark.timeout(110)]

SEED = 9
ELSEWHERE = "gpu-1"


async def test_the_late_reply_of_a_lost_worker_is_ignored_and_its_memory_released(
    forker: Forker, broker: RealBroker
) -> None:
    # Given a session beyond chunk 0 whose worker has made the next chunk and stops before it says so
    stack = Stack(forker, broker.url, "zombie", WORLDLINE_WATCHDOG="false", WORLDLINE_PARTITIONS="1")
    await ready(stack.host("host"))
    zombie = stack.worker("worker.run.after=stop@6")
    await ready(zombie)
    session = stack.session("world")
    await session.create(model="noop", seed=SEED)
    for _ in range(5):
        await session.next_chunk()
    operation = asyncio.create_task(session.next_chunk())
    await until(lambda: is_stopped(zombie), "the worker has stopped")

    # When it is held for lost, and the session is reset on another worker
    await ready(stack.worker(name=ELSEWHERE))
    with pytest.raises(TickFailedError) as raised:
        await operation
    assert raised.value.code == "worker_lost"
    life = (await session.reset()).life
    for index in range(2):
        assert (await session.next_chunk()).chunk_index == index
    inbox = stack.broker.keys.partition(0).inbox
    came = await entries_added(stack, inbox)
    zombie.resume()

    # Then what the first one says at last changes nothing, and it lets go of what nobody needs
    await until(lambda: more_came(stack, inbox, came), "the late reply came")
    await until(lambda: nothing_resident(stack), "the first worker is empty")
    state = await session.state()
    assert (state.status, state.life, state.chunk_index, state.worker) == (Status.ACTIVE, life, 2, ELSEWHERE)
    chunk = await session.next_chunk()
    ticks = [tick for tick in await stack.read("world", "ticks") if tick["life"] == life]
    assert digest_of(ticks, SEED) in await session.read(chunk.payload)
    assert await session.close() is Status.CLOSED
    assert await check_all(stack.broker) == []
    await stack.end()


async def entries_added(stack: Stack, key: str) -> int:
    info = await stack.broker.commands.xinfo_stream(key)
    return int(info.get("entries-added", info.get(b"entries-added")))


async def more_came(stack: Stack, key: str, before: int) -> bool:
    return await entries_added(stack, key) > before


async def nothing_resident(stack: Stack) -> bool:
    resident = await stack.broker.commands.hget(stack.broker.keys.worker("gpu-0").info, "resident")
    return resident == b"0"
