"""The janitor's job queue: an rq worker and its scheduler, both in this process.

A job makes a close retry happen at its time; it holds no truth, which is in the tombstone index. Neither the worker nor
the scheduler forks: a child would share the parent's connections. Jobs are JSON, so nobody who can write to the queue
can make us unpickle anything.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from types import FrameType
from typing import Any, Final

import redis
import structlog
from redis.backoff import NoBackoff
from redis.retry import Retry
from rq import Queue, SimpleWorker
from rq.exceptions import DuplicateJobError, StopRequested
from rq.scheduler import RQScheduler
from rq.serializers import JSONSerializer

from actors.broker_pool import Broker
from actors.config import JanitorSettings
from actors.janitor.closes import CloseJob, run_close
from contracts.broker import CONNECT_TIMEOUT_S
from contracts.config import load_settings

JOB_LIMIT_S: Final = 20
_COMMAND_TIMEOUT_S: Final = 2.0
_WORKER_TTL_S: Final = 30
_RETRY_S: Final = 1.0
_LONGEST_RETRY_S: Final = 15.0


def close_session(session_id: str, life: str, attempt: int) -> str:
    """The job: sends one close retry, and returns what became of it."""
    return asyncio.run(_close(load_settings(JanitorSettings), CloseJob(session_id, life, attempt)))


async def _close(settings: JanitorSettings, job: CloseJob) -> str:
    async with Broker(settings=settings) as broker:
        return await run_close(broker, job)


def jobs_client(settings: JanitorSettings) -> redis.Redis:
    """A synchronous client of the broker for jobs; it connects soon or not at all."""
    return redis.Redis.from_url(
        settings.jobs_broker_url,
        protocol=2,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        socket_timeout=_COMMAND_TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
    )


class JobQueue:
    """Where retries are put. Its methods block: call them in a thread."""

    def __init__(self, settings: JanitorSettings) -> None:
        self._client = jobs_client(settings)
        self._queue = Queue(settings.keys.jobs_queue, connection=self._client, serializer=JSONSerializer)
        # As long as a job is remembered no second one of its id is taken, so a retry goes out once a period at most.
        self._remembered_s = math.ceil(settings.reconcile_ms / 1000)
        self._log = structlog.get_logger("jobs")

    async def enqueue(self, job: CloseJob, wait_ms: int) -> bool:
        """Puts a retry on the queue, to be run in `wait_ms`; False where the queue can't be reached."""
        return await asyncio.to_thread(self._enqueue, job, wait_ms)

    def _enqueue(self, job: CloseJob, wait_ms: int) -> bool:
        options: dict[str, Any] = {
            "job_id": job.job_id,
            "unique": True,
            "job_timeout": JOB_LIMIT_S,
            "result_ttl": self._remembered_s,
            "failure_ttl": self._remembered_s,
            "description": f"close {job.session_id}, attempt {job.attempt}",
        }
        args = (job.session_id, job.life, job.attempt)
        try:
            if wait_ms > 0:
                self._queue.enqueue_in(timedelta(milliseconds=wait_ms), close_session, *args, **options)
            else:
                self._queue.enqueue(close_session, *args, **options)
        except DuplicateJobError:
            return True
        except redis.RedisError as error:
            self._log.warning("job queue does not answer", error=str(error))
            return False
        return True

    def close(self) -> None:
        self._client.close()


class _Worker(SimpleWorker):
    """Runs jobs in this process; tells us when it is told to stop."""

    max_connection_wait_time = 2.0
    stop = threading.Event()

    def _install_signal_handlers(self) -> None:
        super()._install_signal_handlers()  # type: ignore[no-untyped-call]
        if self.stop.is_set():  # the signal came before the worker could hear it
            raise StopRequested

    def request_stop(self, signum: int, frame: FrameType | None) -> None:
        self.stop.set()
        super().request_stop(signum, frame)  # type: ignore[no-untyped-call]


class _Scheduler(RQScheduler):
    """Moves jobs that are due to the queue, in a thread; signals are for the main thread."""

    def _install_signal_handlers(self) -> None:
        return


class JobRunner:
    """The worker in the main thread, as it needs signals, and the scheduler beside it.

    Args:
        settings: where jobs are.
        stop: ends it; set by SIGTERM and SIGINT as well.
        scheduler: whether to run a scheduler; several janitors may, one at a time holds its lock.
    """

    def __init__(self, settings: JanitorSettings, stop: threading.Event, *, scheduler: bool = True) -> None:
        self._settings = settings
        self._stop = stop
        self._with_scheduler = scheduler
        self._scheduler: _Scheduler | None = None
        self._log = structlog.get_logger("jobs")

    def run(self) -> None:
        """Works until told to stop; what fails is started again."""
        thread = threading.Thread(target=self._schedule, name="scheduler", daemon=True)
        if self._with_scheduler:
            thread.start()
        for pause_s in self._pauses():
            self._take_signals()
            try:
                self._work()
            except StopRequested:
                break
            except redis.RedisError as error:
                self._log.warning("job queue does not answer", error=str(error), next_try_s=pause_s)
            self._take_signals()
        if self._scheduler is not None:
            self._scheduler.request_stop()  # type: ignore[no-untyped-call]
            thread.join(3 * _RETRY_S)

    def _work(self) -> None:
        name = f"{self._settings.janitor_id}-{secrets.token_hex(4)}"
        client = jobs_client(self._settings)
        try:
            worker = _Worker(
                [self._settings.keys.jobs_queue],
                name=name,
                connection=client,
                serializer=JSONSerializer,
                worker_ttl=_WORKER_TTL_S,
            )
            worker.stop = self._stop
            worker.work(logging_level="WARNING")
        finally:
            client.close()

    def _schedule(self) -> None:
        for pause_s in self._pauses():
            client = jobs_client(self._settings)
            try:
                self._scheduler = _Scheduler(
                    [self._settings.keys.jobs_queue],
                    connection=client,
                    logging_level="WARNING",
                    serializer=JSONSerializer,
                )
                self._scheduler.work()  # type: ignore[no-untyped-call]
            except redis.RedisError as error:
                self._log.warning(
                    "no scheduler: job queue does not answer", error=str(error), next_try_s=pause_s
                )
            finally:
                client.close()

    def _pauses(self) -> Iterator[float]:
        """One number a try, each waited for before the next; longer and longer unless the try itself lasted."""
        pause_s = _RETRY_S
        while not self._stop.is_set():
            started = time.monotonic()
            yield pause_s
            lasted = time.monotonic() - started > 2 * _LONGEST_RETRY_S
            self._stop.wait(pause_s)
            pause_s = _RETRY_S if lasted else min(_LONGEST_RETRY_S, pause_s * 2)

    def _take_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop.set())


def scheduler_is_alive(settings: JanitorSettings) -> bool:
    """Whether a scheduler holds the lock of the queue: without one, what is to run later never runs."""
    client = jobs_client(settings)
    try:
        return bool(client.exists(RQScheduler.get_locking_key(settings.keys.jobs_queue)))
    finally:
        client.close()
