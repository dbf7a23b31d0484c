"""Hosts and workers as real processes on one broker, under a prefix of their own, and clients of them.

stack = Stack(forker, broker.url, "a", WORLDLINE_PARTITIONS="1")
host, worker = stack.host("first"), stack.worker()
await ready(host)
"""

import asyncio
import contextlib
import json
from collections.abc import Sequence
from typing import Any

from actors.broker_pool import Broker
from actors.client import SessionClient
from actors.config import ClientSettings
from contracts.events import controls_from_json
from contracts.tick import ARDiffusionTickRequest
from support.forker import Forker
from support.noop_engine import expected_digest
from support.processes import Process

LEASE_MS = 1_000
WORKER_LOST_AFTER_MS = 3_000
PATIENCE_S = 30.0

SETTINGS = {
    "WORLDLINE_LEASE_MS": str(LEASE_MS),
    "WORLDLINE_WORKER_LOST_AFTER_MS": str(WORKER_LOST_AFTER_MS),
    "WORLDLINE_HEARTBEAT_MS": "200",
    "WORLDLINE_BLOCK_MS": "300",
    "WORLDLINE_RECONCILE_MS": "500",
    "WORLDLINE_CLOSE_RETRY_FIRST_MS": "300",
}


class Stack:
    """The processes of one test and its connections.

    Args:
        forker: starts the processes.
        url: the broker.
        prefix: of all keys.
        settings: environment beside SETTINGS.
    """

    def __init__(self, forker: Forker, url: str, prefix: str, **settings: str) -> None:
        self._forker = forker
        self._env = SETTINGS | {"REDIS_URL": url, "WORLDLINE_PREFIX": prefix} | settings
        self.prefix = prefix
        self.started: list[Process] = []
        client = ClientSettings(redis_url=url, prefix=prefix, lease_ms=LEASE_MS, block_ms=300)  # type: ignore[call-arg]
        self.broker = Broker(settings=client, host_wait_s=PATIENCE_S)

    def host(self, name: str, armed: str = "", **env: str) -> Process:
        """A host of that id, with failpoints armed."""
        return self._start("worldline", "host", "--host-id", name, name=name, armed=armed, env=env)

    def worker(self, armed: str = "", name: str = "gpu-0", **env: str) -> Process:
        """A worker that serves the model `noop`."""
        command = ("--engine", "support.noop_engine:make", "--model", "noop", "--id", name)
        return self._start("worldline-worker", *command, name=name, armed=armed, env=env)

    def janitor(self) -> Process:
        return self._start("worldline", "janitor", name="janitor", armed="", env={})

    def _start(self, *command: str, name: str, armed: str, env: dict[str, str]) -> Process:
        env = self._env | {"WORLDLINE_FAILPOINTS": armed} | env
        self.started.append(self._forker.start(*command, name=f"{self.prefix}-{name}", env=env))
        return self.started[-1]

    def session(self, session_id: str) -> SessionClient:
        return SessionClient(session_id, self.broker, timeout_s=PATIENCE_S)

    async def read(self, session_id: str, stream: str) -> list[dict[str, str]]:
        """A whole stream of a session."""
        entries: Any = await self.broker.commands.xrange(
            getattr(self.broker.keys.session(session_id), stream)
        )
        return [{k.decode(): v.decode() for k, v in fields.items()} for _, fields in entries]

    async def end(self) -> None:
        """Kills what still runs."""
        for process in self.started:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await self.broker.aclose()

    def report(self) -> str:
        return "\n".join(process.report() for process in self.started)


def digest_of(ticks: Sequence[dict[str, str]], seed: int) -> bytes:
    """What the last of these entries of a `ticks` stream yields in a session of that seed."""
    requests = [
        ARDiffusionTickRequest(
            session_id="any",
            request_id=tick["request_id"],
            chunk_index=int(tick["chunk_index"]),
            applied_event_ids=tuple(json.loads(tick["applied_event_ids"])),
            prompt=tick.get("prompt"),
            controls=controls_from_json(tick["controls"]),
        )
        for tick in ticks
    ]
    return expected_digest(seed, *requests)


async def ready(process: Process, *, or_fault: bool = False) -> None:
    """Waits until it serves; one that is armed may meet its fault before it says so."""
    if or_fault:
        await until(
            lambda: "ready " in process.stdout or "failpoint " in process.stderr, f"{process} is ready"
        )
        return
    await asyncio.to_thread(process.wait_for_line, "^ready ", timeout=PATIENCE_S)


async def until(condition: Any, what: str) -> None:
    """Waits until `condition()`, which may be a coroutine function, is true."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                holds = condition()
                if await holds if asyncio.iscoroutine(holds) else holds:
                    return
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"it did not come true that {what}") from None
