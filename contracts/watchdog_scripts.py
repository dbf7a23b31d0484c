"""The scripts of a worker's watchdog: what is in the worker's hand, and the answer in its stead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from contracts.broker import is_cluster, map_exceptions
from contracts.keys import WORKER_GROUP
from contracts.scripts import Argument, ScriptRunner
from contracts.worker_scripts import WorkerScripts


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
        own, who = [keys.info, keys.requests], (incarnation, WORKER_GROUP, worker_id, entry_id)
        if inbox and await is_cluster(self.client):
            # The inbox lies on another slot, so it is answered before the request is taken out of the stream: if nothing
            # comes after it, the worker's next start answers once more, and nobody waits for that.
            outcome = await self._time_out(own, (*who, ""))
            if outcome is not TimeOut.TIMED_OUT:
                return outcome
            await WorkerScripts(self.client, self.keys).add_to_inbox(inbox, "reply", reply)
            return await self._time_out(own, (*who, reply))
        return await self._time_out([*own, inbox] if inbox else own, (*who, reply))

    async def _time_out(self, keys: Sequence[str], args: Sequence[Argument]) -> TimeOut:
        outcome, *_ = await self.run("worker_time_out", keys, args)
        return TimeOut(outcome)
