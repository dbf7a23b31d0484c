"""Indexes beside a session's state: entered before a transition, and left again where it was refused."""

import pytest
import redis.asyncio

from actors.store import SessionStore
from contracts.keys import Keys
from contracts.lifecycle import Status

KEYS = Keys()


@pytest.fixture
def store(broker_client: redis.asyncio.Redis) -> SessionStore:
    return SessionStore(broker_client, KEYS)


async def members(store: SessionStore, key: str) -> list[bytes]:
    return await store.client.zrange(key, 0, -1)


@pytest.mark.parametrize("status", [Status.FAILED, Status.CLOSING])
async def test_a_refused_transition_is_taken_back(store: SessionStore, status: Status) -> None:
    await store.client.hset(KEYS.session("w").state, "status", "ACTIVE")
    score = await store.enter("w", status)

    await store.leave("w", status, score)

    assert await members(store, KEYS.index(status)) == []
    assert await members(store, KEYS.tombstones) == []


async def test_what_somebody_else_has_entered_anew_stays(store: SessionStore) -> None:
    score = await store.enter("w", Status.FAILED)
    await store.client.zadd(KEYS.index(Status.FAILED), {"w": score + 1})

    await store.leave("w", Status.FAILED, score)

    assert await members(store, KEYS.index(Status.FAILED)) == [b"w"]


async def test_the_entry_of_a_session_that_is_what_it_says_stays(store: SessionStore) -> None:
    await store.client.hset(KEYS.session("w").state, "status", "CLOSING")
    score = await store.enter("w", Status.CLOSING)

    await store.leave("w", Status.CLOSING, score)

    assert await members(store, KEYS.index(Status.CLOSING)) == [b"w"]
    assert await members(store, KEYS.tombstones) == [b"w"]


async def test_a_tombstone_that_another_state_needs_stays(store: SessionStore) -> None:
    await store.client.hset(KEYS.session("w").state, "status", "CLEANUP_FAILED")
    score = await store.enter("w", Status.CLOSING)

    await store.leave("w", Status.CLOSING, score)

    assert await members(store, KEYS.index(Status.CLOSING)) == []
    assert await members(store, KEYS.tombstones) == [b"w"]
