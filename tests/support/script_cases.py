"""Every script of a session, its events or its partition, about to do what it is for."""

from collections.abc import Awaitable, Callable
from typing import Any

from contracts.events import ARDiffusionSessionEvent
from contracts.lifecycle import Status, Trigger
from contracts.messages import Kind
from contracts.session_scripts import Failure, Rejection
from support.script_world import WORKER, World

Ready = Callable[[], Awaitable[Any]]
"""Runs the script; called again it sends the very same call."""


_FAILURE = Failure(Trigger.TICK_FAILED, "model_error", "boom")


async def accept_event(world: World) -> Ready:
    await world.create()
    return lambda: world.producer.accept_event(world.session_id, ARDiffusionSessionEvent(3, "p"))


async def adopt(world: World) -> Ready:
    await world.create()
    return lambda: world.scripts.adopt(world.session_id, world.epoch)


async def answer(world: World) -> Ready:
    await world.create()
    text = world.refused("next-1")
    return lambda: world.scripts.answer(world.session_id, world.epoch, "next-1", text)


async def begin_close(world: World) -> Ready:
    await world.create()
    state = await world.state()
    record = world.record(state, Kind.RELEASE, "close-1")
    request = world.request(state, record)
    return lambda: world.scripts.begin_close(state, record, request, WORKER, "asked")


async def begin_reset(world: World) -> Ready:
    await world.create()
    state = await world.state()
    record = world.record(state, Kind.RESET, "reset-1")
    request = world.request(state, record)
    return lambda: world.scripts.begin_reset(state, record, request, WORKER)


async def begin_tick(world: World) -> Ready:
    await world.create()
    await world.accept(3)
    state, cursor = await world.state(), await world.cursor()
    record, request = await world.tick([3], "next-1", state)
    return lambda: world.scripts.begin_tick(state, record, request, WORKER, cursor=cursor, strict=True)


async def commit(world: World) -> Ready:
    await world.create()
    await world.accept(3)
    await world.begin([3], "next-1")
    state, record = await world.state(), await world.in_flight()
    fields, head = world.chunk(state, record)
    return lambda: world.scripts.commit(
        state, fields, head, incarnation="inc-1", accepted_ms=1, cursor="0-0", ticks_kept=None
    )


async def create(world: World) -> Ready:
    life = f"ar-{world.session_id}-create-{'0' * 32}"
    return lambda: world.create(life=life)


async def end_inflight(world: World) -> Ready:
    await world.create()
    await world.begin([], "next-1")
    state, record = await world.state(), await world.in_flight()
    return lambda: world.scripts.end_inflight(state, record.request_id, world.refused("next-1"))


async def fail(world: World) -> Ready:
    await world.create()
    await world.begin([], "next-1")
    state = await world.state()
    record = world.record(state, Kind.RELEASE, None)
    release = (record, world.request(state, record), WORKER)
    return lambda: world.scripts.fail(
        state,
        _FAILURE,
        allowed=[Status.ACTIVE],
        command_id="next-1",
        answer=world.refused("next-1"),
        release=release,
    )


async def fail_close(world: World) -> Ready:
    await world.bring_to(Status.CLOSING)
    state, record = await world.state(), await world.in_flight()
    return lambda: world.scripts.fail_close(state, record.request_id, "no release", world.refused("close-1"))


async def finish_close(world: World) -> Ready:
    await world.create()
    await world.accept(3)
    await world.begin_close()
    state, record = await world.state(), await world.in_flight()
    return lambda: world.scripts.finish_close(state, record.request_id, world.ok("close-1", status="CLOSED"))


async def finish_reset(world: World) -> Ready:
    await world.create()
    await world.accept(3)
    await world.begin_reset()
    state, record = await world.state(), await world.in_flight()
    head = world.ok("reset-1", life=record.request_id, chunk_index=0).removesuffix("}}") + ',"event_floor":'
    return lambda: world.scripts.finish_reset(state, record.request_id, "inc-2", head)


async def free_attempt(world: World) -> Ready:
    await world.create(pace_ms="0")
    state = await world.state()
    return lambda: world.scripts.free_attempt(state)


async def inbox_attempt(world: World) -> Ready:
    lease = await _lease(world)
    entry_id = await _inbox_entry(world)
    return lambda: world.partitions.inbox_attempt(0, lease, entry_id)


async def inbox_done(world: World) -> Ready:
    lease = await _lease(world)
    entry_id = await _inbox_entry(world)
    await world.partitions.inbox_attempt(0, lease, entry_id)
    return lambda: world.partitions.inbox_done(0, lease, [entry_id])


async def lease_claim(world: World) -> Ready:
    return lambda: world.partitions.claim(0, "host-1", 60_000)


async def lease_release(world: World) -> Ready:
    lease = await _lease(world)
    return lambda: world.partitions.release(0, "host-1", lease)


async def lease_renew(world: World) -> Ready:
    lease = await _lease(world)
    return lambda: world.partitions.renew(0, "host-1", lease, 90_000)


async def live_set(world: World) -> Ready:
    lease = await _lease(world)
    return lambda: world.partitions.set_live(0, lease, world.session_id, True)


async def place(world: World) -> Ready:
    await world.create(worker_incarnation="inc-1")
    state = await world.state()
    return lambda: world.scripts.place(state, "gpu-1")


async def reject_events(world: World) -> Ready:
    await world.create()
    await world.accept(3)
    state, entry = await world.state(), (await world.entries())[3]
    return lambda: world.scripts.reject_events(state, [Rejection(entry, "3", "invalid_control", "why", True)])


async def resend(world: World) -> Ready:
    await world.bring_to(Status.CLOSING)
    state = await world.state()
    record = world.record(state, Kind.RELEASE, "close-1", request_id=(await world.in_flight()).request_id)
    request = world.request(state, record)
    return lambda: world.scripts.resend(state, record, request, WORKER)


async def set_pace(world: World) -> Ready:
    await world.create()
    state = await world.state()
    return lambda: world.scripts.set_pace(state, "run-1", 40, world.ok("run-1", pace_ms=40))


CASES: dict[str, Callable[[World], Awaitable[Ready]]] = {
    case.__name__: case
    for case in (
        accept_event, adopt, answer, begin_close, begin_reset, begin_tick, commit, create, end_inflight, fail, fail_close,
        finish_close, finish_reset, free_attempt, inbox_attempt, inbox_done, lease_claim, lease_release, lease_renew, live_set, place,
        reject_events, resend, set_pace,
    )
}  # fmt: skip
"""Script -> what brings the broker to where it does its work, and then the call."""


async def _lease(world: World) -> int:
    lease = await world.partitions.claim(0, "host-1", 60_000)
    assert lease is not None
    return lease.epoch


async def _inbox_entry(world: World) -> str:
    return (await world.client.xadd(world.keys.partition(0).inbox, {"command": "{}"})).decode()
