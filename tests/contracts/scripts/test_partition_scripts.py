"""The scripts of a partition: lease, inbox, live set; each outcome, and exactly what it writes."""

import asyncio
from unittest.mock import ANY

import pytest

from contracts.errors import OwnershipLostError
from support.script_world import World

MINUTE_MS = 60_000


async def claimed(world: World, owner: str = "a") -> int:
    lease = await world.partitions.claim(0, owner, MINUTE_MS)
    assert lease is not None
    return lease.epoch


# --- lease
async def test_a_free_partition_is_claimed_with_the_clock_as_its_epoch(world: World) -> None:
    lease = await world.partitions.claim(0, "a", MINUTE_MS)

    assert lease is not None
    assert await world.changes() == {
        "lease": {"owner": "a", "epoch": str(lease.epoch), "expires_at_ms": str(lease.expires_at_ms)}
    }
    assert abs(lease.epoch // 1_000 + MINUTE_MS - lease.expires_at_ms) <= 1


async def test_a_partition_that_is_held_is_not_claimed(world: World) -> None:
    await claimed(world, "a")
    await world.mark()

    assert await world.partitions.claim(0, "b", MINUTE_MS) is None
    assert await world.changes() == {}


async def test_a_lease_that_ran_out_is_claimed_with_a_higher_epoch(world: World) -> None:
    first = await world.partitions.claim(0, "a", 1)
    await asyncio.sleep(0.005)

    second = await world.partitions.claim(0, "b", MINUTE_MS)

    assert first is not None
    assert second is not None
    assert (second.owner, second.epoch > first.epoch) == ("b", True)


async def test_an_owner_that_claims_again_is_a_new_ownership(world: World) -> None:
    assert await claimed(world) < await claimed(world)


async def test_an_epoch_is_above_the_last_one_even_if_the_clock_went_back(world: World) -> None:
    await claimed(world)
    await world.client.hset(world.keys.partition(0).lease, mapping={"epoch": 2**52, "expires_at_ms": 0})

    assert await claimed(world, "b") == 2**52 + 1


async def test_a_renewal_moves_the_end_only(world: World) -> None:
    epoch = await claimed(world)
    await world.mark()

    assert await world.partitions.renew(0, "a", epoch, 2 * MINUTE_MS) is True
    assert await world.changes() == {"lease": {"expires_at_ms": ANY}}


@pytest.mark.parametrize("wrong", ["owner", "epoch", "late", "unheld"])
async def test_a_renewal_by_anybody_else_or_too_late_is_refused(wrong: str, world: World) -> None:
    epoch = await claimed(world)
    if wrong == "late":
        await world.client.hset(world.keys.partition(0).lease, "expires_at_ms", 1)
    if wrong == "unheld":
        await world.client.delete(world.keys.partition(0).lease)
    await world.mark()

    owner, number = ("b" if wrong == "owner" else "a"), epoch - (wrong == "epoch")
    assert await world.partitions.renew(0, owner, number, MINUTE_MS) is False
    assert await world.changes() == {}


async def test_a_release_ends_the_lease_and_keeps_its_epoch(world: World) -> None:
    epoch = await claimed(world)
    await world.mark()

    assert await world.partitions.release(0, "a", epoch) is True
    assert await world.changes() == {"lease": {"expires_at_ms": "0"}}
    assert await claimed(world, "b") > epoch


async def test_nobody_releases_what_another_holds(world: World) -> None:
    epoch = await claimed(world)
    await world.mark()

    assert await world.partitions.release(0, "b", epoch) is False
    assert await world.partitions.release(0, "a", epoch - 1) is False
    assert await world.changes() == {}


async def test_partitions_are_held_apart(world: World) -> None:
    await claimed(world)

    assert await world.partitions.claim(1, "b", MINUTE_MS) is not None


# --- inbox
async def test_finished_entries_leave_the_inbox_with_their_counts_and_the_others_stay(world: World) -> None:
    epoch = await claimed(world)
    keys = world.keys.partition(0)
    entries = [(await world.client.xadd(keys.inbox, {"command": str(n)})).decode() for n in range(3)]
    for entry in entries:
        await world.partitions.inbox_attempt(0, epoch, entry)
    await world.mark()

    assert await world.partitions.inbox_done(0, epoch, entries[:2]) == 2
    assert await world.changes() == {"inbox": [-1, -1], "attempts": {entries[0]: None, entries[1]: None}}
    assert await world.partitions.inbox_done(0, epoch, entries) == 1


async def test_nothing_finished_is_nothing_done(world: World) -> None:
    epoch = await claimed(world)
    await world.mark()

    assert await world.partitions.inbox_done(0, epoch, []) == 0
    assert await world.changes() == {}


async def test_many_entries_go_at_once(world: World) -> None:
    epoch = await claimed(world)
    keys = world.keys.partition(0)
    pipe = world.client.pipeline()
    for number in range(1_000):
        pipe.xadd(keys.inbox, {"command": str(number)})
    entries = [entry.decode() for entry in await pipe.execute()]

    assert await world.partitions.inbox_done(0, epoch, entries) == 1_000


async def test_a_claim_counts_an_entry_once_however_often_it_asks_and_the_next_claim_once_more(
    world: World,
) -> None:
    epochs = [await claimed(world)]
    assert await world.partitions.inbox_attempt(0, epochs[0], "1-1") == 1
    assert await world.partitions.inbox_attempt(0, epochs[0], "1-1") == 1
    for expected in (2, 3):
        epoch = await claimed(world)
        assert await world.partitions.inbox_attempt(0, epoch, "1-1") == expected
        assert await world.partitions.inbox_attempt(0, epoch, "1-1") == expected

    assert await world.partitions.inbox_attempt(0, epoch, "1-2") == 1


# --- live
async def test_a_session_joins_and_leaves_the_live_set(world: World) -> None:
    epoch = await claimed(world)
    await world.mark()

    await world.partitions.set_live(0, epoch, "world-1", True)
    assert await world.changes() == {"live": ["world-1"]}
    await world.partitions.set_live(0, epoch, "world-1", False)
    await world.partitions.set_live(0, epoch, "world-2", False)
    assert await world.changes() == {}


@pytest.mark.parametrize("epoch_off", [-1, 1])
async def test_only_the_present_epoch_touches_inbox_and_live_set(epoch_off: int, world: World) -> None:
    epoch = await claimed(world) + epoch_off
    await world.mark()

    for call in (
        world.partitions.inbox_done(0, epoch, ["1-1"]),
        world.partitions.inbox_attempt(0, epoch, "1-1"),
        world.partitions.set_live(0, epoch, "world-1", True),
    ):
        with pytest.raises(OwnershipLostError):
            await call
    assert await world.changes() == {}


async def test_a_partition_that_nobody_ever_held_takes_nothing(world: World) -> None:
    with pytest.raises(OwnershipLostError):
        await world.partitions.set_live(0, 1, "world-1", True)
    assert await world.changes() == {}
