"""The scripts over a worker's keys, on both kinds of broker."""

import pytest
import redis.asyncio

from contracts.errors import CorruptDataError
from contracts.identity import key_slot
from contracts.keys import Keys
from contracts.reservation import Reservation
from contracts.worker_scripts import ReserveResult, WorkerScripts

KEYS = Keys()
OWN = KEYS.worker("gpu-0")


@pytest.fixture
def scripts(broker_client: redis.asyncio.Redis) -> WorkerScripts:
    return WorkerScripts(broker_client, KEYS)


async def claim(
    scripts: WorkerScripts, incarnation: str = "one", capacity: int = 2, **options: str
) -> int | None:
    return await scripts.claim("gpu-0", incarnation, {"capacity": capacity}, ttl_ms=60_000, **options)


def test_all_keys_of_a_worker_share_a_slot() -> None:
    assert len({key_slot(key) for key in (OWN.info, OWN.requests, OWN.sessions)}) == 1


# ------------------------------------------------------------------------------------------------ the name
async def test_a_free_name_is_taken_for_a_while(scripts: WorkerScripts) -> None:
    now_ms = await claim(scripts)

    info = await scripts.client.hgetall(OWN.info)
    assert info == {b"incarnation": b"one", b"capacity": b"2", b"last_seen_ms": str(now_ms).encode()}
    assert 0 < await scripts.client.pttl(OWN.info) <= 60_000


async def test_a_name_is_kept_from_another_start_and_nothing_is_written(scripts: WorkerScripts) -> None:
    await claim(scripts)
    before = await scripts.client.hgetall(OWN.info)

    assert await claim(scripts, "two", capacity=9) is None
    assert await scripts.heartbeat("gpu-0", "two", {}, ttl_ms=1) is None
    assert await scripts.client.hgetall(OWN.info) == before


async def test_a_heartbeat_renews_the_name(scripts: WorkerScripts) -> None:
    first_ms = await claim(scripts)
    await scripts.client.pexpire(OWN.info, 1_000)

    assert await scripts.heartbeat("gpu-0", "one", {"resident": 1}, ttl_ms=60_000) >= first_ms
    assert await scripts.client.pttl(OWN.info) > 1_000
    assert await scripts.client.hget(OWN.info, "resident") == b"1"


async def test_only_the_start_that_is_known_to_be_dead_is_replaced(scripts: WorkerScripts) -> None:
    await claim(scripts)
    await scripts.client.hset(OWN.info, "busy_since", "5")

    assert await claim(scripts, "two", dead="zero") is None
    assert await claim(scripts, "two", dead="one") is not None
    assert await scripts.client.hget(OWN.info, "busy_since") is None


async def test_leaving_removes_the_own_info_only(scripts: WorkerScripts) -> None:
    await claim(scripts)

    assert not await scripts.leave("gpu-0", "two")
    assert await scripts.leave("gpu-0", "one")
    assert not await scripts.leave("gpu-0", "one")
    assert not await scripts.client.exists(OWN.info)


async def test_busy_is_marked_for_the_holder_only(scripts: WorkerScripts) -> None:
    assert await scripts.mark_busy("gpu-0", "one") is None
    assert not await scripts.client.exists(OWN.info), "info without a time to live would last for ever"
    await claim(scripts)

    assert await scripts.mark_busy("gpu-0", "two") is None
    since_ms = await scripts.mark_busy("gpu-0", "one")
    assert await scripts.client.hget(OWN.info, "busy_since") == str(since_ms).encode()


# ------------------------------------------------------------------------------------------------ reservations
async def test_room_is_reserved_up_to_the_capacity(scripts: WorkerScripts) -> None:
    await claim(scripts)

    assert await scripts.reserve("gpu-0", "a", "life-a") is ReserveResult.RESERVED
    assert await scripts.reserve("gpu-0", "b", "life-b") is ReserveResult.RESERVED
    assert await scripts.reserve("gpu-0", "c", "life-c") is ReserveResult.FULL
    assert await scripts.reserve("gpu-0", "c", "life-c", overcommit=True) is ReserveResult.RESERVED
    assert await scripts.client.hlen(OWN.sessions) == 3


async def test_a_session_that_has_room_gets_the_new_life_even_on_a_full_worker(
    scripts: WorkerScripts,
) -> None:
    now_ms = await claim(scripts, capacity=1)
    await scripts.reserve("gpu-0", "a", "life-1")

    assert await scripts.reserve("gpu-0", "a", 'life "2"') is ReserveResult.RESERVED
    entry = Reservation.from_json(await scripts.client.hget(OWN.sessions, "a"), "a")
    assert entry.life == 'life "2"'
    assert 0 <= entry.reserved_at_ms - now_ms < 10_000


async def test_nothing_is_reserved_on_a_worker_that_is_gone_or_still_loads(scripts: WorkerScripts) -> None:
    assert await scripts.reserve("gpu-0", "a", "life", overcommit=True) is ReserveResult.GONE
    await scripts.claim("gpu-0", "one", {}, ttl_ms=60_000)

    assert await scripts.reserve("gpu-0", "a", "life") is ReserveResult.GONE
    assert not await scripts.client.exists(OWN.sessions)


async def test_room_is_given_back_by_the_life_that_has_it(scripts: WorkerScripts) -> None:
    await claim(scripts)
    await scripts.reserve("gpu-0", "a", "life-a")
    await scripts.reserve("gpu-0", "b", "life-b")

    assert not await scripts.unreserve("gpu-0", "a", "another")
    assert not await scripts.unreserve("gpu-0", "nobody", "life")
    assert await scripts.unreserve("gpu-0", "a", "life-a")
    assert await scripts.unreserve("gpu-0", "b")
    assert not await scripts.client.exists(OWN.sessions)


async def test_an_unreadable_reservation_can_be_removed(scripts: WorkerScripts) -> None:
    await scripts.client.hset(OWN.sessions, "a", "{")

    assert await scripts.unreserve("gpu-0", "a", "life")


@pytest.mark.parametrize("key", [OWN.info, OWN.sessions])
async def test_a_key_of_the_wrong_type_is_named(key: str, scripts: WorkerScripts) -> None:
    await claim(scripts)
    await scripts.client.delete(key)
    await scripts.client.set(key, "x")

    with pytest.raises(CorruptDataError, match="w:gpu-0"):
        await scripts.reserve("gpu-0", "a", "life")


async def test_a_message_is_added_to_an_inbox(scripts: WorkerScripts) -> None:
    await scripts.add_to_inbox("inbox", "reply", "{}")
    await scripts.add_to_inbox("inbox", "notice", "[]")

    entries = await scripts.client.xrange("inbox")
    assert [fields for _, fields in entries] == [{b"reply": b"{}"}, {b"notice": b"[]"}]
