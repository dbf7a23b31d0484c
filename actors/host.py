"""The session host: claims partitions, renews their leases, and stops at once what it can no longer be sure to own."""

from __future__ import annotations

import asyncio
import math
from typing import Any, Final

import structlog

from actors.close_retry import CloseRetry
from actors.config import HostSettings
from actors.fsm import Lifecycle
from actors.partition import Partition
from actors.placement import Placement, monotonic_ms
from actors.session_core import Services
from actors.store import SessionStore
from actors.watch_workers import WorkerWatch
from contracts.broker import Client, blocking_client, command_client, is_cluster, map_exceptions
from contracts.errors import BrokerError, ConfigurationError, CorruptDataError
from contracts.index_scripts import IndexScripts
from contracts.keys import SCHEMA_VERSION
from contracts.partition_scripts import PartitionScripts
from contracts.session_scripts import Limits, SessionScripts
from contracts.worker_scripts import WorkerScripts

_RENEWALS_PER_LEASE: Final = 3
_STALE_LEASES: Final = 10
_REACH_S: Final = 1.0
_CONNECTIONS: Final = 128


class Host:
    """Owns a fair share of the partitions.

    Args:
        settings: see `HostSettings`.
    """

    def __init__(self, settings: HostSettings) -> None:
        self.settings = settings
        self.keys = settings.keys
        self.client: Client = command_client(settings.url)
        self.blocking: Client = blocking_client(
            settings.url, block_ms=settings.block_ms, max_connections=_CONNECTIONS
        )
        self.log = structlog.get_logger("host").bind(host=settings.host_id)
        self.owned: dict[int, Partition] = {}
        self.partitions = settings.partitions
        self.leases = PartitionScripts(self.client, self.keys)
        self.services = self._services()
        self._indexes = IndexScripts(self.client, self.keys)
        self._renewed_ms: dict[int, float] = {}
        self._connected_ms = monotonic_ms()
        self._watch: WorkerWatch | None = None

    def _services(self) -> Services:
        settings = self.settings
        limits = Limits(
            queue_limit_ms=settings.queue_limit_ms, closed_retention_ms=settings.closed_retention_ms
        )
        placement = Placement(
            self.client,
            self.keys,
            WorkerScripts(self.client, self.keys),
            overcommit=settings.overcommit,
            lost_after_ms=settings.worker_lost_after_ms,
            connected_for_ms=lambda: monotonic_ms() - self._connected_ms,
        )
        return Services(
            scripts=SessionScripts(self.client, self.keys, limits, by=f"host {settings.host_id}"),
            partitions=self.leases,
            store=SessionStore(self.client, self.keys),
            placement=placement,
            lifecycle=Lifecycle(),
            resend_after_ms=settings.queue_limit_ms + settings.execution_limit_ms,
            close_retry=CloseRetry(settings.close_retry_first_ms, settings.close_retry_longest_ms),
        )

    # -- start -------------------------------------------------------------------------------------------------

    async def prepare(self) -> None:
        """Checks the broker and reads, or as the first host writes, what all hosts agree on."""
        await self._reach()
        await self._check_eviction()
        self.services.scripts.cluster = await is_cluster(self.client)
        with map_exceptions(self.keys.config):
            await self.client.hsetnx(self.keys.config, "partitions", str(self.settings.partitions))
            await self.client.hsetnx(self.keys.config, "schema_version", str(SCHEMA_VERSION))
            config = await self.client.hgetall(self.keys.config)
        if int(config[b"schema_version"]) != SCHEMA_VERSION:
            raise ConfigurationError(
                f"the broker holds schema_version {int(config[b'schema_version'])}, this host writes {SCHEMA_VERSION}",
                field="schema_version",
            )
        self.partitions = int(config[b"partitions"])
        self._watch = WorkerWatch(
            self.client, self.keys, self.services.store, self.services.placement,
            partitions=self.partitions, lost_after_ms=self.settings.worker_lost_after_ms,
        )  # fmt: skip

    async def _reach(self) -> None:
        """A broker that takes connections and then is silent is told about at once, not after a command's patience."""
        probe = command_client(self.settings.url, timeout_s=_REACH_S)
        try:
            with map_exceptions("PING"):
                await probe.ping()
        finally:
            await probe.aclose()

    async def _check_eviction(self) -> None:
        """A broker that may evict keys would delete sessions; one that does not tell is believed, with a warning."""
        try:
            with map_exceptions("CONFIG GET"):
                answer: Any = await self.client.config_get("maxmemory-policy")
        except CorruptDataError as error:
            self.log.warning("the broker does not tell its eviction policy", error=str(error))
            return
        policy = str(answer.get("maxmemory-policy", answer.get(b"maxmemory-policy", "noeviction")))
        if "noeviction" not in policy:
            raise ConfigurationError(
                f"the broker's maxmemory-policy is {policy}: it may delete sessions; set it to noeviction",
                field="maxmemory-policy",
            )

    # -- the lease loop ----------------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event, *, on_ready: Any = None) -> None:
        """Owns partitions until `stop` is set, then hands them over."""
        period_s = self.settings.lease_ms / 1000 / _RENEWALS_PER_LEASE
        while not stop.is_set():
            try:
                await self._round()
                if self.owned and on_ready is not None:
                    on_ready()
                    on_ready = None
            except BrokerError as error:
                self._connected_ms = monotonic_ms()
                self.log.warning("broker does not answer", error=str(error))
            except Exception:
                self.log.exception("round failed")  # one unreadable key must not end the renewals
            await self._fence_late()
            await _wait(stop, period_s)
        await self.hand_over()

    async def _round(self) -> None:
        """One renewal of everything owned, and claims up to the fair share."""
        await self._renew()
        share = await self._share()
        # All at once: meanwhile nothing is renewed.
        await asyncio.gather(*(self._drop(index, release=True) for index in sorted(self.owned)[share:]))
        for index in range(self.partitions):
            if len(self.owned) < share and index not in self.owned:
                await self._claim(index)
        if self._watch is not None:
            await self._watch.look()

    async def _renew(self) -> None:
        lease_ms = self.settings.lease_ms
        for index, partition in list(self.owned.items()):
            started_ms = monotonic_ms()
            if await self.leases.renew(index, self.settings.host_id, partition.epoch, lease_ms):
                self._renewed_ms[index] = started_ms
            else:
                self.log.warning("lease lost", partition=index)
                await self._drop(index, release=False)

    async def _share(self) -> int:
        """How many partitions are this host's part, by the hosts that were seen within a lease."""
        now = await self.services.store.now_ms()
        hosts = self.keys.hosts
        with map_exceptions(hosts):
            await self._indexes.add(hosts, self.settings.host_id, now)
            await self.client.zremrangebyscore(hosts, "-inf", now - _STALE_LEASES * self.settings.lease_ms)
            alive = await self.client.zcount(hosts, now - self.settings.lease_ms, "+inf")
        return math.ceil(self.partitions / max(1, alive))

    async def _claim(self, index: int) -> None:
        started_ms = monotonic_ms()
        lease = await self.leases.claim(index, self.settings.host_id, self.settings.lease_ms)
        if lease is None:
            return
        partition = Partition(
            index, lease.epoch, self.services, self.keys, self.blocking,
            block_ms=self.settings.block_ms, partitions=self.partitions, on_lost=self._on_lost,
        )  # fmt: skip
        self.owned[index] = partition
        self._renewed_ms[index] = started_ms
        partition.start()
        self.log.info("partition claimed", partition=index, epoch=lease.epoch)

    async def _fence_late(self) -> None:
        """Drops what was not renewed in time, without asking: by now somebody else may own it."""
        for index in list(self.owned):
            if monotonic_ms() - self._renewed_ms[index] >= self.settings.lease_ms:
                self.log.warning("lease ran out", partition=index)
                await self._drop(index, release=False)

    def _on_lost(self, index: int) -> None:
        self._renewed_ms[index] = -math.inf

    async def _drop(self, index: int, *, release: bool) -> None:
        partition = self.owned.pop(index, None)
        if partition is None:
            return
        await partition.stop()
        if release:
            self.log.info("partition handed over", partition=index)
            await self.leases.release(index, self.settings.host_id, partition.epoch)

    async def hand_over(self) -> None:
        """Gives all partitions back at once, so that another host need not wait for the lease to run out."""
        try:
            await asyncio.gather(*(self._drop(index, release=True) for index in list(self.owned)))
            with map_exceptions(self.keys.hosts):
                await self.client.zrem(self.keys.hosts, self.settings.host_id)
        except BrokerError as error:
            self.log.warning("hand-over failed", error=str(error))
        await self.client.aclose()
        await self.blocking.aclose()


async def _wait(stop: asyncio.Event, timeout_s: float) -> None:
    try:
        await asyncio.wait_for(stop.wait(), timeout_s)
    except TimeoutError:
        return


async def run_host(settings: HostSettings, *, stop: asyncio.Event) -> None:
    """Runs a host until `stop` is set; prints `ready host=<id>` on stdout once it owns partitions.

    Raises BrokerError if the broker can't be reached at the start, ConfigurationError if it may delete state.
    """
    host = Host(settings)
    await host.prepare()
    ready = f"ready host={settings.host_id}"
    await host.run(stop, on_ready=lambda: print(ready, flush=True))  # noqa: T201 - who started it waits for it
