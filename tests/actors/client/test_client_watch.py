"""What a client sees of a session: its state, its chunks, and the events it gives."""

import asyncio

import pytest

from actors.broker_pool import Broker
from actors.client import SessionClient
from contracts.commands import Op
from contracts.errors import (
    ConfigurationError,
    CorruptDataError,
    EventStaleError,
    InvalidArgumentError,
    InvalidTypeError,
    SessionNotFoundError,
)
from contracts.events import AcceptStatus, ARDiffusionSessionEvent
from contracts.lifecycle import Status
from contracts.state import CommittedChunk
from support.answerer import Answerer, chunk_fields
from support.relay import Relay


async def put_state(answerer: Answerer, session_id: str, **fields: str | int) -> None:
    state = {"status": "ACTIVE", "max_pending_events": 4, "event_floor": -1, "chunk_index": 0} | fields
    await answerer.client.hset(answerer.keys.session(session_id).state, mapping=state)
    # An empty stream, as creation leaves it.
    events = answerer.keys.session(session_id).events
    await answerer.client.xdel(events, await answerer.client.xadd(events, {"x": "x"}))


async def test_an_event_gets_its_receipt(answerer: Answerer, pool: Broker) -> None:
    await put_state(answerer, "world-1")
    session = SessionClient("world-1", pool)

    first = await session.accept_event(ARDiffusionSessionEvent(5, prompt="rain"))
    again = await session.accept_event(ARDiffusionSessionEvent(5, prompt="rain"))

    assert (first.status, first.event_id, first.pending_event_count) == (AcceptStatus.ACCEPTED, 5, 1)
    assert (again.status, again.pending_event_count) == (AcceptStatus.DUPLICATE, 1)
    assert await session.pending_events() == 1


async def test_an_event_that_is_refused_says_why(answerer: Answerer, pool: Broker) -> None:
    await put_state(answerer, "world-1", event_floor=9)
    session = SessionClient("world-1", pool)

    with pytest.raises(EventStaleError, match="floor is 9"):
        await session.accept_event(ARDiffusionSessionEvent(9, prompt="rain"))
    with pytest.raises(SessionNotFoundError):
        await SessionClient("world-2", pool).accept_event(ARDiffusionSessionEvent(1, prompt="rain"))
    with pytest.raises(InvalidTypeError):
        await session.accept_event({"event_id": 3})  # type: ignore[arg-type]


async def test_an_event_whose_receipt_is_lost_is_pending_once(answerer: Answerer, relay: Relay) -> None:
    await put_state(answerer, "world-1")
    async with SessionClient("world-1", relay.url) as session:
        await session.accept_event(ARDiffusionSessionEvent(1, prompt="rain"))  # the script is loaded now
        lost = relay.drop_reply(b"EVALSHA")

        receipt = await session.accept_event(ARDiffusionSessionEvent(2, prompt="snow"))

        assert lost.happened
        assert receipt.status is AcceptStatus.DUPLICATE
        assert await session.pending_events() == 2


async def test_the_state_is_typed(answerer: Answerer, pool: Broker) -> None:
    await put_state(answerer, "world-1", seed=7, prompt="hills", controls="[]")

    state = await SessionClient("world-1", pool).state()

    assert (state.session_id, state.status, state.seed, state.prompt) == (
        "world-1",
        Status.ACTIVE,
        7,
        "hills",
    )
    with pytest.raises(SessionNotFoundError):
        await SessionClient("world-2", pool).state()


async def test_a_watch_yields_what_comes_until_the_session_is_closed(
    answerer: Answerer, pool: Broker
) -> None:
    await put_state(answerer, "world-1")
    await answerer.commit("world-1", chunk_fields("world-1", 0))
    chunks = SessionClient("world-1", pool).watch()
    seen: list[CommittedChunk] = []

    async def collect() -> None:
        seen.extend([chunk async for chunk in chunks])

    watching = asyncio.create_task(collect())
    await asyncio.sleep(0.1)
    await answerer.commit("world-1", chunk_fields("world-1", 1, applied_event_ids=[3, 4]))
    await answerer.commit("world-1", chunk_fields("world-1", 0, life="life-2", frames="redis:f"))
    await put_state(answerer, "world-1", status="CLOSED")
    await asyncio.wait_for(watching, 10)

    assert [(chunk.life, chunk.chunk_index) for chunk in seen] == [("life-1", 1), ("life-2", 0)]
    assert [chunk.applied_event_ids for chunk in seen] == [(3, 4), ()]
    assert [chunk.frames for chunk in seen] == [None, "redis:f"]


async def test_a_watch_from_the_start_begins_with_the_oldest_chunk(answerer: Answerer, pool: Broker) -> None:
    await put_state(answerer, "world-1", status="CLOSED")
    for index in range(250):
        await answerer.commit("world-1", chunk_fields("world-1", index))

    seen = [chunk.chunk_index async for chunk in SessionClient("world-1", pool).watch(from_start=True)]

    assert seen == list(range(250))


async def test_a_watch_survives_broken_connections_without_a_gap(answerer: Answerer, relay: Relay) -> None:
    await put_state(answerer, "world-1")
    async with SessionClient("world-1", relay.url) as session:
        seen: list[int] = []

        async def collect() -> None:
            seen.extend([chunk.chunk_index async for chunk in session.watch()])

        watching = asyncio.create_task(collect())
        await asyncio.sleep(0.1)
        for index in range(30):
            if index % 10 == 5:
                await asyncio.to_thread(relay.sever)
            if index % 10 == 7:
                relay.drop_reply(b"XREAD\r\n")
            await answerer.commit("world-1", chunk_fields("world-1", index))
            await asyncio.sleep(0.01)
        await put_state(answerer, "world-1", status="CLOSED")
        await asyncio.wait_for(watching, 10)

    assert seen == list(range(30))


async def test_watching_what_does_not_exist_is_refused(answerer: Answerer, pool: Broker) -> None:
    with pytest.raises(SessionNotFoundError):
        await anext(SessionClient("world-1", pool).watch())


async def test_a_chunk_entry_that_is_none_is_corrupt(answerer: Answerer, pool: Broker) -> None:
    await put_state(answerer, "world-1")
    key = answerer.keys.session("world-1").chunks
    await answerer.client.xadd(key, {"chunk_index": "one"})

    with pytest.raises(CorruptDataError) as raised:
        await anext(SessionClient("world-1", pool).watch(from_start=True))
    assert raised.value.field == key


async def test_a_payload_in_the_broker_is_read_by_its_url(answerer: Answerer, pool: Broker) -> None:
    key = answerer.keys.session("world-1").payload("life-1", 0)
    await answerer.client.set(key, b"latents")

    assert await SessionClient("world-1", pool).read(f"redis:{key}") == b"latents"


async def test_presence_is_kept_while_the_client_is_open(answerer: Answerer, pool: Broker) -> None:
    presence = answerer.keys.session("world-1").presence
    async with SessionClient("world-1", pool) as session:
        await session.create(model="reference", presence_ms=1_500)
        for _ in range(22):
            await asyncio.sleep(0.1)
            assert await answerer.client.exists(presence)

    async with asyncio.timeout(30):
        while await answerer.client.exists(presence):
            await asyncio.sleep(0.1)


async def test_a_creation_that_fails_leaves_no_keep_alive(answerer: Answerer, pool: Broker) -> None:
    answerer.handlers[Op.CREATE] = lambda command: InvalidArgumentError("no such reducer", field="reducer")
    async with SessionClient("world-1", pool) as session:
        with pytest.raises(InvalidArgumentError):
            await session.create(model="reference", reducer="none", presence_ms=100)
        await asyncio.sleep(0.2)

        assert await answerer.client.exists(answerer.keys.session("world-1").presence) == 0


async def test_an_unknown_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLDLINE_BLOK_MS", "3")

    with pytest.raises(ConfigurationError, match="WORLDLINE_BLOK_MS"):
        SessionClient("world-1")
