"""The broker dies and comes back, or stands still for longer than everything with a time to live: no session fails."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable

import pytest

from support.broker import RealBroker
from support.forked_stack import PATIENCE_S, WORKER_LOST_AFTER_MS, Stack, ready
from support.forker import Forker
from support.steady_players import play_through, players_of

pytestmark = [pytest.mark.processes, pytest.mark.timeout(110)]

OUTAGE_S = 1.4 * WORKER_LOST_AFTER_MS / 1000
"""Longer than presence, lease and worker info live, and than a worker may be silent."""


@pytest.fixture
def server(new_broker: Callable[..., RealBroker]) -> RealBroker:
    """A broker that the test may kill. With any other fsync policy a busy disk may cost it what it has acknowledged."""
    return new_broker(appendfsync="always")


@pytest.fixture
async def stack(server: RealBroker, forker: Forker) -> AsyncIterator[Stack]:
    """A host, a worker with its watchdog, and a janitor that looks twice a second."""
    running = Stack(forker, server.url, "outage")
    started = [running.host("host"), running.worker(), running.janitor()]
    for process in started:
        await ready(process)
    yield running
    try:
        assert [process.returncode for process in started] == [None] * 3, running.report()
    finally:
        await running.end()


async def test_a_broker_that_is_killed_under_load_is_found_again_with_everything(
    stack: Stack, server: RealBroker
) -> None:
    players = await players_of(stack)

    async def three_deaths() -> None:
        for _ in range(3):
            await asyncio.sleep(0.6)
            await asyncio.to_thread(server.kill)
            await asyncio.sleep(0.3)
            await asyncio.to_thread(server.start)
            await asyncio.sleep(0.6)

    await play_through(stack, players, three_deaths)


async def test_a_broker_that_stands_still_for_longer_than_anything_lives_costs_nothing(
    stack: Stack, server: RealBroker
) -> None:
    players = await players_of(stack)

    async def paused() -> None:
        await asyncio.sleep(0.5)
        os.kill(server.pid, signal.SIGSTOP)
        await asyncio.sleep(OUTAGE_S)
        os.kill(server.pid, signal.SIGCONT)
        await asyncio.sleep(OUTAGE_S)

    await play_through(stack, players, paused)


async def test_a_broker_that_is_down_for_longer_than_anything_lives_costs_nothing(
    stack: Stack, server: RealBroker
) -> None:
    players = await players_of(stack)
    assert OUTAGE_S < PATIENCE_S

    async def down() -> None:
        await asyncio.sleep(0.5)
        await asyncio.to_thread(server.stop)
        await asyncio.sleep(OUTAGE_S)
        await asyncio.to_thread(server.start)
        await asyncio.sleep(OUTAGE_S)

    await play_through(stack, players, down)
