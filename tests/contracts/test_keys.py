"""Keys: one slot a session, no two alike."""

from dataclasses import fields
from typing import Any

import pytest

from contracts.errors import ConfigurationError
from contracts.identity import key_slot, partition_of
from contracts.keys import SESSION_KEY_TYPES, Keys, PartitionKeys, SessionKeys, WorkerKeys
from contracts.lifecycle import Status


def spelled(keys: Any) -> list[str]:
    """Every key that needs no argument."""
    names = [name for name, value in vars(type(keys)).items() if isinstance(value, property)]
    return [getattr(keys, name) for name in names]


def keys_of(session_id: str) -> list[str]:
    keys = Keys().session(session_id)
    return [*spelled(keys), keys.payload("life", 3), keys.frames("life", 3)]


@pytest.mark.parametrize(
    "session_id", ["a", "world-1", "A.b_c:d-9", "x" * 128, "p0", "w:gpu-0", "sessions:ACTIVE"]
)
def test_every_key_of_a_session_lies_on_the_slot_of_its_id(session_id: str) -> None:
    assert {key_slot(key) for key in keys_of(session_id)} == {key_slot(session_id)}


def test_every_key_of_a_partition_or_worker_lies_on_one_slot() -> None:
    for keys in (Keys().partition(3), Keys().worker("gpu-0")):
        assert len({key_slot(key) for key in spelled(keys)}) == 1


def test_no_two_keys_are_alike_even_where_a_session_is_called_like_a_partition_or_worker() -> None:
    keys = Keys()
    everything = [
        *keys_of("p0"),
        *keys_of("w:gpu-0"),
        *spelled(keys.partition(0)),
        *spelled(keys.worker("gpu-0")),
        *(keys.index(status) for status in Status),
        *spelled(keys),
    ]

    assert len(everything) == len(set(everything))


def test_keys_are_spelled_as_documented() -> None:
    keys = Keys()

    assert keys.session("world-1").state == "wl:{world-1}:state"
    assert keys.session("world-1").payload("life", 3) == "wl:{world-1}:payload:life:3"
    assert keys.partition(3).inbox == "wl:{p3}:inbox"
    assert keys.worker("gpu-0").requests == "wl:{w:gpu-0}:requests"
    assert keys.index(Status.CLEANUP_FAILED) == "wl:sessions:CLEANUP_FAILED"
    assert keys.tombstones == "wl:tombstones"
    assert Keys("stage").config == "stage:config"


def test_the_inbox_of_a_session_is_that_of_its_partition() -> None:
    keys = Keys()

    assert keys.inbox_of("world-1", 8) == keys.partition(partition_of("world-1", 8)).inbox


def test_every_key_of_a_session_has_a_type() -> None:
    names = {key.rpartition(":")[2] for key in spelled(Keys().session("a"))}

    assert names == set(SESSION_KEY_TYPES)


@pytest.mark.parametrize("prefix", ["", "a b", "a:b", "{a}", "é", "a*"])
def test_a_prefix_that_would_break_keys_is_refused(prefix: str) -> None:
    with pytest.raises(ConfigurationError, match="prefix"):
        Keys(prefix)


@pytest.mark.parametrize("kind", [SessionKeys, PartitionKeys, WorkerKeys])
def test_builders_hold_nothing_but_their_base(kind: Any) -> None:
    assert [field.name for field in fields(kind)] == ["base"]
