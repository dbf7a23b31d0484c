"""A host that can't renew its leases lets go of everything by itself, and takes it up again when it can."""

import asyncio
from collections.abc import Callable

from actors.host import Host
from support.broker import RealBroker
from support.hosting import running_host


async def owns(host: Host, count: int) -> None:
    async with asyncio.timeout(10):
        while len(host.owned) != count:
            await asyncio.sleep(0.02)


async def test_a_host_drops_what_it_can_not_renew_without_being_told(
    new_broker: Callable[..., RealBroker],
) -> None:
    broker = new_broker()
    async with running_host(broker.url, lease_ms=600) as host:
        partitions = list(host.owned.values())
        await asyncio.to_thread(broker.stop)

        await owns(host, 0)
        assert all(partition._stopped for partition in partitions)

        await asyncio.to_thread(broker.start)
        await owns(host, 8)
        assert not set(map(id, partitions)) & set(map(id, host.owned.values()))
