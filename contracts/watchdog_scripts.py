"""The scripts of a worker's watchdog: what is in the worker's hand, and the answer in its stead."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from contracts.broker import map_exceptions
from contracts.keys import WORKER_GROUP
from contracts.scripts import Argument, ScriptRunner


@dataclass(frozen=True, slots=True)
class InHand:
    """What a worker has in hand, as the broker sees it.

    Args:
        now_ms: broker time.
        holder: incarnation that holds the worker's name; empty where it has run out.
        entry_id: the request that was delivered and not acknowledged; None for an idle worker.
        busy_since_ms: broker time at which the worker began it; None where the mark is missing.
    """

    now_ms: int
    holder: str
    entry_id: str | None = None
    busy_since_ms: int | None = None


class TimeOut(StrEnum):
    """What became of the answer in a worker's stead."""

    TIMED_OUT = "TIMED_OUT"
    ANSWERED = "ANSWERED"
    """The request is not in hand any more."""

    TAKEN = "TAKEN"
    """Another start of the worker holds the name, and with it the request."""


class WatchdogScripts(ScriptRunner):
    """What a watchdog asks of the broker and tells it. Every method raises BrokerError when it does not answer."""

    async def in_hand(self, worker_id: str) -> InHand:
        """The request that the worker has in hand, and since when."""
        keys = self.keys.worker(worker_id)
        outcome, now_ms, holder, *busy = await self.run(
            "worker_in_hand", (keys.info, keys.requests), (WORKER_GROUP, worker_id)
        )
        if outcome == "IDLE":
            return InHand(int(now_ms), holder.decode())
        entry_id, since_ms = busy
        return InHand(int(now_ms), holder.decode(), entry_id.decode(), int(since_ms) if since_ms else None)

    async def entry(self, worker_id: str, entry_id: str) -> dict[bytes, bytes]:
        """The fields of a request; empty if it is gone."""
        key = self.keys.worker(worker_id).requests
        with map_exceptions(key):
            entries: Any = await self.client.xrange(key, entry_id, entry_id)
        return dict(entries[0][1]) if entries else {}

    async def time_out(
        self, worker_id: str, incarnation: str, entry_id: str, answer: tuple[str, str] | None
    ) -> TimeOut:
        """Ends a request that this start of the worker has in hand.

        Args:
            answer: inbox and reply; None leaves the request to the worker's next start.
        """
        keys = self.keys.worker(worker_id)
        inbox, reply = answer or ("", "")
        args: list[Argument] = [incarnation, WORKER_GROUP, worker_id, entry_id, reply]
        outcome, *_ = await self.run(
            "worker_time_out", [keys.info, keys.requests, *([inbox] if inbox else [])], args
        )
        return TimeOut(outcome)
