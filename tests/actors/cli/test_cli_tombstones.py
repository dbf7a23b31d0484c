"""`worldline tombstones`, on a host and a worker whose releases fail."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio

from support.broker import RealBroker
from support.hosting import Caller, running_host
from support.invariants import check_invariants
from support.janitors import releases, tombstone
from support.scripted_worker import ScriptedWorker


@pytest.fixture
async def worker(broker: RealBroker) -> AsyncIterator[ScriptedWorker]:
    async with ScriptedWorker(broker.url) as running:
        yield running


@pytest.fixture
async def host(broker: RealBroker, worker: ScriptedWorker) -> AsyncIterator[Any]:
    async with running_host(broker.url) as running:
        yield running


@pytest.fixture
def dead(host: Any, worker: ScriptedWorker, real: redis.asyncio.Redis) -> Caller:
    """The session that is to be a tombstone; `worker` is alive."""
    return Caller(real, "dead:1.x")


@pytest.fixture
def command(worldline: Any) -> Any:
    """Runs a command beside the loop that the host lives in."""

    async def call(*arguments: str) -> Any:
        return await asyncio.to_thread(worldline, *arguments)

    return call


async def test_retry_all_closes_every_tombstone_without_a_janitor(
    dead: Caller, worker: ScriptedWorker, command: Any
) -> None:
    other = Caller(dead.client, "dead-2")
    await tombstone(dead, worker, failures=1)
    await tombstone(other, worker, failures=1)

    said = await command("tombstones", "retry", "--all", "--json")

    assert said.status == 0, said
    assert {(r["session_id"], r["ok"], r["status"]) for r in said.json} == {
        ("dead:1.x", True, "CLOSED"),
        ("dead-2", True, "CLOSED"),
    }
    assert {(await caller.state())["status"] for caller in (dead, other)} == {"CLOSED"}
    await check_invariants(dead.client)


async def test_a_release_that_fails_again_is_exit_1_and_stays_a_tombstone(
    dead: Caller, worker: ScriptedWorker, command: Any
) -> None:
    await tombstone(dead, worker, failures=2)

    said = await command("tombstones", "retry", dead.session_id, "--json")
    again = await command("tombstones", "retry", dead.session_id)

    assert said.status == 1
    [result] = said.json
    assert (result["ok"], result["status"]) == (False, None)
    assert "the release failed" in result["error"]["message"]
    assert again.status == 0
    assert "session dead:1.x is CLOSED" in again.out


async def test_some_of_several_is_exit_1_and_the_others_are_closed(
    dead: Caller, worker: ScriptedWorker, command: Any
) -> None:
    await tombstone(dead, worker, failures=1)
    alive = Caller(dead.client, "alive")
    await alive.ok("create", model=worker.model)

    said = await command("tombstones", "retry", dead.session_id, "alive", "nobody", "--json")

    assert said.status == 1
    assert {(r["session_id"], r["ok"]) for r in said.json} == {
        ("dead:1.x", True),
        ("alive", False),
        ("nobody", False),
    }
    assert (await alive.state())["status"] == "ACTIVE"


async def test_one_that_is_no_tombstone_is_refused(
    dead: Caller, worker: ScriptedWorker, command: Any
) -> None:
    await dead.ok("create", model=worker.model)

    assert (await command("tombstones", "retry", "nobody")).status == 3
    said = await command("tombstones", "retry", dead.session_id)

    assert said.status == 4
    assert "is active" in said.err


async def test_a_dry_run_says_what_and_does_nothing(
    dead: Caller, worker: ScriptedWorker, command: Any
) -> None:
    await tombstone(dead, worker, failures=1)

    said = await command("tombstones", "retry", "--all", "--dry-run")
    as_json = await command("tombstones", "retry", "--all", "--dry-run", "--json")

    assert (said.status, as_json.status) == (0, 0)
    assert "would close dead:1.x" in said.out
    assert [item["session_id"] for item in as_json.json] == ["dead:1.x"]
    assert releases(worker) == 1


async def test_the_reason_stands_in_the_history(dead: Caller, worker: ScriptedWorker, command: Any) -> None:
    await tombstone(dead, worker, failures=1)

    await command("tombstones", "retry", "--all", "--reason", "ticket 17")
    lines = (await command("history", dead.session_id, "--json")).json

    assert [line["reason"] for line in lines if line["trigger"] == "close_requested"] == [
        "close",
        "ticket 17",
    ]


async def test_the_list_shows_why_since_when_and_what_comes_next(
    dead: Caller, worker: ScriptedWorker, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await tombstone(dead, worker, failures=3)

    [entry] = (await command("tombstones", "list", "--json")).json
    monkeypatch.setenv("WORLDLINE_CLOSE_ATTEMPTS_LIMIT", "1")
    plain = await command("tombstones", "list")

    assert (entry["session_id"], entry["failures"], entry["worker"]) == ("dead:1.x", 1, worker.name)
    assert "no release" in entry["error"]
    assert entry["due_ms"] > entry["since_ms"]
    assert entry["given_up"] is False
    assert "given up" in plain.out


async def test_a_tombstone_that_its_index_has_lost_is_listed_all_the_same(
    dead: Caller, worker: ScriptedWorker, command: Any
) -> None:
    await tombstone(dead, worker, failures=1)
    await dead.client.delete("wl:tombstones")

    [entry] = (await command("tombstones", "list", "--json")).json

    assert (entry["session_id"], entry["due_ms"]) == ("dead:1.x", None)
    assert (await command("tombstones", "retry", "--all")).status == 0


async def test_what_the_index_lists_wrongly_is_no_tombstone(
    dead: Caller, worker: ScriptedWorker, command: Any
) -> None:
    await dead.ok("create", model=worker.model)
    await dead.client.zadd("wl:tombstones", {dead.session_id: 1, "gone": 2})

    assert (await command("tombstones", "list", "--json")).json == []
    said = await command("tombstones", "retry", "--all", "--json")

    assert (said.status, said.json) == (0, [])
    assert (await dead.state())["status"] == "ACTIVE"


async def test_without_a_live_host_it_says_so(
    broker: RealBroker, real: redis.asyncio.Redis, worker: ScriptedWorker, command: Any
) -> None:
    dead = Caller(real)
    async with running_host(broker.url):
        await tombstone(dead, worker, failures=1)

    said = await command("tombstones", "retry", "--all")

    assert said.status == 75
    assert "no session host is running" in said.err
    assert await real.xlen(dead.inbox) == 0


async def test_two_at_once_release_once(dead: Caller, worker: ScriptedWorker, command: Any) -> None:
    await tombstone(dead, worker, failures=1)
    worker.gate.clear()
    first = await dead.send("close")
    await worker.arrived(3)
    second = asyncio.create_task(command("tombstones", "retry", "--all", "--json"))
    third = asyncio.create_task(dead.call("disconnect"))
    await asyncio.sleep(0.3)
    worker.gate.set()

    assert (await dead.answer_to(first))["ok"]
    assert (await third)["ok"]
    assert (await second).status == 0
    assert releases(worker) == 2


@pytest.mark.parametrize("arguments", [[], ["--all", "dead"], ["a b"], ["--all", "--reason", " "]])
async def test_what_makes_no_sense_is_a_usage_error(
    arguments: list[str], dead: Caller, worker: ScriptedWorker, command: Any
) -> None:
    await tombstone(dead, worker, failures=1)

    assert (await command("tombstones", "retry", *arguments)).status == 2


def test_without_a_broker_it_is_told_soon(worldline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1/0")

    assert worldline("tombstones", "list").status == 69
    assert worldline("tombstones", "retry", "--all").status == 69
