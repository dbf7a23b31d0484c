"""Tables, slots and the two kinds of position."""

import pytest

from contracts.errors import InvalidArgumentError, KVStateError
from gpu_worker.kv.block_table import BlockTable, KVRequestAdapter, slot_indices


def test_a_slot_is_the_page_times_its_size_plus_the_offset() -> None:
    assert slot_indices([5, 2], 2, 4, 4) == [22, 23, 8, 9]
    assert slot_indices([5, 2], 0, 0, 4) == []


@pytest.mark.parametrize("size", [0, -1])
def test_a_page_has_a_size(size: int) -> None:
    with pytest.raises(InvalidArgumentError, match="block_size"):
        slot_indices([1], 0, 1, size)


def test_compaction_takes_pages_out_in_table_order() -> None:
    table = BlockTable()
    table.append([4, 9, 2, 7])
    assert table.compact(1, 2) == [9, 2]
    assert table.ids == (4, 7)
    assert table.clear() == [4, 7]
    assert len(table) == 0


def test_compaction_beyond_the_table_is_refused_and_changes_nothing() -> None:
    table = BlockTable()
    table.append([4, 9])
    with pytest.raises(KVStateError, match="outside"):
        table.compact(1, 2)
    assert table.ids == (4, 9)


def test_prefilled_tokens_count_as_computed() -> None:
    adapter = KVRequestAdapter("r", 0, 16, prefill_tokens=4)
    assert (adapter.num_computed_tokens, adapter.num_tokens) == (4, 20)
    adapter.advance()
    assert (adapter.absolute_tokens, adapter.num_computed_tokens, adapter.num_tokens) == (20, 20, 36)


def test_compaction_moves_the_computed_position_and_never_the_absolute_one() -> None:
    adapter = KVRequestAdapter("r", 0, 16)
    adapter.table.append([1, 2, 3])
    for _ in range(3):
        adapter.advance()
    assert adapter.compact(1, 16) == [2]
    assert (adapter.absolute_tokens, adapter.absolute_frames, adapter.num_computed_tokens) == (48, 3, 32)
    assert adapter.reset() == [1, 3]
    assert (adapter.absolute_tokens, adapter.compacted_tokens) == (0, 0)
