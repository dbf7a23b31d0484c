"""The reply of a script is lost on its way, for each script that there is: whoever called it, nothing happens twice."""

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass

import pytest
import redis.asyncio
from structlog.testing import capture_logs

from actors.broker_pool import Broker
from actors.client import SessionClient
from actors.config import ClientSettings
from actors.fsck import check_all
from contracts.broker import command_client
from contracts.errors import BrokerError, WorldlineError
from contracts.events import ARDiffusionSessionEvent
from contracts.index_scripts import IndexScripts
from contracts.keys import Keys
from contracts.scripts import script_source
from gpu_worker.guard import assignment_of
from gpu_worker.watchdog import Watchdog
from support.broker import RealBroker
from support.forked_stack import until
from support.hosting import dying_host, running_host
from support.noop_engine import NoopEngine
from support.relay import Drop, Relay
from support.tree import sources
from support.worker_runner import RunningWorker, WorkerRunner

pytestmark = pytest.mark.timeout(110)

SCRIPTS = sorted(path.stem for path in sources(".lua", "contracts/lua") if path.parent.name == "lua")
LEASE_MS = 3_000
TAKEOVER_LEASE_MS = 600
AT_ONCE = 6
STORY_S = 45


@dataclass
class Scene:
    """One story's surroundings: everybody in it reaches the broker through a relay that loses one reply."""

    relay: Relay
    prefix: str
    lost: Drop
    broker: Broker
    session: SessionClient
    workers: WorkerRunner
    engine: NoopEngine

    async def worker(self, **settings: int) -> RunningWorker:
        """A worker; one that does not hear that it has its name ends, and is started again."""
        start = lambda: self.workers(engine=self.engine, prefix=self.prefix, **settings)  # noqa: E731
        try:
            return await start()
        except BrokerError:
            return await start()

    def host(self, name: str, lease_ms: int = LEASE_MS) -> contextlib.AbstractAsyncContextManager[object]:
        """A host. Its lease outlasts a loop that stands still for a while, as one of so many does."""
        return running_host(self.relay.url, prefix=self.prefix, host_id=name, lease_ms=lease_ms)

    def ticks(self) -> int:
        """How often the engine ran a tick."""
        return [call for call, _ in self.engine.calls].count("tick")


Story = Callable[[Scene], Awaitable[None]]


@contextlib.asynccontextmanager
async def scene_of(script: str, server: RealBroker) -> AsyncIterator[Scene]:
    digest = hashlib.sha1(script_source(script).encode(), usedforsecurity=False).hexdigest()
    with Relay(server.port) as relay:
        settings = ClientSettings(redis_url=relay.url, prefix=script, lease_ms=LEASE_MS, block_ms=300)  # type: ignore[call-arg]
        broker = Broker(settings=settings)
        session = SessionClient("world-1", broker, timeout_s=STORY_S)
        workers = WorkerRunner(relay.url)
        lost = relay.drop_reply(digest.encode())
        try:
            yield Scene(relay, script, lost, broker, session, workers, NoopEngine())
        finally:
            await workers.end()
            await broker.aclose()


# ------------------------------------------------------------------------------------------------ stories
async def a_whole_life(scene: Scene) -> None:
    """Everything that can happen to a session, each thing once."""
    session, told = scene.session, []

    async def call(name: str, call: Callable[[], Awaitable[object]]) -> None:
        try:
            await call()
            told.append(name)
        except WorldlineError as error:
            told.append(f"{name}: {error.code}")

    worker = await scene.worker()
    async with scene.host("first"):
        params = {"fail_at": 1, "release_fails": 1}
        await call("create", lambda: session.create(model="noop", idle_ms=3_600_000, params=params))
        await call("event", lambda: session.accept_event(ARDiffusionSessionEvent(1, prompt="one")))
        events = scene.broker.keys.session("world-1").events
        await again(lambda: scene.broker.commands.xadd(events, {"event_id": "none"}, nomkstream=True))
        await call("chunk", session.next_chunk)
        await call("pause", session.pause)
        await call("chunk", session.next_chunk)
        await until(lambda: settled(scene), "the failure is over")
        await call("reset", session.reset)
        await call("chunk", session.next_chunk)
        for _ in range(3):
            await call("close", session.close)
        await until(lambda: sound(scene), "nothing is wrong with any key")
        await asyncio.sleep(LEASE_MS / 2000)  # a lease is renewed
        await check_answers(scene)
        assert len(await scene.broker.commands.xrange(scene.broker.keys.session("world-1").rejected)) == 1
        assert (await session.state()).close_attempts == 1
    await worker.stop()
    assert told == [
        "create", "event", "chunk", "pause", "chunk: model_error", "reset", "chunk", "close: model_error", "close", "close",
    ]  # fmt: skip
    assert scene.ticks() == 3


async def a_takeover(scene: Scene) -> None:
    """A host dies with a tick in flight; the next one sends it again."""
    await scene.worker()
    dying = dying_host(scene.relay.url, prefix=scene.prefix, host_id="first", lease_ms=TAKEOVER_LEASE_MS)
    async with dying:
        await scene.session.create(model="noop", params={"sleep_ms": 1_500})
        operation = asyncio.create_task(scene.session.next_chunk())
        await until(lambda: scene.ticks() == 1, "the tick runs")
    async with scene.host("second", TAKEOVER_LEASE_MS):
        assert (await operation).chunk_index == 0
        await until(lambda: sound(scene), "nothing is wrong with any key")
        await check_answers(scene)
    assert scene.ticks() == 1


async def a_command_that_is_found(scene: Scene) -> None:
    """A host dies as it begins a tick; the next one finds the command."""
    await scene.worker()
    dying = dying_host(
        scene.relay.url,
        dies_in="begin_tick",
        prefix=scene.prefix,
        host_id="first",
        lease_ms=TAKEOVER_LEASE_MS,
    )
    async with dying as dies:
        await scene.session.create(model="noop")
        operation = asyncio.create_task(scene.session.next_chunk())
        await asyncio.wait_for(dies.wait(), STORY_S)
    async with scene.host("second", TAKEOVER_LEASE_MS):
        assert (await operation).chunk_index == 0
        await until(lambda: sound(scene), "nothing is wrong with any key")
        await check_answers(scene)
    assert scene.ticks() == 1


async def a_takeover_of_free_running(scene: Scene) -> None:
    """A host dies between two chunks of a session that runs free; the next one runs it on."""
    await scene.worker()
    dying = dying_host(scene.relay.url, prefix=scene.prefix, host_id="first", lease_ms=TAKEOVER_LEASE_MS)
    async with dying:
        await scene.session.create(model="noop", pace_ms=200)
        await until(lambda: scene.ticks() > 0, "it runs")
    before = scene.ticks()
    async with scene.host("second", TAKEOVER_LEASE_MS):
        await until(lambda: scene.ticks() > before, "it runs on")
        await scene.session.close()
        await until(lambda: sound(scene), "nothing is wrong with any key")
        await check_answers(scene)


async def a_restarted_worker(scene: Scene) -> None:
    """At chunk 0 a session stays on the worker's next start."""
    first = await scene.worker()
    async with scene.host("first"):
        await scene.session.create(model="noop")
        with contextlib.suppress(BrokerError):
            await first.stop()
        await scene.worker()
        assert (await scene.session.next_chunk()).chunk_index == 0
        await until(lambda: sound(scene), "nothing is wrong with any key")
        await until(lambda: scene.lost.happened, "a reply was lost")
    assert scene.ticks() == 1


async def a_tick_that_takes_too_long(scene: Scene) -> None:
    """The watchdog answers in the worker's stead, once."""
    worker = await scene.worker(execution_limit_ms=300)
    assignment = assignment_of(worker.worker.settings, worker.worker.incarnation)
    killed, never = asyncio.Event(), asyncio.Event()
    watching = asyncio.create_task(Watchdog(assignment, killed.set).run(never))
    async with scene.host("first"):
        await scene.session.create(model="noop", params={"sleep_ms": 60_000})
        with pytest.raises(WorldlineError) as raised:
            await scene.session.next_chunk()
        assert raised.value.code == "execution_timeout"
        await asyncio.wait_for(killed.wait(), STORY_S)
        await worker.crash()
        assert await watching
        await scene.worker()
        await until(lambda: settled(scene), "the release was answered")
        await until(lambda: sound(scene), "nothing is wrong with any key")
        await check_answers(scene)
    assert scene.ticks() == 1


async def a_repaired_index(scene: Scene) -> None:
    """An entry is taken out, or put in, once; another one of the same name is left alone."""
    client = command_client(scene.relay.url)
    scripts, index = IndexScripts(client, Keys(scene.prefix)), f"{scene.prefix}:sessions:ACTIVE"
    await again(lambda: client.zadd(index, {"stays": 1.0, "goes": 2.0}))
    await again(lambda: scripts.drop(index, "goes", 2.0))
    await again(lambda: scripts.add(index, "comes", 3.0))
    assert await client.zrange(index, 0, -1, withscores=True) == [(b"stays", 1.0), (b"comes", 3.0)]
    await client.aclose()


STORIES: dict[str, Story] = {
    "inbox_attempt": a_command_that_is_found,
    "resend": a_takeover,
    "free_attempt": a_takeover_of_free_running,
    "place": a_restarted_worker,
    "worker_in_hand": a_tick_that_takes_too_long,
    "worker_time_out": a_tick_that_takes_too_long,
    "index_drop": a_repaired_index,
    "index_add": a_repaired_index,
}
"""In which story a script is called; all others are called in a whole life."""


# ------------------------------------------------------------------------------------------------ what holds
async def again(call: Callable[[], Awaitable[object]]) -> None:
    """As every caller of ours does: after a reply that was lost, the same call once more."""
    with contextlib.suppress(BrokerError, redis.exceptions.ConnectionError):
        await call()
        return
    await call()


async def settled(scene: Scene) -> bool:
    return (await scene.session.state()).inflight is None


async def sound(scene: Scene) -> bool:
    with contextlib.suppress(BrokerError):
        return not await check_all(scene.broker, settle_s=0.1)
    return False


async def check_answers(scene: Scene) -> None:
    entries = await scene.broker.commands.xrange(scene.broker.keys.session("world-1").answers)
    commands = [json.loads(fields[b"answer"])["command_id"] for _, fields in entries]
    assert len(commands) == len(set(commands))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Thirty hosts and workers in one loop have a lot to say, and to say it takes them time."""
    with capture_logs():
        yield


async def test_no_script_that_is_not_heard_of_acts_twice(broker: RealBroker) -> None:
    client = command_client(broker.url)
    for script in SCRIPTS:
        await client.script_load(script_source(script))
    await client.aclose()
    assert set(STORIES) <= set(SCRIPTS)
    slots = asyncio.Semaphore(AT_ONCE)

    async def tell(script: str) -> None:
        async with slots, asyncio.timeout(STORY_S), scene_of(script, broker) as scene:
            await STORIES.get(script, a_whole_life)(scene)
            assert scene.lost.happened, "the script was not called"

    outcomes = await asyncio.gather(*(tell(script) for script in SCRIPTS), return_exceptions=True)

    wrong = [
        f"{script}: {error!r}" for script, error in zip(SCRIPTS, outcomes, strict=True) if error is not None
    ]
    if wrong:
        pytest.fail("\n".join(wrong))
