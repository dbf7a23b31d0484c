"""Fixtures that every test may use. Brokers come in two kinds: `fake` (in memory) and `real` (a server)."""

import signal
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import fakeredis
import pytest
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry

from support.broker import RealBroker, plain_options, require_real_broker
from support.processes import Processes, reports_of_running_tests
from support.relay import Relay

FIXTURE_MARKS = {"real_server": "real_broker", "new_broker": "real_broker", "processes": "processes"}


def pytest_configure() -> None:
    """A shell that starts a run in the background has it ignore SIGINT, and what it starts would ignore it too."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark a test by what it uses, so that `-m "not processes"` can be relied on."""
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        for fixture, mark in FIXTURE_MARKS.items():
            if fixture in getattr(item, "fixturenames", ()):
                item.add_marker(mark)
        if "real" in (parameters.get("broker_client"), parameters.get("broker_kind")):
            item.add_marker("real_broker")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """A failed test shows what its processes said."""
    report = yield
    if report.failed and ("processes" in item.fixturenames or item.get_closest_marker("processes")):
        report.sections += reports_of_running_tests()
    return report


@pytest.fixture(scope="session")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    """The real server of this test session (one for each xdist worker). Use `broker`, which is empty."""
    require_real_broker()
    with RealBroker(tmp_path_factory.mktemp("broker")) as server:
        yield server


@pytest.fixture
def broker(real_server: RealBroker) -> RealBroker:
    """The real server, emptied: `.url`, `.port`, `.client()`. Don't stop it: that is what `new_broker` is for."""
    real_server.reset()
    return real_server


@pytest.fixture
def new_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., RealBroker]]:
    """A factory of servers that a test may stop, kill and restart: `new_broker(maxmemory="2mb")`."""
    require_real_broker()
    started: list[RealBroker] = []

    def start(**config: str) -> RealBroker:
        started.append(RealBroker(tmp_path_factory.mktemp("own-broker"), **config).start())
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def broker_options() -> dict[str, Any]:
    """Options of the clients `fake`, `real` and `broker_client`. A module overrides it: `{"decode_responses": True}`."""
    return {}


@pytest.fixture
async def fake(broker_options: dict[str, Any]) -> AsyncIterator[redis.asyncio.Redis]:
    """An asyncio client of an in-memory broker of its own, scripts included."""
    client = fakeredis.FakeAsyncRedis(server=fakeredis.FakeServer(version=(7,)), **broker_options)
    yield client
    await client.aclose()


@pytest.fixture
async def real(broker: RealBroker, broker_options: dict[str, Any]) -> AsyncIterator[redis.asyncio.Redis]:
    """An asyncio client of the real server, emptied. It never repeats a command by itself."""
    client = redis.asyncio.Redis.from_url(broker.url, **(plain_options(AsyncRetry) | broker_options))
    yield client
    await client.aclose()


@pytest.fixture(params=["fake", "real"])
def broker_client(request: pytest.FixtureRequest) -> redis.asyncio.Redis:
    """The same test over both kinds of broker, as `[fake]` and `[real]`."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def relay(broker: RealBroker) -> Iterator[Relay]:
    """A relay in front of `broker`: connect to `relay.url`, then `relay.drop_reply(b"EVALSHA", nth=2)`."""
    with Relay(broker.port) as running:
        yield running


@pytest.fixture
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Starts real processes and ends them after the test: `processes.script("worldline", "host", env=...)`."""
    harness = Processes(tmp_path_factory.mktemp("processes"))
    yield harness
    harness.end()
