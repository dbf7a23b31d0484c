"""`worldline fsck`: what it prints, and how it ends."""

from contracts.keys import Keys
from support.answerer import Answerer
from support.broker import RealBroker

KEYS = Keys()


def test_where_everything_holds_it_says_so(served: Answerer, worldline) -> None:
    said = worldline("fsck", "--json")
    plain = worldline("fsck")

    assert (said.status, said.json) == (0, {"ok": True, "findings": []})
    assert (plain.status, plain.out) == (0, "every invariant holds\n")


def test_a_broken_invariant_is_exit_1_with_code_key_and_message(
    served: Answerer, worldline, broker: RealBroker
) -> None:
    with broker.client() as client:
        client.zadd(KEYS.tombstones, {"nobody": 1})

    said = worldline("fsck", "--json")
    plain = worldline("fsck")

    assert (said.status, plain.status) == (1, 1)
    [finding] = said.json["findings"]
    assert (finding["code"], finding["key"], finding["session_id"]) == (
        "tombstone_left",
        KEYS.tombstones,
        "nobody",
    )
    assert "nobody" in finding["message"]
    assert "tombstone_left" in plain.out


def test_corrupt_data_is_exit_65(served: Answerer, worldline, broker: RealBroker) -> None:
    with broker.client() as client:
        client.zadd(KEYS.tombstones, {"nobody": 1})
        client.set(KEYS.workers, "not ours")

    said = worldline("fsck", "--json")

    assert said.status == 65
    assert {finding["corrupt"] for finding in said.json["findings"]} == {False, True}


def test_without_a_broker_it_is_told(worldline, monkeypatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1/0")

    assert worldline("fsck", "--json").status == 69
