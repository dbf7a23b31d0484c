"""A process of the worker that dies is noticed, whatever the others wait for."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from support.processes import base_env
from support.tree import REPOSITORY

LIVES = [sys.executable, "-c", "import time; time.sleep(60)"]

WATCHES = """
import os, sys, threading, time
from gpu_worker.parallel.watch import Watch

if "without-descriptors" in sys.argv:
    def refuse(_pid):
        raise OSError("not on this system")
    os.pidfd_open = refuse

looked = threading.Event()
watch = Watch({int(sys.argv[1]): "rank 1", os.getppid(): "the launcher"}, looked.set)
assert looked.wait(10)
if "stops" in sys.argv:
    watch.stop()
print("watching", flush=True)
sys.stdin.readline()
time.sleep(0.5 if "stops" in sys.argv else 10)
"""


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(LIVES)
    yield process
    process.kill()
    process.wait()


def watching(pid: int, *how: str) -> subprocess.Popen[str]:
    """A process that watches another and this one, and for the rest waits."""
    command = [sys.executable, "-c", WATCHES, str(pid), *how]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=base_env(), cwd=REPOSITORY
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "watching\n"
    return process


@pytest.mark.parametrize("how", [(), ("without-descriptors",)])
def test_the_end_of_another_process_ends_this_one(
    other: subprocess.Popen[bytes], how: tuple[str, ...]
) -> None:
    watcher = watching(other.pid, *how)

    other.kill()
    other.wait()

    _, stderr = watcher.communicate("go on\n", timeout=8)
    assert watcher.returncode == 70
    assert stderr == "error: rank 1 is gone: this worker ends\n"


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this system has no process descriptors")
def test_a_process_that_nobody_has_waited_for_yet_is_gone_as_well(other: subprocess.Popen[bytes]) -> None:
    watcher = watching(other.pid)

    other.kill()  # a zombie from now on

    watcher.communicate("go on\n", timeout=8)
    assert watcher.returncode == 70


def test_after_a_watch_was_stopped_others_may_go(other: subprocess.Popen[bytes]) -> None:
    watcher = watching(other.pid, "stops")

    other.kill()
    other.wait()

    _, stderr = watcher.communicate("go on\n", timeout=8)
    assert (watcher.returncode, stderr) == (0, "")
