"""What must hold between a session and what other slots say of it: indexes, its partition, its worker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from actors.broker_pool import Broker
from actors.invariants.finding import Finding
from actors.store import ENDING
from contracts.broker import map_exceptions
from contracts.errors import CorruptDataError
from contracts.keys import PartitionKeys
from contracts.lifecycle import Status
from contracts.reservation import Reservation
from contracts.state import SessionState

_LEFT_OVER_MS: Final = 180_000
"""A reservation is younger than this where a session is just being placed, or its worker is about to drop it."""


@dataclass(frozen=True, slots=True)
class Mentions:
    """Where a session is mentioned outside its own keys.

    Args:
        scores: score in each status index that lists it.
        due: score in the tombstone index.
        live: whether the next owner of its partition adopts it unasked.
        lease_epoch: of its partition, as of a moment after its state was read.
        reservation: on the worker that its state names.
    """

    scores: dict[Status, float]
    due: float | None
    live: bool
    lease_epoch: int | None
    reservation: Reservation | None


async def read_mentions(
    broker: Broker, session_id: str, worker: str | None, partition: PartitionKeys
) -> Mentions:
    """Reads them; on a live system they may be a moment apart."""
    keys = broker.keys
    pipeline = broker.commands.pipeline(transaction=False)
    for status in Status:
        pipeline.zscore(keys.index(status), session_id)
    pipeline.zscore(keys.tombstones, session_id)
    pipeline.sismember(partition.live, session_id)
    pipeline.hget(partition.lease, "epoch")
    pipeline.hget(keys.worker(worker or "-").sessions, session_id)
    with map_exceptions("indexes"):
        replies: list[Any] = await pipeline.execute(raise_on_error=False)
    *scores, due, live, epoch, reservation = (
        None if isinstance(reply, Exception) else reply for reply in replies
    )
    listed = {status: score for status, score in zip(Status, scores, strict=True) if score is not None}
    return Mentions(
        listed,
        due,
        bool(live),
        int(epoch) if epoch and epoch.isdigit() else None,
        _reservation(reservation, session_id),
    )


def _reservation(text: bytes | None, session_id: str) -> Reservation | None:
    try:
        return None if text is None else Reservation.from_json(text, session_id)
    except CorruptDataError:  # told where the worker's reservations are looked at
        return None


def check_indexes(broker: Broker, state: SessionState, mentions: Mentions) -> Iterator[Finding]:
    """It is in the index of its status and in no other, and in the tombstone index while it is being ended."""
    session_id, status = state.session_id, state.status
    if status not in mentions.scores:
        yield Finding("index_missing", broker.keys.index(status), f"{session_id} is {status} and not listed")
    for listed in mentions.scores:
        if listed is not status:
            yield Finding("index_wrong", broker.keys.index(listed), f"lists {session_id}, which is {status}")
    if status in ENDING and mentions.due is None:
        text = f"{session_id} is {status}, but no retry is due"
        yield Finding("tombstone_missing", broker.keys.tombstones, text)
    if status not in ENDING and mentions.due is not None:
        yield Finding("tombstone_left", broker.keys.tombstones, f"lists {session_id}, which is {status}")


def check_gone(
    broker: Broker, session_id: str, mentions: Mentions, partition: PartitionKeys
) -> Iterator[Finding]:
    """A session without state is mentioned nowhere."""
    for listed in mentions.scores:
        yield Finding("index_without_state", broker.keys.index(listed), f"lists {session_id}, which is gone")
    if mentions.due is not None:
        yield Finding("tombstone_left", broker.keys.tombstones, f"lists {session_id}, which is gone")
    if mentions.live:
        yield Finding("live_left", partition.live, f"lists {session_id}, which is gone")


def check_owner(state: SessionState, mentions: Mentions, partition: PartitionKeys) -> Iterator[Finding]:
    """No session is ahead of its partition's lease, and who needs an owner at all times is live."""
    if mentions.lease_epoch is not None and state.epoch > mentions.lease_epoch:
        text = f"{state.session_id} has epoch {state.epoch}, its partition {mentions.lease_epoch}"
        yield Finding("epoch_ahead", partition.lease, text)
    timed = bool(state.presence_ms or state.idle_ms)
    wanted = state.status is not Status.CLOSED and (state.pace_ms is not None or timed)
    if wanted and not mentions.live:
        text = f"{state.session_id} runs free or has a limit, but no owner would adopt it"
        yield Finding("live_missing", partition.live, text)
    if mentions.live and state.status is Status.CLOSED:
        yield Finding("live_left", partition.live, f"lists {state.session_id}, which is CLOSED")


def check_room(broker: Broker, state: SessionState, mentions: Mentions) -> Iterator[Finding]:
    """A session that runs has its room on its worker, under its life or the one that a reset begins."""
    if state.status is not Status.ACTIVE or state.worker is None:
        return
    key, reserved = broker.keys.worker(state.worker).sessions, mentions.reservation
    lives = {state.life} if state.inflight is None else {state.life, state.inflight.life}
    if reserved is None:
        yield Finding("no_room", key, f"{state.session_id} is placed there without a reservation")
    elif reserved.life not in lives:
        yield Finding("room_of_another", key, f"{state.session_id} has room for life {reserved.life}")


def is_left_over(reserved: Reservation, worker: str, state: SessionState | None, now_ms: int) -> bool:
    """Whether a reservation is old and its session is gone, CLOSED or placed elsewhere."""
    in_use = state is not None and state.status is not Status.CLOSED and state.worker == worker
    return not in_use and now_ms - reserved.reserved_at_ms > _LEFT_OVER_MS
