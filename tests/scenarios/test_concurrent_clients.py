"""Two hundred clients on fifty sessions, all at once, on real processes."""

import asyncio
import json
import random
from collections import Counter
from pathlib import Path

import pytest

from actors.broker_pool import Broker
from actors.client import SessionClient
from contracts.errors import EventStaleError, SessionStateError
from contracts.events import ARDiffusionSessionEvent
from contracts.identity import new_command_id
from contracts.lifecycle import Status
from support.dev import start_dev
from support.processes import Processes

pytestmark = pytest.mark.real_broker

SESSIONS = 50
CLIENTS = 200
CALLS = 4


class World:
    """What all clients of one session did to it."""

    def __init__(self, broker: Broker, number: int) -> None:
        self.session_id = f"world-{number}"
        self.session = SessionClient(self.session_id, broker)
        self.keys = broker.keys.session(self.session_id)
        self.newest_event = 0
        self.accepted: set[int] = set()
        self.commands: list[str] = []

    async def act(self, choice: float) -> None:
        """One call: an event, a chunk, a reset or, seldom, a close; refused once the session is closed."""
        try:
            if choice < 0.5:
                self.newest_event += 1
                event = ARDiffusionSessionEvent(self.newest_event, prompt="more")
                await self.session.accept_event(event)
                self.accepted.add(event.event_id)
            elif choice < 0.9:
                await self.session.next_chunk(command_id=self._command())
            elif choice < 0.97:
                await self.session.reset(command_id=self._command())
            else:
                await self.session.close(command_id=self._command())
        except EventStaleError:
            return  # a newer event of another client was applied first
        except SessionStateError as error:
            assert error.code == "invalid_state"  # noqa: PT017 -- which of its kinds it is

    def _command(self) -> str:
        self.commands.append(new_command_id())
        return self.commands[-1]


async def test_every_command_is_answered_once_and_every_event_accounted_for(
    processes: Processes, tmp_path: Path
) -> None:
    dev = await asyncio.to_thread(start_dev, processes, tmp_path / "data")
    async with Broker(dev.url) as broker:
        worlds = [World(broker, number) for number in range(SESSIONS)]
        await asyncio.gather(*(world.session.create(model="reference", seed=1) for world in worlds))

        async def client(number: int) -> None:
            choices = random.Random(number)
            for _ in range(CALLS):
                await worlds[number % SESSIONS].act(choices.random())

        await asyncio.gather(*(client(number) for number in range(CLIENTS)))

        for world in worlds:
            await check(broker, world)


async def check(broker: Broker, world: World) -> None:
    """The invariants of a session that everybody has let go of."""
    state = await world.session.state()
    assert state.status in (Status.ACTIVE, Status.CLOSED)
    if state.status is Status.ACTIVE:
        await world.session.next_chunk()  # applies what is still pending
    assert await world.session.close() is Status.CLOSED

    answers = await broker.commands.xrange(world.keys.answers)
    count = Counter(json.loads(fields[b"answer"])["command_id"] for _, fields in answers)
    assert {command: count[command] for command in world.commands} == dict.fromkeys(world.commands, 1)

    chunks = [fields for _, fields in await broker.commands.xrange(world.keys.chunks)]
    applied = [event for fields in chunks for event in json.loads(fields[b"applied_event_ids"])]
    assert len(set(applied)) == len(applied)
    rejected = {int(fields[b"event_id"]) for _, fields in await broker.commands.xrange(world.keys.rejected)}
    assert world.accepted <= set(applied) | rejected
    assert set(applied).isdisjoint(rejected)
