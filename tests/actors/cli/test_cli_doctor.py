"""`worldline doctor`."""

import pytest
from rq.scheduler import RQScheduler

from contracts.keys import WORKER_GROUP, Keys
from support.answerer import Answerer
from support.broker import RealBroker

KEYS = Keys()


def levels(said) -> dict[str, str]:
    return {check["name"]: check["level"] for check in said.json["checks"]}


@pytest.fixture
def alive(served: Answerer, broker: RealBroker) -> Answerer:
    """A host, a worker and a janitor that seem to live."""
    with broker.client() as client:
        seconds, _ = client.time()
        client.zadd(KEYS.hosts, {"host-1": seconds * 1000})
        client.zadd(KEYS.workers, {"gpu-0": seconds * 1000, "gpu-1": seconds * 1000})
        client.hset(KEYS.worker("gpu-0").info, mapping={"model": "reference", "capacity": 4})
        client.xgroup_create(KEYS.worker("gpu-0").requests, WORKER_GROUP, mkstream=True)
        client.zadd(KEYS.janitors, {"janitor-1": seconds * 1000})
        client.set(RQScheduler.get_locking_key(KEYS.jobs_queue), "janitor-1")
    return served


def test_a_whole_deployment_is_healthy(alive: Answerer, worldline) -> None:
    said = worldline("doctor", "--json")
    plain = worldline("doctor")

    assert said.status == 0, said.out
    assert said.json["ok"] is True
    assert set(levels(said).values()) == {"ok"}
    checks = {check["name"]: check for check in said.json["checks"]}
    assert checks["durability"]["values"]["loss_window"] == "up to the last second, two on a disk under load"
    assert checks["workers"]["values"]["alive"] == {"gpu-0": "reference"}
    assert checks["partitions"]["values"]["owners"] == {"answerer": list(range(8))}
    assert plain.status == 0
    assert "up to the last second" in plain.out


def test_what_is_missing_is_named(worldline) -> None:
    said = worldline("doctor", "--json")

    assert said.status == 1
    missing = dict.fromkeys(("hosts", "workers", "partitions", "janitors", "scheduler"), "fail")
    assert levels(said) | missing == levels(said)
    plain = worldline("doctor").out
    assert "worldline host" in plain
    assert "worldline janitor" in plain


def test_partitions_without_an_owner_are_listed(alive: Answerer, worldline, broker: RealBroker) -> None:
    with broker.client() as client:
        client.hset(KEYS.partition(3).lease, "expires_at_ms", 5)
        client.delete(KEYS.partition(6).lease)

    said = worldline("doctor", "--json")

    assert said.status == 1
    [partitions] = [check for check in said.json["checks"] if check["name"] == "partitions"]
    assert (partitions["level"], partitions["values"]["without_owner"]) == ("fail", [3, 6])


@pytest.mark.parametrize(
    ("setting", "value", "check", "level"),
    [
        ("appendonly", "no", "durability", "fail"),
        ("appendfsync", "no", "durability", "warn"),
        ("appendfsync", "always", "durability", "ok"),
        ("maxmemory-policy", "allkeys-lru", "eviction", "warn"),
        ("maxmemory", "900000", "memory", "warn"),
    ],
)
def test_a_setting_of_the_broker_that_loses_sessions_is_found(
    new_broker, worldline, monkeypatch, *, setting, value, check, level
) -> None:
    own = new_broker()
    monkeypatch.setenv("REDIS_URL", own.url)
    with own.client() as client:
        client.config_set(setting, value)

    assert levels(worldline("doctor", "--json"))[check] == level


def test_a_broker_that_does_not_tell_its_settings_is_examined_all_the_same(
    new_broker, worldline, monkeypatch
) -> None:
    own = new_broker()
    with own.client() as client:
        client.acl_setuser(
            "plain", enabled=True, passwords=["+secret"], keys=["*"], commands=["+@all", "-config"]
        )
    monkeypatch.setenv("REDIS_URL", f"redis://plain:secret@127.0.0.1:{own.port}/0")

    said = worldline("doctor", "--json")

    assert levels(said)["eviction"] == "ok"
    assert levels(said)["durability"] == "warn"
    assert "secret" not in said.out


def test_tombstones_are_a_warning(alive: Answerer, worldline, broker: RealBroker) -> None:
    with broker.client() as client:
        client.zadd(KEYS.tombstones, {"w": 1})

    said = worldline("doctor", "--json")

    assert (said.status, levels(said)["tombstones"]) == (0, "warn")


def test_without_a_scheduler_a_janitor_is_not_enough(alive: Answerer, worldline, broker: RealBroker) -> None:
    with broker.client() as client:
        client.delete(RQScheduler.get_locking_key(KEYS.jobs_queue))

    said = worldline("doctor", "--json")

    assert said.status == 1
    assert (levels(said)["janitors"], levels(said)["scheduler"]) == ("ok", "fail")


def test_a_broker_for_jobs_that_does_not_answer_is_told_without_its_password(
    alive: Answerer, worldline, monkeypatch
) -> None:
    monkeypatch.setenv("WORLDLINE_JOBS_URL", "redis://:secret@127.0.0.1:1/0")

    said = worldline("doctor", "--json")

    assert (said.status, levels(said)["scheduler"]) == (1, "fail")
    assert "secret" not in said.out


def test_a_request_stream_without_its_group_is_found(alive: Answerer, worldline, broker: RealBroker) -> None:
    with broker.client() as client:
        client.xgroup_destroy(KEYS.worker("gpu-0").requests, WORKER_GROUP)

    said = worldline("doctor", "--json")

    assert (said.status, levels(said)["groups"]) == (1, "fail")
    assert "gpu-0" in said.out


def test_a_command_that_nobody_finishes_is_a_warning(alive: Answerer, worldline, broker: RealBroker) -> None:
    with broker.client() as client:
        client.xadd(KEYS.partition(3).inbox, {"command": "{}"}, id="1000-0")
        client.xadd(KEYS.partition(5).inbox, {"command": "{}"})

    said = worldline("doctor", "--json")

    [backlog] = [check for check in said.json["checks"] if check["name"] == "backlog"]
    assert (backlog["level"], backlog["values"]["partition"], backlog["values"]["unfinished"]) == (
        "warn",
        3,
        2,
    )
