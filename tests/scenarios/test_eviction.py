"""Three sessions on a worker with room for two, driven through the broker by real processes."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from actors.client import SessionClient
from contracts.errors import NoCapacityError, SessionStateError
from contracts.events import ARDiffusionSessionEvent
from contracts.lifecycle import Status
from support.broker import RealBroker
from support.processes import Processes

SEEDS = {"first": 11, "second": 12, "third": 13}
CHUNKS = 4

Start = Callable[..., None]


@pytest.fixture
def start(broker: RealBroker, processes: Processes) -> Start:
    """Starts a host and a worker of the reference model with room for two sessions."""

    def run(*, overcommit: bool) -> None:
        env = {"REDIS_URL": broker.url}
        host = processes.script("worldline", "host", env=env | {"WORLDLINE_OVERCOMMIT": str(overcommit)})
        options = ("--model", "reference", "--session-capacity", "2", "--memory", "1GB")
        worker = processes.script("worldline-worker", *options, env=env)
        host.wait_for_line("^ready")
        assert "capacity=2" in worker.wait_for_line("^ready .*", timeout=60).group()

    return run


async def create(session: SessionClient) -> None:
    await session.create(model="reference", seed=SEEDS[session.session_id], prompt="a quiet valley")


async def next_hash(session: SessionClient, index: int) -> str:
    """The next chunk's payload hash; every second chunk has an event of its own."""
    if index % 2:
        await session.accept_event(ARDiffusionSessionEvent(index, f"a valley in storm {index}"))
    chunk = await session.next_chunk()
    assert chunk.chunk_index == index
    return chunk.sha256


async def alone(url: str, session_id: str) -> list[str]:
    async with SessionClient(session_id, url) as session:
        await create(session)
        hashes = [await next_hash(session, index) for index in range(CHUNKS)]
        await session.close("done")
    return hashes


async def failed(session: SessionClient) -> Any:
    async with asyncio.timeout(20):
        while (state := await session.state()).status is not Status.FAILED:
            await asyncio.sleep(0.02)
    return state


@pytest.mark.processes
async def test_with_overcommit_the_least_recently_used_session_is_failed_and_the_others_never_notice(
    broker: RealBroker, start: Start
) -> None:
    await asyncio.to_thread(start, overcommit=True)
    expected = {name: await alone(broker.url, name) for name in SEEDS}
    assert len({hash_ for hashes in expected.values() for hash_ in hashes}) == 3 * CHUNKS

    async with (
        SessionClient("first", broker.url) as first,
        SessionClient("second", broker.url) as second,
        SessionClient("third", broker.url) as third,
    ):
        made: dict[str, list[str]] = {name: [] for name in SEEDS}
        for session in (first, second):
            await create(session)
        for session in (first, second):
            made[session.session_id].append(await next_hash(session, 0))
        await create(third)
        made["third"].append(await next_hash(third, 0))

        state = await failed(first)
        assert (state.failure_code, state.chunk_index) == ("evicted", 1)
        with pytest.raises(SessionStateError, match="failed"):
            await first.next_chunk()

        for index in range(1, CHUNKS):
            for session in (second, third):
                made[session.session_id].append(await next_hash(session, index))
        assert made["second"] == expected["second"]
        assert made["third"] == expected["third"]

        await second.close("makes room")
        await first.reset()
        await next_hash(first, 0)
        assert [(await session.state()).status for session in (first, third)] == [Status.ACTIVE] * 2


@pytest.mark.processes
async def test_without_overcommit_the_third_creation_is_refused_as_retryable(
    broker: RealBroker, start: Start
) -> None:
    await asyncio.to_thread(start, overcommit=False)
    async with (
        SessionClient("first", broker.url) as first,
        SessionClient("second", broker.url) as second,
        SessionClient("third", broker.url) as third,
    ):
        await create(first)
        await create(second)
        with pytest.raises(NoCapacityError, match="full") as caught:
            await create(third)
        assert caught.value.retryable
        await next_hash(first, 0)
        await first.close("makes room")
        await create(third)
        assert [await next_hash(session, 0) for session in (second, third)]
        assert [(await session.state()).status for session in (second, third)] == [Status.ACTIVE] * 2
