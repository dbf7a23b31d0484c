"""An index read in pages is read whole, whatever happens to it meanwhile."""

import pytest
import redis.asyncio

from actors.index_pages import index_pages
from contracts.errors import CorruptDataError
from contracts.index_scripts import IndexScripts
from contracts.keys import Keys

KEYS = Keys()
INDEX = KEYS.tombstones


async def names(client: redis.asyncio.Redis, **options) -> list[str]:
    return [name async for page in index_pages(client, INDEX, **options) for name, _ in page]


@pytest.mark.parametrize("size", [1, 3, 4, 7, 100])
@pytest.mark.parametrize("scores", [[5] * 10, list(range(10)), [1, 1, 1, 2, 2, 3, 3, 3, 3, 9]])
async def test_each_entry_comes_once(
    broker_client: redis.asyncio.Redis, size: int, scores: list[int]
) -> None:
    members = {f"s{number}": score for number, score in enumerate(scores)}
    await broker_client.zadd(INDEX, members)

    read = await names(broker_client, size=size)

    assert sorted(read) == sorted(members)
    assert [members[name] for name in read] == sorted(scores)


async def test_only_what_is_due_comes(broker_client: redis.asyncio.Redis) -> None:
    await broker_client.zadd(INDEX, {"a": 1, "b": 2, "c": 3})

    assert await names(broker_client, up_to=2) == ["a", "b"]


async def test_what_is_removed_on_the_way_hides_nothing(broker_client: redis.asyncio.Redis) -> None:
    await broker_client.zadd(INDEX, {f"s{number}": number for number in range(10)})
    read = []
    async for page in index_pages(broker_client, INDEX, size=3):
        read += [name for name, _ in page]
        await broker_client.zrem(INDEX, *(name for name, _ in page))

    assert len(read) == 10


async def test_an_empty_index_has_no_page(broker_client: redis.asyncio.Redis) -> None:
    assert await names(broker_client) == []


# --- taking an entry out
async def test_an_entry_is_dropped_only_if_nobody_entered_it_anew(broker_client: redis.asyncio.Redis) -> None:
    scripts = IndexScripts(broker_client, KEYS)
    await broker_client.zadd(INDEX, {"a": 1795988917005, "b": 2})

    assert await scripts.drop(INDEX, "a", 1795988917004.0) is False
    assert await scripts.drop(INDEX, "a", 1795988917005.0) is True
    assert await scripts.drop(INDEX, "a", 1795988917005.0) is False
    assert await names(broker_client) == ["b"]


async def test_a_key_of_a_wrong_type_is_named(broker_client: redis.asyncio.Redis) -> None:
    await broker_client.set(INDEX, "not ours")

    with pytest.raises(CorruptDataError) as caught:
        await IndexScripts(broker_client, KEYS).drop(INDEX, "a", 1.0)
    assert caught.value.field == INDEX
    with pytest.raises(CorruptDataError, match=INDEX):
        await names(broker_client)
