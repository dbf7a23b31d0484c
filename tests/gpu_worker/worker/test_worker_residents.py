"""What a worker lets go of by itself: residents and reservations that no session stands behind."""

import asyncio
import threading
from typing import Any

import pytest

from contracts.errors import CorruptDataError
from contracts.lifecycle import Status
from contracts.messages import InFlight, Kind
from contracts.reservation import Reservation
from gpu_worker.residents import SessionView, reason_to_release, reservation_is_stale
from support.fake_host import FakeHost
from support.worker_runner import WorkerRunner

TICK = InFlight("ar-s-1-x", Kind.TICK, 5, "life")
RESET = InFlight("ar-s-reset-x", Kind.RESET, 5, "life")
RELEASE = InFlight("ar-s-release-x", Kind.RELEASE, 5, "life")


def view(
    status: Status, inflight: InFlight | None = None, *, life: str = "life", worker: str | None = "gpu-0"
):
    return SessionView(status, life, worker, inflight)


# ------------------------------------------------------------------------------------------------ the rules
@pytest.mark.parametrize(
    ("state", "goes"),
    [
        (None, True),
        (view(Status.CLOSED), True),
        (view(Status.FAILED), True),
        (view(Status.FAILED, RELEASE), True),
        (view(Status.FAILED, RESET), False),
        (view(Status.FAILED, TICK), False),
        (view(Status.ACTIVE), False),
        (view(Status.ACTIVE, life="another"), True),
        (view(Status.ACTIVE, RESET, life="another"), False),
        (view(Status.ACTIVE, worker="gpu-1"), True),
        (view(Status.ACTIVE, TICK, worker="gpu-1"), True),
        (view(Status.ACTIVE, worker=None), False),
        (view(Status.CLOSING, RELEASE), False),
        (view(Status.CLEANUP_FAILED), False),
    ],
)
def test_a_resident_goes_when_its_session_is_gone_ended_failed_reborn_or_elsewhere(state, goes: bool) -> None:
    assert (reason_to_release(state, "life", "gpu-0") is not None) is goes


@pytest.mark.parametrize(
    ("state", "stale"),
    [
        (None, True),
        (view(Status.CLOSED), True),
        (view(Status.FAILED), True),
        (view(Status.FAILED, RESET), False),
        (view(Status.ACTIVE), False),
        (view(Status.ACTIVE, worker="gpu-1"), True),
        (view(Status.CLEANUP_FAILED), False),
    ],
)
def test_a_reservation_goes_once_it_is_over_a_minute_old(state, stale: bool) -> None:
    assert reservation_is_stale(state, Reservation("life", 1_000), "gpu-0", 61_001) is stale
    assert reservation_is_stale(state, Reservation("life", 1_000), "gpu-0", 61_000) is False


@pytest.mark.parametrize(
    "values",
    [
        [b"DANCING", b"l", None, None, None, None],
        [b"ACTIVE", b"l", None, b"{", None, None],
        [b"ACTIVE", b"l", None, b'{"kind":"tick"}', None, None],
        [b"ACTIVE", b"l", None, None, b"one", None],
    ],
)
def test_a_corrupt_state_is_said_to_be_corrupt(values: list[bytes | None]) -> None:
    with pytest.raises(CorruptDataError, match="world-1"):
        SessionView.read("world-1", values)


@pytest.mark.parametrize("text", [b"{", b"[]", b'{"life":"x"}', b'{"life":"","reserved_at_ms":1}', b"\xff"])
def test_a_corrupt_reservation_is_said_to_be_corrupt(text: bytes) -> None:
    with pytest.raises(CorruptDataError, match="world-1"):
        Reservation.from_json(text, "world-1")


# ------------------------------------------------------------------------------------------------ on a real server
async def test_residents_without_a_session_are_released_and_the_others_stay(
    host: FakeHost, start_worker: WorkerRunner
) -> None:
    running = await start_worker(reconcile_ms=50)
    gone, failed, stays, corrupt = [
        await host.create(name) for name in ("gone", "failed", "stays", "corrupt")
    ]
    for world in (gone, failed, stays, corrupt):
        await host.chunk(world)
    await host.drop_state(gone)
    await host.set_state(failed, status="FAILED")
    await host.set_state(corrupt, status="DANCING")

    async def settled() -> bool:
        return set(running.engine.resident_sessions()) == {"stays", "corrupt"}

    await host.until(settled)
    reserved = await host.client.hkeys(host.worker.sessions)
    assert sorted(reserved) == [b"corrupt", b"stays"]
    await host.chunk(stays)


async def test_a_resident_for_which_a_request_comes_meanwhile_stays(
    host: FakeHost, start_worker: WorkerRunner
) -> None:
    # Given a resident whose session is FAILED, and a worker that has just read that
    running = await start_worker()
    world = await host.create("world-1", sleep_ms=200)
    await host.chunk(world)
    await host.set_state(world, status="FAILED")
    check = running.worker._server._residents
    view, read, go_on = check._view, threading.Event(), threading.Event()

    async def slow_view(session_id: str) -> Any:
        seen = await view(session_id)
        read.set()
        while not go_on.is_set():
            await asyncio.sleep(0.005)
        return seen

    check._view = slow_view  # type: ignore[method-assign]
    loop = running.worker._server._loop
    assert loop is not None
    checking = asyncio.run_coroutine_threadsafe(check.check(), loop)
    await host.until(lambda: asyncio.to_thread(read.wait, 5))

    # When the session is brought back before the worker acts on it
    await host.set_state(world, status="ACTIVE")
    await host.chunk(world)
    go_on.set()
    await asyncio.wrap_future(checking)

    # Then it keeps its memory
    assert ("close", "world-1") not in running.engine.calls
    await host.chunk(world)


async def test_a_resident_that_can_not_be_released_is_tried_again(
    host: FakeHost, start_worker: WorkerRunner
) -> None:
    running = await start_worker(reconcile_ms=50)
    world = await host.create("world-1", release_fails=2)
    await host.chunk(world)
    await host.drop_state(world)

    async def settled() -> bool:
        return running.engine.resident_sessions() == ()

    await host.until(settled)
    assert running.engine.calls.count(("close", "world-1")) == 3


async def test_old_reservations_without_a_session_are_dropped(
    host: FakeHost, start_worker: WorkerRunner
) -> None:
    await start_worker(reconcile_ms=50)
    old, young, live = [await host.create(name, reserve=False) for name in ("old", "young", "live")]
    await host.reserve(old, age_ms=61_000)
    await host.reserve(young)
    await host.reserve(live, age_ms=61_000)
    await host.drop_state(old)
    await host.drop_state(young)

    async def settled() -> bool:
        return sorted(await host.client.hkeys(host.worker.sessions)) == [b"live", b"young"]

    await host.until(settled)
