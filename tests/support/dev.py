"""A running `worldline dev`, for tests of the whole."""

import re
from dataclasses import dataclass, field
from pathlib import Path

import redis

from support.broker import plain_options, wait_until
from support.processes import Process, Processes

START_S = 60.0


@dataclass
class Dev:
    """The supervisor's process, its data directory and its broker."""

    process: Process
    data_dir: Path
    url: str
    harness: Processes
    commands: int = field(default=0, init=False)

    def client(self) -> redis.Redis:
        """A client of its broker. The caller closes it."""
        return redis.Redis.from_url(self.url, **plain_options())

    def cli(self, *arguments: str, status: int = 0) -> Process:
        """Runs `worldline ARGUMENTS` against it to its end."""
        done = self.harness.script("worldline", *arguments, env={"REDIS_URL": self.url})
        assert done.wait(timeout=60) == status, done.report()
        return done

    def children(self) -> dict[str, int]:
        """Pids of its children by what they are, once all of them run."""
        return wait_until(
            lambda: self._children() if len(self._children()) == 4 else None, what="four children"
        )

    def log(self, name: str) -> str:
        return (self.data_dir / "logs" / f"{name}.log").read_text(errors="replace")

    def _children(self) -> dict[str, int]:
        names = {
            "valkey-server": "broker",
            "cli host": "host",
            "cli janitor": "janitor",
            "gpu_worker": "worker",
        }
        found: dict[str, int] = {}
        for pid in self.process.children():
            line = command_line(pid)
            found |= {name: pid for mark, name in names.items() if mark in line and "tether" not in line}
        return found


def start_dev(harness: Processes, data_dir: Path, *arguments: str) -> Dev:
    """Starts `worldline dev` and waits until it is ready."""
    process = harness.script("worldline", "dev", "--data-dir", str(data_dir), *arguments, cwd=data_dir.parent)
    url = process.wait_for_line(r"^REDIS_URL=(redis://127\.0\.0\.1:\d+/0)$", timeout=START_S).group(1)
    process.wait_for_line(r"^ready$", timeout=START_S)
    return Dev(process, data_dir, url, harness)


def command_line(pid: int) -> str:
    """The command line of a process; empty when there is none, or only its remains."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def port_of(url: str) -> str:
    match = re.search(r":(\d+)/", url)
    assert match is not None
    return match[1]
