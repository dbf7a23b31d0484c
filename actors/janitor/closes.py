"""Closes that failed, tried again when they are due.

The tombstone index is the truth: its score says when the next retry is due, and the session's state says which it is.
A job on the queue makes the retry happen on time; if the queue has lost it, the index still has it a period later.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import structlog

from actors.broker_pool import Broker
from actors.close_retry import close_command_id
from actors.config import JanitorSettings
from actors.index_pages import IndexEntry, index_pages
from actors.janitor.commands import send_command
from actors.janitor.facts import Facts, read_facts
from actors.janitor.recent import Recent
from contracts.broker import map_exceptions
from contracts.commands import Command, Op
from contracts.lifecycle import Status

TICK_MS: Final = 1_000
"""Longest time between two looks at the tombstone index. A scheduler is no more exact."""


@dataclass(frozen=True, slots=True)
class CloseJob:
    """One retry: the close of one life of a session for the so-many-th time."""

    session_id: str
    life: str
    attempt: int

    @property
    def job_id(self) -> str:
        """Also the id of the command that it sends."""
        return close_command_id(self.session_id, self.life, self.attempt)


Enqueue = Callable[[CloseJob, int], Awaitable[bool]]
"""Puts a retry on the job queue, to be run in so many milliseconds; False where the queue can't be reached."""


class Closes:
    """Looks at the tombstones that are due before long.

    Args:
        broker: its connections.
        settings: the period and the limit of attempts.
        enqueue: how a retry gets onto the job queue.
    """

    def __init__(self, broker: Broker, settings: JanitorSettings, enqueue: Enqueue) -> None:
        self._broker = broker
        self._settings = settings
        self._enqueue = enqueue
        # Within a period nothing new can be done about the same due time of the same session.
        self._recent = Recent(settings.reconcile_ms)
        # A host sends a release again after this time by itself; much later nobody has the session any more.
        self._stuck_ms = settings.queue_limit_ms + settings.execution_limit_ms + settings.reconcile_ms
        self._log = structlog.get_logger("janitor")

    async def look(self, now_ms: int) -> None:
        """One pass over what is due up to a period from now."""
        horizon = now_ms + self._settings.reconcile_ms
        async for page in index_pages(self._broker.commands, self._broker.keys.tombstones, up_to=horizon):
            fresh = {entry[0]: entry for entry in page if entry not in self._recent}
            facts = await read_facts(self._broker, fresh)
            for session_id, entry in fresh.items():
                self._recent.add(entry)
                if session_id in facts:
                    await self._one(facts[session_id], entry, now_ms)
        self._recent.prune()

    async def _one(self, facts: Facts, entry: IndexEntry, now_ms: int) -> None:
        if facts.status is Status.CLOSING and facts.updated_at_ms < now_ms - self._stuck_ms:
            await send_close(self._broker, await next_close(self._broker, facts))
        if facts.status is not Status.CLEANUP_FAILED:
            return
        wait_ms = round(entry[1]) - now_ms
        job = await next_close(self._broker, facts)
        if job.attempt >= self._settings.close_attempts_limit:
            self._log.debug("close given up", session_id=job.session_id, failures=facts.failed_closes)
            return
        if 0 < wait_ms < TICK_MS:
            self._recent.discard(entry)  # the next look comes in time
            return
        on_time = wait_ms > -self._settings.reconcile_ms
        if on_time and await self._enqueue(job, max(0, wait_ms)):
            return
        if wait_ms <= 0:
            await send_close(self._broker, job)
        else:
            self._recent.discard(entry)  # the queue is away: look again when it is due


async def next_close(broker: Broker, facts: Facts) -> CloseJob:
    """The next retry of a session: the first, from its failures on, whose command has no answer yet.

    A command that was answered without a release (it was poisoned, say) would only get that answer again.
    """
    answered = broker.keys.session(facts.session_id).answered
    attempt = facts.failed_closes
    while True:
        job = CloseJob(facts.session_id, facts.life, attempt)
        with map_exceptions(answered):
            if not await broker.commands.hexists(answered, job.job_id):
                return job
        attempt += 1


async def send_close(broker: Broker, job: CloseJob) -> bool:
    """Sends the close of that life; False while no host would take it."""
    args = {"life": job.life, "reason": f"retry {job.attempt} by the janitor"}
    sent = await send_command(broker, Command(Op.CLOSE, job.session_id, job.job_id, args))
    structlog.get_logger("janitor").info("close", session_id=job.session_id, attempt=job.attempt, sent=sent)
    return sent


async def run_close(broker: Broker, job: CloseJob) -> str:
    """What a job does: sends its close if that is still the next one; says what it did."""
    facts = (await read_facts(broker, [job.session_id])).get(job.session_id)
    if facts is None or facts.status is not Status.CLEANUP_FAILED or await next_close(broker, facts) != job:
        return "overtaken"
    return "sent" if await send_close(broker, job) else "no host"
