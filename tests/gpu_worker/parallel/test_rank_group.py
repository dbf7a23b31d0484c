"""Ranks as torchrun starts them: they end together, and rank 0 answers for all."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
import redis.asyncio

from support.broker import RealBroker
from support.fake_host import FakeHost
from support.processes import Process, Processes

TESTS = str(Path(__file__).resolve().parents[2])


@pytest.fixture
async def host(real: redis.asyncio.Redis) -> FakeHost:
    return FakeHost(real)


def start(processes: Processes, broker: RealBroker, model: str = "noop", **more: str) -> Process:
    """Two ranks of `support.rank_engines`."""
    launcher = str(Path(sys.executable).parent / "torchrun")
    command = (launcher, "--nproc-per-node", "2", "-m", "gpu_worker", "--engine", "support.rank_engines:make")
    env = {"REDIS_URL": broker.url, "PYTHONPATH": TESTS, "WORLDLINE_DEVICE": "cpu"} | more
    return processes.start(*command, "--model", model, env=env)


async def ready(group: Process) -> list[int]:
    """Waits until it serves; the ranks' processes."""
    await asyncio.to_thread(group.wait_for_line, r"^ready worker=gpu-0 model=noop", timeout=60)
    return group.children()


async def end_of(pids: list[int]) -> None:
    async with asyncio.timeout(15):
        while any(os.path.exists(f"/proc/{pid}") for pid in pids):  # noqa: ASYNC240 - of no disk
            await asyncio.sleep(0.05)


async def test_a_rank_that_fails_fails_the_tick_and_one_that_hangs_ends_them_all_in_time(
    processes: Processes, broker: RealBroker, host: FakeHost
) -> None:
    group = start(processes, broker, WORLDLINE_EXECUTION_LIMIT_MS="2000")
    ranks = await ready(group)
    good, bad = await host.create("good"), await host.create("bad", fault={"ranks": [1], "before": 1})
    await host.chunk(good)

    reply = await host.run(bad.tick())

    assert reply.error is not None
    assert (reply.error.code, reply.error.message) == (
        "model_error",
        "rank 1: Fault: told to fail before exchange 1",
    )
    await host.chunk(good)

    stuck = await host.create("stuck", fault={"ranks": [1], "before": 1, "as": "hang"})
    await host.send(stuck.tick())
    reply = await host.reply(within_s=10)
    assert reply.error is not None
    assert reply.error.code == "execution_timeout"
    await asyncio.to_thread(group.wait)
    await end_of(ranks)


async def test_what_is_in_hand_is_finished_on_sigterm_by_all_ranks(
    processes: Processes, broker: RealBroker, host: FakeHost
) -> None:
    group = start(processes, broker)
    ranks = await ready(group)
    slow = await host.create("slow", fault={"ranks": [1], "before": 1, "as": "slow"})
    await host.send(slow.tick())
    await asyncio.sleep(0.5)

    group.send(signal.SIGTERM)

    reply = await host.reply(within_s=10)
    assert reply.error is None
    assert reply.output is not None
    await asyncio.to_thread(group.wait)
    await end_of(ranks)
    assert await host.info() == {}, "the name is given back"
    assert await host.stream_is_empty()
    assert "is gone" not in group.stderr


async def test_a_group_that_is_told_to_end_while_it_loads_gives_its_name_back(
    processes: Processes, broker: RealBroker, host: FakeHost
) -> None:
    group = start(processes, broker, "slow")
    ranks = []
    for rank in range(2):
        said = await asyncio.to_thread(
            group.wait_for_line, rf"^loading rank={rank} process=(\d+)", timeout=60
        )
        ranks.append(int(said[1]))

    os.kill(ranks[1], signal.SIGTERM)  # it may reach this one first
    await asyncio.sleep(0.5)
    group.send(signal.SIGTERM)

    await asyncio.to_thread(group.wait)
    await end_of(ranks)
    assert await host.info() == {}
    assert "error: rank 1 is gone" not in group.stderr


async def test_ranks_do_not_outlive_their_launcher(
    processes: Processes, broker: RealBroker, host: FakeHost
) -> None:
    group = start(processes, broker)
    ranks = await ready(group)
    await host.chunk(await host.create("world"))

    group.send(signal.SIGKILL)

    await end_of(ranks)
    assert "error: the launcher is gone: this worker ends" in group.stderr


async def test_a_rank_that_cannot_load_ends_all_with_bad_configuration(
    processes: Processes, broker: RealBroker
) -> None:
    group = start(processes, broker, "incomplete")

    await asyncio.to_thread(group.wait, timeout=60)

    assert "error: weight head.bias is missing [head.bias]" in group.stderr
    assert "error: loading failed: rank 1: weight head.bias is missing [ulysses_degree]" in group.stderr
    assert "exitcode  : 78" in group.stderr
