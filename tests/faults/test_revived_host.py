"""A host is paused past its lease while another takes over. Revived, it finds that nothing it does counts any more."""

import asyncio
import re

import pytest

from support.broker import RealBroker
from support.forked_stack import LEASE_MS, Stack, ready, until
from support.forker import Forker, is_stopped
from support.processes import Process
from support.steady_players import play_through, players_of

pytestmark = [pytest.mark.processes, pytest.mark.timeout(110)]

PAUSE_S = 1.6 * LEASE_MS / 1000

LATE_WRITES = {
    "host.begin.before": ("begin_tick", "next_chunk"),
    "host.commit.before": ("commit", "next_chunk"),
    "host.reset.begin.before": ("begin_reset", "reset"),
    "host.reset.finish.before": ("finish_reset", "reset"),
    "host.close.begin.before": ("begin_close", "close"),
    "host.close.finish.before": ("finish_close", "close"),
}
"""Where the host stops, the write that it then comes too late for, and the call that leads there."""


def stack_of(forker: Forker, broker: RealBroker, prefix: str) -> Stack:
    return Stack(forker, broker.url, prefix, WORLDLINE_WATCHDOG="false", WORLDLINE_PARTITIONS="2")


async def owners(stack: Stack) -> list[str]:
    keys = [stack.broker.keys.partition(index).lease for index in range(2)]
    return [(await stack.broker.commands.hget(key, "owner") or b"").decode() for key in keys]


async def test_a_late_write_or_request_is_refused(forker: Forker, broker: RealBroker) -> None:
    stacks = {point: stack_of(forker, broker, point.replace(".", "-")) for point in LATE_WRITES}
    try:
        await asyncio.gather(*(come_late(point, stack) for point, stack in stacks.items()))
    finally:
        for stack in stacks.values():
            await stack.end()


async def come_late(point: str, stack: Stack) -> None:
    # Given a session whose host stops right before a write, past its lease
    script, call = LATE_WRITES[point]
    session = stack.session("world-1")
    # A passage of `begin` and `commit` is that of chunk 0.
    first = stack.host("first", f"{point}=stop@{2 if call == 'next_chunk' else 1}")
    await ready(first)
    await ready(stack.worker())
    await session.create(model="noop")
    await session.next_chunk()
    operation = asyncio.create_task(getattr(session, call)())
    await until(lambda: is_stopped(first), f"the host has stopped at {point}")

    # When another has taken over and done the work
    await ready(stack.host("second"))
    await asyncio.wait_for(operation, 20)
    state, requests = await session.state(), await requests_seen(stack)
    first.resume()

    # Then the write that was on its way changes nothing, and no request reaches the worker
    await asyncio.to_thread(first.wait_for_line, rf"{script} was refused", stream="stderr")
    assert await session.state() == state
    assert await requests_seen(stack) == requests
    await until(lambda: shares(stack), "both hosts own their share")
    if call != "close":
        assert (await session.next_chunk()).chunk_index == state.chunk_index


async def requests_seen(stack: Stack) -> int:
    """How many requests were ever added to the worker's stream."""
    info = await stack.broker.commands.xinfo_stream(stack.broker.keys.worker("gpu-0").requests)
    return int(info.get("entries-added", info.get(b"entries-added")))


async def shares(stack: Stack) -> bool:
    return sorted(await owners(stack)) == ["first", "second"]


async def test_hosts_that_are_paused_in_turns_under_load_cost_nothing(
    forker: Forker, broker: RealBroker
) -> None:
    stack = stack_of(forker, broker, "turns")
    await ready(stack.worker())
    hosts = {name: stack.host(name) for name in ("first", "second")}
    await until(lambda: shares(stack), "both hosts own their share")
    players = await players_of(stack)

    async def in_turns() -> None:
        for host in (*hosts.values(), *hosts.values()):
            await asyncio.sleep(0.3)
            await paused(host)
            await until(lambda: shares(stack), "both hosts own their share")

    await play_through(stack, players, in_turns)
    said = "\n".join(host.stderr for host in hosts.values())
    assert re.search(r"lease (lost|ran out)", said)
    await stack.end()


async def paused(host: Process) -> None:
    host.pause()
    await asyncio.sleep(PAUSE_S)
    host.resume()
