import pytest
import redis.asyncio

from support.script_world import World


@pytest.fixture
def world(broker_client: redis.asyncio.Redis) -> World:
    """A session id with no session yet, over both kinds of broker."""
    return World(broker_client)
