"""Runs a command that ends when its starter ends, however that happens: `python tether.py PARENT_PID COMMAND...`.

On Linux the kernel kills the command together with the parent, and this process becomes the command. Elsewhere this
process stays between the two and watches. It imports nothing of ours, so that it starts at once.
"""

import os
import signal
import subprocess
import sys
from types import FrameType

PR_SET_PDEATHSIG = 1
POLL_S = 0.2


def main() -> int:
    """Becomes or runs the command; the exit status is the command's."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if os.uname().sysname == "Linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the kernel was told
            return 1
        os.execv(command[0], command)  # noqa: S606 -- what the starter asked for, no shell in between
    return watch(parent, command)


def watch(parent: int, command: list[str]) -> int:
    """Runs the command as a child, passes signals on to it, and kills it once the parent is gone."""
    child = subprocess.Popen(command)

    def pass_on(number: int, _frame: FrameType | None) -> None:
        child.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    while True:
        try:
            status = child.wait(POLL_S)
        except subprocess.TimeoutExpired:
            if os.getppid() == parent:
                continue
            child.kill()
            return 1
        return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
