"""`worldline workers`, `hosts` and `history`."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio

from support.broker import RealBroker
from support.hosting import Caller, running_host
from support.invariants import check_invariants
from support.scripted_worker import ScriptedWorker


@pytest.fixture
async def worker(broker: RealBroker) -> AsyncIterator[ScriptedWorker]:
    async with ScriptedWorker(broker.url, name="gpu-0") as running:
        yield running


@pytest.fixture
async def world(
    broker: RealBroker, worker: ScriptedWorker, real: redis.asyncio.Redis
) -> AsyncIterator[Caller]:
    """A session beyond chunk 0."""
    caller = Caller(real)
    async with running_host(broker.url, host_id="host-1"):
        await caller.ok("create", model=worker.model)
        await caller.ok("next_chunk")
        yield caller


@pytest.fixture
def command(worldline: Any) -> Any:
    """Runs a command beside the loop that the host lives in."""

    async def call(*arguments: str) -> Any:
        return await asyncio.to_thread(worldline, *arguments)

    return call


# --- workers
async def test_workers_are_listed_with_what_they_hold(
    world: Caller, worker: ScriptedWorker, command: Any
) -> None:
    other = ScriptedWorker("redis://unused", name="gpu-1")
    other.client = world.client
    await other.vanish()

    said = await command("workers", "list", "--json")
    plain = await command("workers", "list")

    alive, lost = said.json
    assert (alive["worker"], alive["state"], alive["reserved"]) == ("gpu-0", "alive", 1)
    assert (alive["model"], alive["capacity"]) == (worker.model, worker.capacity)
    assert (lost["worker"], lost["state"], lost["model"]) == ("gpu-1", "lost", None)
    assert plain.status == 0
    assert "gpu-1" in plain.out


async def test_a_worker_that_is_forgotten_fails_its_sessions_at_once(
    world: Caller, worker: ScriptedWorker, command: Any
) -> None:
    await worker.vanish(silent_for_ms=100)

    said = await command("workers", "forget", "gpu-0", "--yes")
    state = await world.until("FAILED")

    assert said.status == 0
    assert "1 sessions were told" in said.out
    assert state["failure_code"] == "worker_lost"
    assert "by hand" in state["failure_message"]
    assert (await command("workers", "list", "--json")).json == []
    assert (await world.ok("close"))["status"] == "CLOSED"
    await check_invariants(world.client)


async def test_a_worker_that_is_alive_is_forgotten_only_by_force(world: Caller, command: Any) -> None:
    refused = await command("workers", "forget", "gpu-0", "--yes")
    assert refused.status == 4
    assert "alive" in refused.err
    assert (await world.state())["status"] == "ACTIVE"

    forced = await command("workers", "forget", "gpu-0", "--yes", "--force")

    assert forced.status == 0
    assert (await world.until("FAILED"))["failure_code"] == "worker_lost"


async def test_a_worker_that_nobody_knows_is_not_found(world: Caller, command: Any) -> None:
    assert (await command("workers", "forget", "gpu-9", "--yes")).status == 3


async def test_forgetting_asks_and_without_a_terminal_it_wants_yes(
    world: Caller, worker: ScriptedWorker, command: Any
) -> None:
    await worker.vanish(silent_for_ms=100)

    said = await command("workers", "forget", "gpu-0")

    assert said.status == 2
    assert "--yes" in said.err
    assert (await world.state())["status"] == "ACTIVE"


# --- hosts
async def test_hosts_are_listed_with_their_partitions(world: Caller, command: Any) -> None:
    await world.client.zadd("wl:hosts", {"host-old": 5})

    said = await command("hosts", "list", "--json")

    by_name = {host["host"]: host for host in said.json}
    assert (by_name["host-1"]["state"], by_name["host-1"]["partitions"]) == ("alive", list(range(8)))
    assert by_name.get("host-old", {}).get("state", "silent") == "silent"
    assert (await command("hosts", "list")).status == 0


def test_without_any_host_the_list_is_empty(worldline: Any) -> None:
    said = worldline("hosts", "list", "--json")

    assert (said.status, said.json) == (0, [])


# --- history
async def test_the_history_tells_each_transition(world: Caller, command: Any) -> None:
    await world.ok("reset")
    await world.ok("close", reason="the show is over")

    said = await command("history", world.session_id, "--json")
    last = await command("history", world.session_id, "--limit", "2", "--json")
    plain = await command("history", world.session_id)

    assert [(line["trigger"], line["to"]) for line in said.json] == [
        ("created", "ACTIVE"),
        ("reset_succeeded", "ACTIVE"),
        ("close_requested", "CLOSING"),
        ("cleanup_succeeded", "CLOSED"),
    ]
    assert {line["by"] for line in said.json} == {"host host-1"}
    assert said.json[2]["reason"] == "the show is over"
    assert said.json[0]["at_ms"] <= said.json[-1]["at_ms"]
    assert last.json == said.json[2:]
    assert "the show is over" in plain.out


def test_the_history_of_nobody_is_not_found(worldline: Any) -> None:
    assert worldline("history", "nobody").status == 3
    assert worldline("history", "no one").status == 2
