"""Looks after the other processes of a worker: one that dies ends them all, and whoever supervises them starts anew.

A rank that waits for another in a collective can't notice by itself that it waits for ever. So this thread does.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Final, NoReturn

POLL_S: Final = 0.1
EXIT_STATUS: Final = 70
"""What a process ends with that has lost its group: its memory is of no use without that of the others."""


def end_process(why: str) -> NoReturn:
    """Ends this process at once, from whatever thread."""
    sys.stdout.flush()
    sys.stderr.write(f"error: {why}: this worker ends\n")
    sys.stderr.flush()
    os._exit(EXIT_STATUS)


class Watch:
    """Polls until it is told to stop.

    Args:
        processes: what each is called, by process id; they must be alive now.
        look: called at each turn.
    """

    def __init__(self, processes: Mapping[int, str], look: Callable[[], None]) -> None:
        self._opened = {_open(pid): (pid, name) for pid, name in processes.items()}
        self._look = look
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """From now on the others may go."""
        self._stopping.set()
        self._thread.join()
        for descriptor in self._opened:
            if descriptor >= 0:
                os.close(descriptor)

    def _run(self) -> None:
        while not self._stopping.wait(POLL_S):
            gone = self._gone()
            if gone and not self._stopping.is_set():
                end_process(f"{' and '.join(gone)} is gone")
            self._look()

    def _gone(self) -> list[str]:
        descriptors = [descriptor for descriptor in self._opened if descriptor >= 0]
        ended = select.select(descriptors, [], [], 0)[0]
        return [
            name
            for descriptor, (pid, name) in self._opened.items()
            if descriptor in ended or (descriptor < 0 and not _exists(pid))
        ]


def _open(pid: int) -> int:
    """A descriptor that becomes readable when the process ends; below 0 where the system has none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -pid


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
