"""The worker's name: whether its holder still lives, and how it is kept.

One live process holds a name. It renews it every heartbeat; a holder that was silent for five of them has lost it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

from contracts.errors import BrokerError, WorldlineError

log = structlog.get_logger(__name__)


class NameTakenError(WorldlineError, RuntimeError):
    """Raised when another live process holds the worker's name."""

    code = "name_taken"


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Which process holds a name.

    Args:
        pid: process id, which means something only on the same machine.
        host: its name, for people.
        machine: boot and process namespace; empty where the system does not tell.
    """

    pid: int
    host: str
    machine: str

    @classmethod
    def own(cls) -> ProcessIdentity:
        return cls(os.getpid(), socket.gethostname(), _machine())

    def to_fields(self) -> dict[str, str | int]:
        """Its fields of the info hash."""
        return {"pid": self.pid, "host": self.host, "machine": self.machine}

    def knows_dead(self, holder: Mapping[str, str]) -> bool:
        """Whether the process that wrote `holder` ran on this very machine and is gone."""
        if not self.machine or holder.get("machine") != self.machine or not holder.get("pid", "").isdigit():
            return False
        pid = int(holder["pid"])
        if pid == self.pid:
            return True
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except (PermissionError, OverflowError):
            return False
        return False


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


class HolderWatch:
    """Decides at start-up whether the present holder of the name lives: only a live one is seen again.

    One that is silent is not refused for; its info expires.
    """

    def __init__(self) -> None:
        self._first: tuple[str | None, str | None] | None = None

    def lives(self, holder: Mapping[str, str]) -> bool:
        """True once the holder has renewed its name since the first look, or another has taken it."""
        if not holder:
            return False
        seen = (holder.get("incarnation"), holder.get("last_seen_ms"))
        if self._first is None:
            self._first = seen
        return seen != self._first


class Heartbeat:
    """Renews the name until cancelled.

    Args:
        renew: renews it in the broker; broker time in ms, or None when another start holds it.
        period_s: one heartbeat.
        ttl_s: how long the name outlives the last renewal.
        on_taken: called when the name is lost to another start.
    """

    def __init__(
        self,
        renew: Callable[[], Awaitable[int | None]],
        *,
        period_s: float,
        ttl_s: float,
        on_taken: Callable[[], None],
    ) -> None:
        self._renew = renew
        self._period_s = period_s
        self._ttl_s = ttl_s
        self._on_taken = on_taken
        self._renewed_s = float("-inf")
        self._renewed_at_ms = 0
        self._silent = False
        self.taken = False

    @property
    def holds(self) -> bool:
        """Whether the name is certainly ours."""
        return not self.taken and time.monotonic() - self._renewed_s < self._ttl_s

    @property
    def broker_ms(self) -> int:
        """About what the broker's clock shows now, in ms."""
        return self._renewed_at_ms + int(1000 * (time.monotonic() - self._renewed_s))

    def renewed(self, now_ms: int, since_s: float) -> None:
        """The name was renewed at `now_ms` of the broker's clock, by a call that began at `since_s`."""
        self._renewed_s, self._renewed_at_ms = since_s, now_ms

    async def beat(self) -> None:
        """Renews once; NameTakenError when another start holds the name."""
        since_s = time.monotonic()
        now_ms = await self._renew()
        if now_ms is None:
            self.taken = True
            self._on_taken()
            raise NameTakenError("another process has taken this worker's name", field="worker_id")
        self.renewed(now_ms, since_s)

    async def run(self) -> None:
        """Beats for ever; ends when the name is taken. An outage is logged once."""
        while True:
            try:
                await self.beat()
                self._silent = False
            except NameTakenError:
                return
            except WorldlineError as error:
                if not self._silent:
                    log.warning("the heartbeat failed", error=error.message)
                self._silent = isinstance(error, BrokerError)
            await asyncio.sleep(self._period_s)
