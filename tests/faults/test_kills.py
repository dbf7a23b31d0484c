"""Hosts and workers are killed at random moments under eight busy sessions: nothing twice, nothing skipped."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from actors.calls import AnswerTimeoutError
from actors.client import SessionClient
from actors.fsck import check_all
from contracts.errors import (
    FAILURE_CODES,
    EventStaleError,
    NoCapacityError,
    SessionStateError,
    TickFailedError,
    WorldlineError,
)
from contracts.events import ARDiffusionSessionEvent
from contracts.lifecycle import Status
from support.broker import RealBroker
from support.forked_stack import Stack, digest_of, ready, until
from support.forker import Forker
from support.processes import Process

pytestmark = pytest.mark.processes

SESSIONS = 8
TICK_MS = 30
HOSTS = ("host-a", "host-b")
WORKERS = ("gpu-0", "gpu-1")


@pytest.fixture
async def stack(broker: RealBroker, forker: Forker) -> AsyncIterator[Stack]:
    """Two hosts and two workers that anybody may kill."""
    running = Stack(forker, broker.url, "kills", WORLDLINE_WATCHDOG="false")
    yield running
    await running.end()


class Crowd:
    """Processes that are killed and started again."""

    def __init__(self, stack: Stack, seed: int) -> None:
        self.stack = stack
        self.choose = random.Random(seed)
        self.running: dict[str, Process] = {}
        self.kills: Counter[str] = Counter()
        self.in_flight = 0

    async def start(self) -> None:
        self.running = {name: self._begin(name) for name in (*HOSTS, *WORKERS)}
        for name in WORKERS:
            await ready(self.running[name])

    def _begin(self, name: str) -> Process:
        return self.stack.host(name) if name in HOSTS else self.stack.worker(name=name)

    async def kill_until(self, enough: int) -> None:
        """Kills one process after the other until so many kills met a request in flight."""
        while self.in_flight < enough:
            await asyncio.sleep(self.choose.uniform(0.05, 0.5))
            name = self.choose.choice(sorted(self.running))
            flying = await self._requests_in_flight()
            self.running[name].kill()
            self.kills[name] += 1
            self.in_flight += flying > 0
            await asyncio.sleep(self.choose.uniform(0.0, 0.3))
            self.running[name] = self._begin(name)

    async def _requests_in_flight(self) -> int:
        broker, count = self.stack.broker, 0
        for number in range(SESSIONS):
            count += await broker.commands.hexists(broker.keys.session(f"world-{number}").state, "inflight")
        return count


class Player:
    """A client of one session: events and chunks, and a reset whenever the session has failed."""

    def __init__(self, session: SessionClient, seed: int) -> None:
        self.session = session
        self.choose = random.Random(seed)
        self.accepted: set[int] = set()
        self.told: Counter[str] = Counter()
        self.event_id = 0

    async def play(self, enough: asyncio.Event) -> None:
        params = {"sleep_ms": TICK_MS}
        await self._command(lambda name: self.session.create(
            model="noop", seed=5, recording="all", params=params, command_id=name
        ))  # fmt: skip
        while not enough.is_set():
            if self.choose.random() < 0.5:
                await self._event()
            await self._command(lambda name: self.session.next_chunk(command_id=name))
            if (await self.session.state()).status is Status.FAILED:
                await self._command(lambda name: self.session.reset(command_id=name))

    async def _event(self) -> None:
        self.event_id += 1
        try:
            await self.session.accept_event(
                ARDiffusionSessionEvent(self.event_id, prompt=f"p{self.event_id}")
            )
            self.accepted.add(self.event_id)
        except (SessionStateError, EventStaleError) as error:
            self.told[error.code] += 1

    async def _command(self, send: object) -> bool:
        """Sends a command until it is answered; whether it succeeded. Every failure has a code that we know."""
        while True:
            name = f"{self.choose.getrandbits(64):016x}"
            try:
                await self._persist(send, name)
            except NoCapacityError as error:
                self.told[error.code] += 1
                await asyncio.sleep(0.2)
            except (TickFailedError, SessionStateError) as error:
                assert error.code in FAILURE_CODES | {"invalid_state"}, error  # noqa: PT017 - counted below
                self.told[error.code] += 1
                return False
            else:
                self.told["ok"] += 1
                return True

    async def _persist(self, send: object, name: str) -> None:
        for _ in range(3):
            try:
                await send(name)  # type: ignore[operator]
            except AnswerTimeoutError:
                continue
            return
        raise AssertionError("no answer after three times the patience")


async def live_through(stack: Stack, *, seed: int, chunks: int, kills: int) -> tuple[Crowd, list[Player]]:
    crowd, enough = Crowd(stack, seed), asyncio.Event()
    await crowd.start()
    players = [Player(stack.session(f"world-{number}"), seed + number) for number in range(SESSIONS)]
    playing = [asyncio.create_task(player.play(enough)) for player in players]

    async def committed() -> bool:
        for task in playing:
            if task.done():
                task.result()
        return sum([len(await stack.read(p.session.session_id, "ticks")) for p in players]) >= chunks

    await crowd.kill_until(kills)
    await until_long(committed)
    enough.set()
    await asyncio.gather(*playing)
    return crowd, players


async def until_long(condition: object) -> None:
    while not await condition():  # type: ignore[operator]
        await asyncio.sleep(0.1)


async def check_session(stack: Stack, player: Player) -> None:
    """Each life's chunks follow each other and from each other's memory; each accepted event has had one fate."""
    name = player.session.session_id
    chunks, ticks = await stack.read(name, "chunks"), await stack.read(name, "ticks")
    assert [c["request_id"] for c in chunks] == [t["request_id"] for t in ticks]
    for life in dict.fromkeys(chunk["life"] for chunk in chunks):
        of_life = [chunk for chunk in chunks if chunk["life"] == life]
        assert [int(chunk["chunk_index"]) for chunk in of_life] == list(range(len(of_life)))
        last = await player.session.read(of_life[-1]["payload"])
        assert digest_of([tick for tick in ticks if tick["life"] == life], 5) in last
    applied = [event for chunk in chunks for event in json.loads(chunk["applied_event_ids"])]
    assert applied == sorted(set(applied))
    rejected = [int(entry["event_id"]) for entry in await stack.read(name, "rejected")]
    assert not set(applied) & set(rejected)
    assert player.accepted <= {*applied, *rejected}
    answers = [json.loads(entry["answer"])["command_id"] for entry in await stack.read(name, "answers")]
    assert len(answers) == len(set(answers))


async def check_everything(stack: Stack, players: list[Player]) -> None:
    for player in players:
        assert await player.session.close() is Status.CLOSED
    for player in players:
        await check_session(stack, player)

    async def sound() -> bool:
        return not await check_all(stack.broker)

    try:
        await until(sound, "nothing is wrong with any key")
    except AssertionError:
        raise AssertionError(await check_all(stack.broker)) from None


async def run(stack: Stack, *, seed: int, chunks: int, kills: int) -> None:
    try:
        crowd, players = await live_through(stack, seed=seed, chunks=chunks, kills=kills)
        await check_everything(stack, players)
    except (AssertionError, WorldlineError):
        print(stack.report()[-20_000:])
        raise
    told = sum((player.told for player in players), Counter[str]())
    total = sum([len(await stack.read(p.session.session_id, "ticks")) for p in players])
    print(
        f"seed {seed}: {total} chunks, {crowd.kills.total()} kills, {crowd.in_flight} with a request in flight"
    )
    print(f"answers: {dict(told)}; kills: {dict(crowd.kills)}")
    assert total >= chunks
    assert crowd.in_flight >= kills


@pytest.mark.timeout(110)
async def test_sixty_chunks_survive_six_kills(stack: Stack) -> None:
    await run(stack, seed=1, chunks=60, kills=6)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [2, 3, 4])
async def test_three_hundred_chunks_survive_thirty_kills(stack: Stack, seed: int) -> None:
    await run(stack, seed=seed, chunks=300, kills=30)
