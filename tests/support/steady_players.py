"""Clients that make one chunk after the other, whatever happens, and are never told of a failure."""

import asyncio
import json
from collections.abc import Awaitable, Callable

from actors.client import SessionClient
from actors.fsck import check_all
from contracts.events import ARDiffusionSessionEvent
from contracts.lifecycle import Status
from support.forked_stack import Stack, digest_of, until

SEED = 3
SESSIONS = 4


class SteadyPlayer:
    """A client that goes on through everything, and keeps its presence alive."""

    def __init__(self, session: SessionClient) -> None:
        self.session = session
        self.chunks = 0
        self._event_id = 0

    async def create(self) -> None:
        await self.session.create(
            model="noop", seed=SEED, recording="all", presence_ms=1_000, params={"sleep_ms": 20}
        )

    async def play(self, over: asyncio.Event) -> None:
        while not over.is_set():
            self._event_id += 1
            event = ARDiffusionSessionEvent(self._event_id, prompt=f"p{self._event_id}")
            await self.session.accept_event(event)
            chunk = await self.session.next_chunk()
            assert chunk.chunk_index == self.chunks
            self.chunks += 1


async def players_of(stack: Stack) -> list[SteadyPlayer]:
    players = [SteadyPlayer(stack.session(f"world-{number}")) for number in range(SESSIONS)]
    for player in players:
        await player.create()
    return players


async def play_through(
    stack: Stack, players: list[SteadyPlayer], trouble: Callable[[], Awaitable[None]]
) -> None:
    """All play while `trouble()` runs, and then make another chunk each."""
    over = asyncio.Event()
    playing = [asyncio.create_task(player.play(over)) for player in players]
    await trouble()
    reached = [player.chunks for player in players]

    def gone_on() -> bool:
        for task in playing:
            if task.done():
                task.result()
        return all(player.chunks > count + 1 for player, count in zip(players, reached, strict=True))

    await until(gone_on, "everybody makes chunks again")
    over.set()
    await asyncio.gather(*playing)
    for player in players:
        state = await player.session.state()
        assert (state.status, state.chunk_index) == (Status.ACTIVE, player.chunks)
        await check_session(stack, player)
        assert await player.session.close() is Status.CLOSED
        await player.session.aclose()

    async def sound() -> bool:
        return not await check_all(stack.broker)

    await until(sound, "nothing is wrong with any key")


async def check_session(stack: Stack, player: SteadyPlayer) -> None:
    """One life, each chunk once, each event applied once, by a worker that has kept its memory."""
    chunks = await stack.read(player.session.session_id, "chunks")
    ticks = await stack.read(player.session.session_id, "ticks")
    assert len({chunk["life"] for chunk in chunks}) == 1
    assert [int(chunk["chunk_index"]) for chunk in chunks] == list(range(player.chunks))
    applied = [event for chunk in chunks for event in json.loads(chunk["applied_event_ids"])]
    assert applied == list(range(1, player.chunks + 1))
    assert digest_of(ticks, SEED) in await player.session.read(chunks[-1]["payload"])
