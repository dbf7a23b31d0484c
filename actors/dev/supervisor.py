"""Starts children in order, starts again what dies, and stops all of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from actors.dev.child import Child, Program
from contracts.errors import ConfigurationError, WorldlineError

_POLL_S: Final = 0.05
_BAD_CONFIGURATION: Final = 78


class StartFailedError(WorldlineError, RuntimeError):
    """Raised when a child ended, or stayed silent, before it served; `tail` is the end of its log."""

    code = "start_failed"


class Supervisor:
    """A group of children. All calls come from one thread.

    Args:
        logs: folder of the log files.
        say: told in a line what happens to children.
    """

    def __init__(self, logs: Path, say: Callable[[str], None]) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._logs = logs
        self._say = say
        self.children: list[Child] = []

    def start(self, programs: Sequence[Program], stop: threading.Event, *, timeout_s: float) -> bool:
        """Starts programs side by side and waits until each serves; False if `stop` came first.

        Raises StartFailedError, or ConfigurationError where the child's exit status says so.
        """
        children = [Child(program, self._logs) for program in programs]
        self.children += children
        for child in children:
            child.start()
        deadline = time.monotonic() + timeout_s
        waiting = children
        while waiting := [child for child in waiting if not child.is_ready()]:
            for child in waiting:
                self._check_start(child, late=time.monotonic() > deadline)
            if stop.wait(_POLL_S):
                return False
        return True

    def watch(self, stop: threading.Event) -> None:
        """Keeps all children running until `stop` is set."""
        while not stop.wait(_POLL_S):
            for child in self.children:
                self._revive(child)

    def dead(self) -> Child | None:
        """A child that does not run, if there is one."""
        return next((child for child in self.children if not child.running), None)

    def stop(self) -> None:
        """Stops all children, the last started first: each still reaches those that it depends on."""
        for child in reversed(self.children):
            child.terminate()
            child.finish()

    def _check_start(self, child: Child, *, late: bool) -> None:
        status = child.status
        if status is None and not late:
            return
        what = "is not ready yet" if status is None else f"ended with {status}"
        for line in child.tail().splitlines():
            self._say(f"  {child.name} | {line}")
        message = f"{child.name} {what}; its log is {child.log_path}"
        if status == _BAD_CONFIGURATION:
            raise ConfigurationError(message, field=child.name)
        raise StartFailedError(message, field=child.name)

    def _revive(self, child: Child) -> None:
        if child.restart_at is None and not child.running:
            status = child.status
            pause_s = child.plan_restart()
            self._say(
                f"{child.name} ended with {status}; starting it again in {pause_s:.1f} s ({child.log_path})"
            )
        elif child.restart_at is not None and time.monotonic() >= child.restart_at:
            child.start()
