"""A broker that is out of memory takes nothing new in, and still lets sessions end."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from actors.broker_pool import Broker
from actors.client import SessionClient
from actors.host import Host
from contracts.broker import BrokerFullError
from contracts.events import ARDiffusionSessionEvent
from contracts.lifecycle import Status
from contracts.state import SessionState
from support.broker import RealBroker
from support.hosting import Caller, running_host
from support.invariants import check_invariants
from support.scripted_worker import ScriptedWorker, failing, session_of

ADD = "redis.call('XDEL', KEYS[1], '0-1') return redis.call('XADD', KEYS[1], '*', 'reply', ARGV[1])"


class FrugalWorker(ScriptedWorker):
    """Replies on a full broker as well, as workers do: a script that has written may write on."""

    async def send(self, request: dict[str, str], **parts: Any) -> None:
        names = ("request_id", "life")
        reply = {name: request[name] for name in names} | {
            "session_id": session_of(request),
            "fence": int(request["fence"]),
            "incarnation": self.incarnation,
        }
        await self.client.eval(ADD, 1, request["reply_to"], json.dumps(reply | parts))


@pytest.mark.parametrize("state", ["ACTIVE", "FAILED", "CLEANUP_FAILED"])
async def test_a_session_closes_on_a_broker_that_is_out_of_memory(
    new_broker: Callable[..., RealBroker], state: str
) -> None:
    # Given sessions on a broker that runs out of memory
    server = new_broker()
    async with (
        FrugalWorker(server.url) as worker,
        running_host(server.url, lease_ms=1_000),
        Broker(server.url) as pool,
    ):
        session = SessionClient("world-1", pool, timeout_s=10)
        await session.create(model="scripted")
        await session.next_chunk()
        await session.accept_event(ARDiffusionSessionEvent(1, "pending"))
        if state == "FAILED":
            worker.on_request = failing(times=1)
            with pytest.raises(RuntimeError):
                await session.next_chunk()
        if state == "CLEANUP_FAILED":
            worker.on_request = failing(kind="release", times=1)
            with pytest.raises(RuntimeError):
                await session.close()
        with server.client() as plain:
            plain.config_set("maxmemory", "1mb")

            # Then nothing new comes in
            with pytest.raises(BrokerFullError):
                await SessionClient("world-2", pool, timeout_s=10).create(model="scripted")
            with pytest.raises((BrokerFullError, RuntimeError)):
                await session.accept_event(ARDiffusionSessionEvent(2, "one more"))

            # And what is there ends
            assert await session.close() is Status.CLOSED
            plain.config_set("maxmemory", "0")
        await SessionClient("world-2", pool, timeout_s=10).create(model="scripted")
        await check_invariants(worker.client)


async def test_sessions_of_a_dead_worker_close_on_a_broker_that_is_out_of_memory(
    new_broker: Callable[..., RealBroker],
) -> None:
    # Given two sessions beyond chunk 0 on a broker that runs out of memory
    server = new_broker()
    async with (
        FrugalWorker(server.url) as worker,
        running_host(server.url, lease_ms=1_000, heartbeat_ms=200, worker_lost_after_ms=1_000),
        Broker(server.url) as pool,
    ):
        sessions = [SessionClient(name, pool, timeout_s=10) for name in ("world-1", "world-2")]
        for session in sessions:
            await session.create(model="scripted")
            await session.next_chunk()
        with server.client() as plain:
            # When their worker dies, and one of them is closed while the worker is only silent
            await worker.vanish(silent_for_ms=0)
            plain.config_set("maxmemory", "1mb")
            closing = asyncio.create_task(sessions[0].close())

            # Then both are told that it is gone, and both close
            assert await closing is Status.CLOSED
            async with asyncio.timeout(10):
                while (await sessions[1].state()).status is not Status.FAILED:
                    await asyncio.sleep(0.05)
            assert (await sessions[1].state()).failure_code == "worker_lost"
            assert await sessions[1].close() is Status.CLOSED
            plain.config_set("maxmemory", "0")


async def test_a_client_stays_present_on_a_broker_that_is_out_of_memory(
    new_broker: Callable[..., RealBroker],
) -> None:
    server = new_broker()
    async with FrugalWorker(server.url), running_host(server.url), Broker(server.url) as pool:
        session = SessionClient("world-1", pool, timeout_s=10)
        await session.create(model="scripted", presence_ms=2_500)
        async with session:
            with server.client() as plain:
                plain.config_set("maxmemory", "1mb")
                await asyncio.sleep(3.0)
                assert plain.exists(pool.keys.session("world-1").presence)
                plain.config_set("maxmemory", "0")


async def test_owners_that_can_not_begin_a_tick_for_want_of_memory_are_not_counted_as_its_victims(
    new_broker: Callable[..., RealBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a session that runs free
    server = new_broker()
    with server.client() as plain:
        async with FrugalWorker(server.url), Broker(server.url) as pool:
            world = Caller(pool.commands)
            async with running_host(server.url, host_id="first"):
                await world.ok("create", model="scripted", pace_ms=3_600_000)
                async with asyncio.timeout(10):
                    while not await world.chunks():
                        await asyncio.sleep(0.01)

            # When more owners than it may kill find it, one after the other, on a broker that is out of memory
            prepare, tried = Host.prepare, asyncio.Event()

            async def fill(host: Host) -> None:
                await prepare(host)
                count = host.services.scripts.free_attempt

                async def counted(state: SessionState) -> int:
                    try:
                        return await count(state)
                    finally:
                        tried.set()

                host.services.scripts.free_attempt = counted  # type: ignore[method-assign]
                plain.config_set("maxmemory", "1mb")

            monkeypatch.setattr(Host, "prepare", fill)
            for number in range(4):
                async with running_host(server.url, host_id=f"host-{number}"):
                    await asyncio.wait_for(tried.wait(), 10)
                    await asyncio.sleep(0.3)
                tried.clear()
                plain.config_set("maxmemory", "0")
            monkeypatch.undo()

            # Then it runs on as soon as there is room
            assert (await world.state())["status"] == "ACTIVE"
            async with running_host(server.url, host_id="last"), asyncio.timeout(10):
                while len(await world.chunks()) < 2:
                    await asyncio.sleep(0.01)
