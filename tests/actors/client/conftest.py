"""A client talks to a real server; the host behind it is scripted."""

from collections.abc import AsyncIterator

import pytest

from actors.broker_pool import Broker
from support.answerer import Answerer
from support.broker import RealBroker


@pytest.fixture
async def answerer(broker: RealBroker) -> AsyncIterator[Answerer]:
    async with Answerer(broker.url) as running:
        yield running


@pytest.fixture
async def pool(broker: RealBroker) -> AsyncIterator[Broker]:
    async with Broker(broker.url, host_wait_s=0.3) as shared:
        yield shared
