"""Fixtures: a host in the test's own loop, a scripted worker, sessions. What they leave behind must hold together."""

from collections.abc import AsyncIterator

import pytest
import redis.asyncio

from actors import creation, session_core
from actors.host import Host
from actors.reducers.registry import make_reducer
from support import reducers
from support.broker import RealBroker
from support.hosting import Caller, running_host
from support.invariants import check_invariants
from support.scripted_worker import ScriptedWorker


@pytest.fixture
async def worker(broker: RealBroker) -> AsyncIterator[ScriptedWorker]:
    """A worker `w0` of the model `scripted`."""
    async with ScriptedWorker(broker.url) as running:
        yield running


@pytest.fixture
async def host(broker: RealBroker, worker: ScriptedWorker) -> AsyncIterator[Host]:
    """A host that owns every partition."""
    async with running_host(broker.url) as running:
        yield running


@pytest.fixture
async def stranger(real: redis.asyncio.Redis, host: Host) -> AsyncIterator[Caller]:
    """A caller of `world-1`, which does not exist yet. Afterwards the broker must hold together."""
    yield Caller(real)
    await check_invariants(real)


@pytest.fixture
async def world(stranger: Caller) -> Caller:
    """The session `world-1`, ACTIVE, at chunk 0."""
    await stranger.ok("create", model="scripted")
    return stranger


@pytest.fixture
async def neighbour(world: Caller) -> Caller:
    """A second session on the same worker."""
    other = Caller(world.client, "world-2")
    await other.ok("create", model="scripted")
    return other


@pytest.fixture
def reducer(monkeypatch: pytest.MonkeyPatch) -> type[reducers.ScriptedReducer]:
    """A reducer `scripted` that sessions may be created with; it fails as its class attributes say."""

    class Fresh(reducers.ScriptedReducer):
        calls: list[str] = []  # noqa: RUF012

    for module in (creation, session_core):
        make = lambda name: Fresh() if name == reducers.NAME else make_reducer(name)  # noqa: E731
        monkeypatch.setattr(module, "make_reducer", make)
    return Fresh
