"""Sessions that nothing happens to cost the host nothing but memory."""

import asyncio

from actors.host import Host
from support.hosting import Caller


async def test_an_idle_session_has_no_task_and_a_closed_one_no_actor(world: Caller, host: Host) -> None:
    # Given ten sessions that have made a chunk each, one of them closed
    callers = [Caller(world.client, f"idle-{i}") for i in range(10)]
    for caller in callers:
        await caller.ok("create", model="scripted")
        await caller.ok("next_chunk")
    await callers[0].ok("close")
    await callers[1].refused("create", model="scripted")
    await asyncio.sleep(0.1)

    # Then no actor has a task, and what is closed is forgotten
    actors = {name: actor for p in host.owned.values() for name, actor in p.actors.items()}
    assert {name: actor._task for name, actor in actors.items()} == dict.fromkeys(actors)
    assert "idle-0" not in actors
    assert "idle-9" in actors


async def test_a_session_that_never_was_leaves_no_actor(world: Caller, host: Host) -> None:
    for i in range(20):
        await Caller(world.client, f"never-{i}").refused("next_chunk")
    await asyncio.sleep(0.05)

    assert not [name for p in host.owned.values() for name in p.actors if name.startswith("never")]
    assert not [key async for key in world.client.scan_iter("wl:{never-*}:state")]
    assert await world.client.pttl("wl:{never-1}:answered") > 0
