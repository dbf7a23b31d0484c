"""The invariants, checked on live keys: nothing is stopped, nothing is written, nothing scans the key space.

Sessions are found through the indexes, the partitions' live sets and the workers' reservations. What lies on several
slots may for a moment disagree while a host is working, so what is found is looked at once more after a pause, and only
what was found both times is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from itertools import chain
from typing import Final

from actors.broker_pool import Broker
from actors.index_pages import index_pages
from actors.invariants import index_checks, places, state_checks, stream_checks
from actors.invariants.finding import Finding
from actors.invariants.snapshot import Snapshot, read_snapshot
from actors.janitor.indexes import live_pages
from actors.store import SessionStore
from contracts.errors import CorruptDataError, InvalidArgumentError
from contracts.identity import check_session_id, partition_of
from contracts.lifecycle import Status
from contracts.reservation import Reservation
from contracts.state import SessionState

SETTLE_S: Final = 1.0

__all__ = ["SETTLE_S", "Finding", "check_all"]


async def check_all(
    broker: Broker,
    *,
    closed_retention_ms: int = 3_600_000,
    reconcile_ms: int = 30_000,
    settle_s: float = SETTLE_S,
) -> list[Finding]:
    """Everything that is wrong, sorted by key and code.

    Args:
        broker: its connections.
        closed_retention_ms: how long the hosts keep a CLOSED session.
        reconcile_ms: how often the janitor takes expired sessions out of the index.
        settle_s: how long a disagreement must last.
    """
    found = await _Pass(broker, closed_retention_ms, reconcile_ms).run()
    if not found:
        return []
    await asyncio.sleep(settle_s)
    lasting = {_identity(finding) for finding in found}
    again = await _Pass(broker, closed_retention_ms, reconcile_ms).run()
    return sorted(
        (finding for finding in again if _identity(finding) in lasting),
        key=lambda finding: (finding.key, finding.code, finding.message),
    )


def _identity(finding: Finding) -> tuple[str, str, str | None]:
    """What makes two findings the same: on a busy session their messages differ."""
    return finding.code, finding.key, finding.session_id


class _Pass:
    """One look at everything."""

    def __init__(self, broker: Broker, retention_ms: int, period_ms: int) -> None:
        self._broker = broker
        self._retention_ms = retention_ms
        self._period_ms = period_ms
        self._now_ms = 0
        self._partitions = 0
        self._found: list[Finding] = []
        self._unreadable: set[str] = set()
        self._seen: set[str] = set()

    async def run(self) -> list[Finding]:
        broker = self._broker
        self._now_ms = await SessionStore(broker.commands, broker.keys).now_ms()
        self._tell(await places.check_config(broker))
        if not self._found:
            self._partitions = await broker.partitions() or 0
        self._tell(await places.wrong_types(broker, places.global_keys(broker)))
        self._tell(await places.check_partitions(broker, self._partitions))
        async for session_id, where in self._sessions():
            if session_id not in self._seen:
                self._seen.add(session_id)
                self._found += [
                    replace(finding, session_id=session_id)
                    async for finding in self._session(session_id, where)
                ]
        # A key of a wrong type says nothing else.
        return [f for f in self._found if f.code == "wrong_type" or f.key not in self._unreadable]

    def _tell(self, findings: list[Finding]) -> None:
        self._found += findings
        self._unreadable |= {finding.key for finding in findings if finding.code == "wrong_type"}

    async def _sessions(self) -> AsyncIterator[tuple[str, str]]:
        """Every session that is mentioned anywhere, and the key that mentions it; some come several times."""
        keys = self._broker.keys
        for index in (*(keys.index(status) for status in Status), keys.tombstones):
            if index not in self._unreadable:
                async for page in index_pages(self._broker.commands, index):
                    for session_id, _ in page:
                        yield session_id, index
        for partition in range(self._partitions):
            async for session_id in self._live(partition):
                yield session_id, keys.partition(partition).live
        async for mentioned in self._reserved():
            yield mentioned

    async def _live(self, partition: int) -> AsyncIterator[str]:
        key = self._broker.keys.partition(partition).live
        if key in self._unreadable:
            return
        async for names in live_pages(self._broker, partition):
            for session_id in names:
                if partition_of(session_id, self._partitions) != partition:
                    message = f"lists {session_id}, which belongs to another partition"
                    self._found.append(Finding("live_left", key, message, session_id))
                yield session_id

    async def _reserved(self) -> AsyncIterator[tuple[str, str]]:
        if self._broker.keys.workers in self._unreadable:
            return
        for worker_id in await places.worker_ids(self._broker):
            self._tell(await places.check_worker_types(self._broker, worker_id))
            key = self._broker.keys.worker(worker_id).sessions
            if key in self._unreadable:
                continue
            async for session_id, text in places.reservations(self._broker, worker_id):
                await self._reservation(worker_id, key, session_id, text)
                yield session_id, key

    async def _reservation(self, worker_id: str, key: str, session_id: str, text: bytes) -> None:
        try:
            reserved = Reservation.from_json(text, session_id)
            state = state_checks.read_state(await read_snapshot(self._broker, check_session_id(session_id)))
        except CorruptDataError as error:
            self._found.append(Finding("corrupt_reservation", key, error.message, session_id, corrupt=True))
            return
        except InvalidArgumentError:
            return  # told as a bad member
        if not isinstance(state, Finding) and index_checks.is_left_over(
            reserved, worker_id, state, self._now_ms
        ):
            message = f"{session_id} has room there and does not live there"
            self._found.append(Finding("room_left", key, message, session_id))

    async def _session(self, session_id: str, where: str) -> AsyncIterator[Finding]:
        try:
            check_session_id(session_id)
        except InvalidArgumentError as error:
            yield Finding("bad_member", where, error.message, corrupt=True)
            return
        snapshot = await read_snapshot(self._broker, session_id)
        for finding in state_checks.check_types(snapshot):
            yield finding
        state = state_checks.read_state(snapshot)
        if isinstance(state, Finding):
            yield state
        elif snapshot.right("state"):
            for finding in chain(_within(snapshot, state), await self._mentioned(session_id, state)):
                yield finding

    async def _mentioned(self, session_id: str, state: SessionState | None) -> list[Finding]:
        """What other slots say of a session."""
        broker, partitions = self._broker, max(1, self._partitions)
        partition = broker.keys.partition(partition_of(session_id, partitions))
        worker = None if state is None else state.worker
        mentions = await index_checks.read_mentions(broker, session_id, worker, partition)
        if state is None:
            return list(
                index_checks.check_gone(broker, session_id, self._but_just_expired(mentions), partition)
            )
        return [
            *index_checks.check_indexes(broker, state, mentions),
            *index_checks.check_room(broker, state, mentions),
            *index_checks.check_owner(state, mentions, partition),
        ]

    def _but_just_expired(self, mentions: index_checks.Mentions) -> index_checks.Mentions:
        """Without the index entry of a session whose retention has ended and that the janitor will come to."""
        closed_ms = mentions.scores.get(Status.CLOSED)
        if closed_ms is None:
            return mentions
        over_ms = self._now_ms - closed_ms - self._retention_ms
        if not -self._period_ms <= over_ms <= 3 * self._period_ms:
            return mentions
        others = dict(mentions.scores)
        del others[Status.CLOSED]
        return replace(mentions, scores=others)


def _within(snapshot: Snapshot, state: SessionState | None) -> Iterator[Finding]:
    """What the session's own keys say."""
    if state is None:
        return
    yield from state_checks.check_state(snapshot, state)
    checks = {
        ("chunks",): stream_checks.check_chunks,
        ("ids", "events"): stream_checks.check_events,
        ("history",): stream_checks.check_history,
        ("answers", "answered", "rejected"): stream_checks.check_answers,
    }
    for parts, check in checks.items():
        if all(snapshot.right(part) for part in parts):
            yield from check(snapshot, state)
