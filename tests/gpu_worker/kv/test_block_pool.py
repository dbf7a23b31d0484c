"""The free queue: order, exhaustion, conservation."""

import pytest

from contracts.errors import InvalidArgumentError, KVStateError, PoolExhaustedError
from gpu_worker.kv.block_pool import BlockPool


def test_pages_are_handed_out_lowest_first_and_the_null_page_never() -> None:
    pool = BlockPool(5)
    assert pool.allocate(2) == [1, 2]
    assert pool.allocate(2) == [3, 4]
    pool.free([3, 1])
    assert pool.allocate(1) == [1]
    assert pool.allocate(1) == [3]


def test_an_exhausted_pool_says_so_and_takes_nothing() -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    with pytest.raises(RuntimeError, match="pool exhausted") as caught:
        pool.allocate(2)
    assert isinstance(caught.value, PoolExhaustedError)
    assert pool.num_free == 1
    assert pool.allocate(1) == [3]


def test_a_page_can_be_freed_once_only() -> None:
    pool = BlockPool(4)
    ids = pool.allocate(1)
    pool.free(ids)
    with pytest.raises(KVStateError, match="page 1"):
        pool.free(ids)
    with pytest.raises(KVStateError, match="page 0"):
        pool.free([0])
    assert pool.num_free == pool.num_usable == 3


def test_a_pool_needs_a_page_beside_the_null_page() -> None:
    with pytest.raises(InvalidArgumentError, match="num_blocks"):
        BlockPool(1)


def test_conservation_finds_a_lost_a_shared_and_a_foreign_page() -> None:
    pool = BlockPool(6)
    ids = pool.allocate(3)
    pool.check_conservation(ids)
    with pytest.raises(KVStateError, match="in use"):
        pool.check_conservation(ids[:2])
    with pytest.raises(KVStateError, match="two tables"):
        pool.check_conservation([*ids, ids[0]])
    with pytest.raises(KVStateError, match="in use"):
        pool.check_conservation([*ids, 5])
    pool._free.pop()
    with pytest.raises(KVStateError, match="free and"):
        pool.check_conservation(ids)
