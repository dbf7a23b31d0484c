"""The same nothing as a job of rq: enqueued here, run by a worker process, its result awaited here.

Run as a program this is the worker: `python rq_jobs.py URL simple|forking`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import redis
import rq
from rq.serializers import JSONSerializer

from stacks import FOLDER, environment, process

WORKERS = {"simple": rq.SimpleWorker, "forking": rq.Worker}
RESULT_WAIT_S = 10


def nothing() -> int:
    """The job."""
    return 0


class Jobs:
    """The side that waits."""

    def __init__(self, url: str, kind: str) -> None:
        self._queue = rq.Queue(
            f"bench-{kind}", connection=redis.Redis.from_url(url), serializer=JSONSerializer
        )

    def run_one(self) -> None:
        """One job, there and back."""
        # By its name in a module of the worker's, which is not this program's.
        job = self._queue.enqueue("rq_jobs.nothing")
        result = job.latest_result(timeout=RESULT_WAIT_S)
        assert result is not None
        assert result.type is result.Type.SUCCESSFUL


@contextlib.contextmanager
def jobs(url: str, kind: str) -> Iterator[Jobs]:
    """A worker of that kind, and the queue that it works on."""
    with process(f"rq {kind}", sys.executable, str(FOLDER / "rq_jobs.py"), url, kind, env=environment()):
        yield Jobs(url, kind)


def main() -> None:
    url, kind = sys.argv[1:]
    queue = rq.Queue(f"bench-{kind}", connection=redis.Redis.from_url(url), serializer=JSONSerializer)
    worker = WORKERS[kind]([queue], connection=queue.connection, serializer=JSONSerializer)
    print("ready", flush=True)
    worker.work(logging_level="WARNING")


if __name__ == "__main__":
    main()
