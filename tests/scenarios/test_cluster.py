"""A broker in cluster mode, where a script or transaction that touches two slots is refused."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.fsck import check_all
from contracts.errors import TickFailedError
from contracts.events import ARDiffusionSessionEvent
from contracts.lifecycle import Status
from support.broker import RealBroker
from support.forked_stack import Stack, ready
from support.forker import Forker

pytestmark = [pytest.mark.processes, pytest.mark.timeout(110)]


async def test_a_session_lives_on_a_broker_in_cluster_mode(
    new_broker: Callable[..., RealBroker], tmp_path: Path
) -> None:
    # Given a cluster of one node, which has every slot
    server = new_broker(**{"cluster-enabled": "yes"})
    with server.client() as plain:
        plain.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
        async with asyncio.timeout(10):
            while plain.execute_command("CLUSTER INFO")["cluster_state"] != "ok":
                await asyncio.sleep(0.05)
    with Forker(tmp_path) as forker:
        # A lease that outlasts a stall: what the watchdog answers is meant for the owner that sent the tick.
        limits = {"WORLDLINE_EXECUTION_LIMIT_MS": "1500", "WORLDLINE_LEASE_MS": "10000"}
        stack = Stack(forker, server.url, "wl", **limits)
        await ready(stack.host("host"))
        worker = stack.worker()
        await ready(worker)

        # Then ticks run, their chunks can be read, and a failure is answered
        session = stack.session("world")
        await session.create(model="noop", params={"fail_at": 2})
        await session.accept_event(ARDiffusionSessionEvent(1, prompt="go"))
        chunk = await session.next_chunk()
        assert chunk.applied_event_ids == (1,)
        assert len(await session.read(chunk.payload)) == chunk.bytes
        await session.next_chunk()
        with pytest.raises(TickFailedError, match="scripted failure"):
            await session.next_chunk()
        await session.reset()
        assert (await session.next_chunk()).chunk_index == 0
        assert await session.close() is Status.CLOSED

        # And so is a call that hangs, by the watchdog
        hanging = stack.session("hanging")
        await hanging.create(model="noop", params={"hang_at": 1})
        await hanging.next_chunk()
        with pytest.raises(TickFailedError) as raised:
            await hanging.next_chunk()
        assert raised.value.code == "execution_timeout"
        await asyncio.to_thread(worker.wait)
        await ready(stack.worker())
        await hanging.reset()
        assert await hanging.close() is Status.CLOSED
        assert await check_all(stack.broker) == []
        await stack.end()
