"""What kills its host again and again: only that is given up, not what lay beside it."""

import asyncio
from contextlib import AbstractAsyncContextManager

import redis.asyncio

from contracts.identity import partition_of
from support.broker import RealBroker
from support.hosting import Caller, dying_host, running_host
from support.invariants import check_invariants
from support.scripted_worker import ScriptedWorker

PARTITIONS = 8
LEASE_MS = 400


async def test_a_command_beside_one_that_kills_its_host_is_carried_out(
    broker: RealBroker, real: redis.asyncio.Redis, worker: ScriptedWorker
) -> None:
    # Given two sessions of one partition, and a command for each, of which the first one kills whoever begins it
    deadly = Caller(real)
    name = next(
        name
        for name in (f"beside-{number}" for number in range(1_000))
        if partition_of(name, PARTITIONS) == partition_of(deadly.session_id, PARTITIONS)
    )
    beside = Caller(real, name)
    async with running_host(broker.url):
        for caller in (deadly, beside):
            await caller.ok("create", model="scripted")
    command, other = await deadly.send("next_chunk"), await beside.send("next_chunk")

    # When two owners have died of it
    for death in range(2):
        victim = dying_host(broker.url, dies_in="begin_tick", host_id=f"victim-{death}", lease_ms=LEASE_MS)
        async with victim as dying:
            await asyncio.wait_for(dying.wait(), 10)
            await asyncio.sleep(0.2)  # whatever else it would begin

    # Then the third gives that one up, and carries out the other
    async with running_host(broker.url, host_id="third", lease_ms=LEASE_MS):
        assert (await deadly.answer_to(command))["error"]["code"] == "command_poisoned"
        assert (await beside.answer_to(other))["result"]["chunk_index"] == 0
        await check_invariants(real)


async def test_free_running_that_its_hosts_die_of_fails_its_session_and_no_other(
    broker: RealBroker, real: redis.asyncio.Redis, worker: ScriptedWorker
) -> None:
    # Given two sessions that run free, and hosts that die as soon as they begin a tick of the one
    deadly, beside = Caller(real), Caller(real, "beside")

    def victim(number: int) -> AbstractAsyncContextManager[asyncio.Event]:
        return dying_host(
            broker.url,
            dies_in="begin_tick",
            dies_of=deadly.session_id,
            host_id=f"victim-{number}",
            lease_ms=LEASE_MS,
        )

    async with victim(0) as dying:
        await beside.ok("create", model="scripted", pace_ms=50)
        await deadly.ok("create", model="scripted", pace_ms=0)
        await asyncio.wait_for(dying.wait(), 10)

    # When two that found it have died of it as well
    for number in (1, 2):
        async with victim(number) as dying:
            await asyncio.wait_for(dying.wait(), 10)
    before = len(await beside.chunks())

    # Then the third one fails that session, and lets the other run on
    async with victim(3) as dying:
        await deadly.until("FAILED", 10)
        assert (await deadly.state())["failure_code"] == "reducer_failed"
        async with asyncio.timeout(10):
            while len(await beside.chunks()) < before + 2:
                await asyncio.sleep(0.01)
        assert not dying.is_set()
    async with running_host(broker.url, host_id="last", lease_ms=LEASE_MS):
        await deadly.ok("reset")
        assert (await deadly.ok("next_chunk"))["chunk_index"] == 0
        await beside.ok("pause")
        await check_invariants(real)
