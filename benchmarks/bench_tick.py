"""What a tick costs around the model: `next_chunk()` to its answer, with an engine that does nothing.

    python benchmarks/bench_tick.py [--json] [--smoke] [--rounds N]

Everything runs on one broker in one go, in real processes, and takes turns: only the ratios of one run mean something.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from actors.broker_pool import Broker
from actors.client import SessionClient
from actors.config import ClientSettings
from chains import four_hops, ping_pong
from contracts import event_loop
from counting import broker_calls, per_tick, relays
from machines import describe
from measuring import Contender, interleave, ratio
from rq_jobs import jobs
from stacks import broker, worldline
from tables import show

TARGETS = {"tick / bare chain": 1.8, "rq simple / tick": 2.5, "rq forking / tick": 6.0, "5000 / 10 idle": 1.2}
"""The first and the last are to stay below, the others above."""


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    rounds: int
    ticks: int
    forked: int
    few: int
    many: int
    counted: int
    idle_s: float


FULL = Size(rounds=25, ticks=40, forked=5, few=10, many=5_000, counted=300, idle_s=3.0)
SMOKE = Size(rounds=2, ticks=3, forked=1, few=1, many=5, counted=10, idle_s=0.2)


@contextlib.asynccontextmanager
async def session(url: str, prefix: str) -> AsyncIterator[SessionClient]:
    """A session whose first chunk is made, on the host of that prefix."""
    settings = ClientSettings(REDIS_URL=url, prefix=prefix)  # type: ignore[call-arg]
    async with Broker(settings=settings) as shared, SessionClient(f"bench-{prefix}", shared) as client:
        await client.create(model="noop")
        await client.next_chunk()
        yield client


async def add_idle_sessions(client: SessionClient, count: int) -> None:
    """Sessions that the same host keeps and nobody uses."""
    names = iter(range(count))

    async def add() -> None:
        for number in names:
            await SessionClient(f"idle-{number}", client.broker).create(model="noop")

    await asyncio.gather(*(add() for _ in range(16)))


def tick_of(client: SessionClient) -> Any:
    """One tick as an operation."""

    async def tick() -> None:
        await client.next_chunk()

    return tick


async def compare(url: str, size: Size) -> dict[str, Any]:
    """A tick against the bare chains and against rq."""
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(worldline(url, url, prefix="tick", capacity=16))
        client = await stack.enter_async_context(session(url, "tick"))
        tick = Contender("worldline tick", tick_of(client), size.ticks)
        rows = {"tick": tick}
        for kind in ("redis.asyncio", "wires"):
            chain = await stack.enter_async_context(four_hops(url, kind))
            pong = await stack.enter_async_context(ping_pong(url, kind))
            rows[f"chain {kind}"] = Contender(f"bare four-hop chain, {kind}", chain.go_round, size.ticks)
            rows[f"pong {kind}"] = Contender(f"two-process ping-pong, {kind}", pong.go_round, size.ticks)
        for kind, batch in (("simple", size.ticks), ("forking", size.forked)):
            queue = stack.enter_context(jobs(url, kind))
            rows[f"rq {kind}"] = Contender(f"rq job, {kind} worker", queue.run_one, batch)
        await interleave(list(rows.values()), rounds=size.rounds)
    return {
        "times": {row.name: row.figures() for row in rows.values()},
        "ratios": {
            "tick / bare chain": ratio(tick, rows["chain redis.asyncio"]),
            "tick / bare chain over wires": ratio(tick, rows["chain wires"]),
            "tick / ping-pong": ratio(tick, rows["pong redis.asyncio"]),
            "rq simple / tick": ratio(rows["rq simple"], tick),
            "rq forking / tick": ratio(rows["rq forking"], tick),
        },
    }


async def compare_idle(url: str, size: Size) -> dict[str, Any]:
    """A tick beside few and beside many idle sessions, each on a host of its own."""
    async with contextlib.AsyncExitStack() as stack:
        rows = []
        for prefix, count in (("few", size.few), ("many", size.many)):
            stack.enter_context(worldline(url, url, prefix=prefix, capacity=count + 16))
            client = await stack.enter_async_context(session(url, prefix))
            await add_idle_sessions(client, count)
            rows.append(Contender(f"tick beside {count} idle sessions", tick_of(client), size.ticks))
        await interleave(rows, rounds=size.rounds)
    few, many = rows
    return {
        "times": {row.name: row.figures() for row in rows},
        "ratios": {f"{size.many} / {size.few} idle": ratio(many, few)},
    }


async def count_traffic(url: str, size: Size) -> dict[str, Any]:
    """Commands and round trips of one tick, by process, and what the broker runs for it."""
    with (
        relays(url, "client", "host", "worker") as roles,
        worldline(roles["host"].url, roles["worker"].url, prefix="count", capacity=16),
    ):
        async with session(roles["client"].url, "count") as client, Broker(url) as probe:

            async def span(ticks: int, idle_s: float) -> tuple[dict[str, Counter[str]], Counter[str], float]:
                for relay in roles.values():
                    relay.reset()
                calls, started = await broker_calls(probe.commands), time.monotonic()
                for _ in range(ticks):
                    await client.next_chunk()
                await asyncio.sleep(idle_s)
                elapsed_s = time.monotonic() - started
                sent = {
                    role: relay.commands + Counter({"round trips": relay.round_trips})
                    for role, relay in roles.items()
                }
                return sent, await broker_calls(probe.commands) - calls, elapsed_s

            idle, idle_calls, idle_s = await span(0, size.idle_s)
            busy, busy_calls, busy_s = await span(size.counted, 0.0)
    share = busy_s / idle_s
    counts = {role: per_tick(busy[role], idle[role], share=share, ticks=size.counted) for role in roles}
    broker_side = per_tick(busy_calls, idle_calls, share=share, ticks=size.counted)
    return {"sent": counts, "run_by_the_broker": broker_side}


async def run(size: Size) -> dict[str, Any]:
    """The whole benchmark."""
    with broker() as url:
        machine = describe(url)
        compared = await compare(url, size)
        idle = await compare_idle(url, size)
        traffic = await count_traffic(url, size)
    return {
        "benchmark": "tick",
        "rounds": size.rounds,
        "operations_a_batch": size.ticks,
        "machine": machine,
        "times": compared["times"] | idle["times"],
        "ratios": compared["ratios"] | idle["ratios"],
        "targets": TARGETS,
        "traffic": traffic,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--smoke", action="store_true", help="the smallest possible run: shows that it works")
    parser.add_argument("--rounds", type=int, help="interleaved batches of each contender")
    options = parser.parse_args()
    size = SMOKE if options.smoke else FULL
    if options.rounds:
        size = Size(**{**vars(size), "rounds": options.rounds})
    report = event_loop.run(run(size))
    print(json.dumps(report, indent=2)) if options.json else show(report)


if __name__ == "__main__":
    main()
