"""Which process holds a worker's name, and whether it still lives."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


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
