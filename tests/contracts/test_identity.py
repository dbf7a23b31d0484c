"""Identities: what is a legal id, how ids are minted, and which partition owns a session."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import InvalidArgumentError
from contracts.identity import (
    MAX_INTEGER,
    check_index,
    check_session_id,
    check_text_id,
    key_slot,
    new_command_id,
    new_incarnation,
    new_request_id,
    parse_event_id,
    parse_index,
    partition_of,
)


@pytest.mark.parametrize("session_id", ["a", "world-1", "A.b_c:d-9", "x" * 128, "0"])
def test_a_legal_session_id_is_taken(session_id: str) -> None:
    assert check_session_id(session_id) == session_id


@pytest.mark.parametrize(
    "session_id",
    ["", " ", "x" * 129, "a b", "a/b", "{a}", "a}b", "é", "a\n", "a\x00", None, 7, b"a", ["a"], "*"],
)
def test_any_other_session_id_is_refused_by_name(session_id: Any) -> None:
    with pytest.raises(ValueError, match="session_id") as refused:
        check_session_id(session_id)
    assert refused.value.field == "session_id"
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize("value", ["", " \t", None, 1, b"x"])
def test_a_text_id_that_is_blank_is_refused(value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="life"):
        check_text_id(value, "life")


@pytest.mark.parametrize("value", [-1, True, 0.0, "0", None, MAX_INTEGER + 1])
def test_an_index_is_an_int_from_0_to_2_to_the_53(value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="fence"):
        check_index(value, "fence")
    assert check_index(MAX_INTEGER, "fence") == MAX_INTEGER


@given(st.integers(0, MAX_INTEGER))
def test_canonical_digits_are_read_exactly(number: int) -> None:
    assert parse_event_id(str(number)) == number
    assert parse_index(str(number), "fence") == number


@given(st.text(alphabet="0123456789+-._eE xX\n٣", max_size=20))
def test_nothing_but_canonical_digits_is_read(text: str) -> None:
    if text.isascii() and text.isdecimal() and str(int(text)) == text and int(text) <= MAX_INTEGER:
        assert str(parse_index(text, "fence")) == text
    else:
        with pytest.raises(InvalidArgumentError, match="fence"):
            parse_index(text, "fence")


@pytest.mark.parametrize("position", [0, 7, "create", "reset", "release"])
def test_a_request_id_tells_session_and_position_and_is_new_each_time(position: Any) -> None:
    made = {new_request_id("world-1", position) for _ in range(100)}

    assert len(made) == 100
    assert all(re.fullmatch(rf"ar-world-1-{position}-[0-9a-f]{{32}}", request_id) for request_id in made)


def test_command_ids_and_incarnations_are_hex_and_new_each_time() -> None:
    assert len({new_command_id() for _ in range(100)}) == 100
    assert re.fullmatch("[0-9a-f]{32}", new_command_id())
    assert re.fullmatch("[0-9a-f]{16}", new_incarnation())


def test_slots_are_those_of_the_cluster_specification() -> None:
    assert key_slot("123456789") == 0x31C3
    assert key_slot("foo") == 12182
    assert key_slot("{user1000}.following") == key_slot("{user1000}.followers") == key_slot("user1000")
    assert key_slot("foo{}{bar}") == key_slot("foo{}{bar}")
    assert key_slot("foo{{bar}}zap") == key_slot("{bar")
    assert key_slot("foo{bar}{zap}") == key_slot("bar")


@pytest.mark.parametrize("partitions", [1, 3, 8, 64])
def test_a_partition_is_the_slot_modulo_their_number(partitions: int) -> None:
    for number in range(200):
        session_id = f"world-{number}"
        assert partition_of(session_id, partitions) == key_slot(session_id) % partitions


def test_partitions_share_the_sessions_evenly() -> None:
    counts = [0] * 8
    for number in range(8_000):
        counts[partition_of(f"world-{number}", 8)] += 1

    assert min(counts) > 700
