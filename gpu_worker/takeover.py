"""What a start of a worker finds of an earlier one, and what it tells the sessions. Nothing of it is resident any more.

First every request that the earlier start took and did not finish is answered: a tick may have run halfway, so it is
never run again; a reset or release has come true by the restart. Only then is the start announced, and only to
sessions that have nothing in flight here, because those get an answer of their own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from contracts.errors import CorruptDataError, InvalidArgumentError, TickFailedError
from contracts.messages import Kind, Notice, NoticeKind, WorkerReply, WorkerRequest
from contracts.request_stream import Delivery
from contracts.reservation import Reservation
from contracts.worker_link import WorkerLink
from gpu_worker.ledger import Ledger, Verdict
from gpu_worker.requests import Outgoing, read_request, salvage

LEFT_AT_ONCE: Final = 16

log = structlog.get_logger(__name__)


def reply_after_restart(request: WorkerRequest, incarnation: str) -> WorkerReply:
    """The answer to a request that an earlier start of the worker had in hand."""
    error = None
    if request.kind is Kind.TICK:
        error = TickFailedError("the worker was restarted with this tick in hand", code="worker_restarted")
    return WorkerReply(
        request.session_id, request.request_id, request.fence, request.life, incarnation, error=error
    )


Partitions = Callable[[], Awaitable[int]]
"""Asked only when there is somebody to write to: before the first host nobody knows the number."""


async def answer_left_requests(link: WorkerLink, ledger: Ledger, partitions: Partitions) -> int:
    """Answers and finishes what is pending of an earlier start; returns how many answers went out."""
    answered = 0
    while entries := await link.requests.read_own(LEFT_AT_ONCE):
        for delivery in entries:
            answer = await _answer_left(link, ledger, delivery)
            if answer is not None:
                reply_to = answer.reply_to or link.inbox_of(answer.reply.session_id, await partitions())
                await link.send_reply(reply_to, answer.reply)
                answered += 1
            link.requests.finish(delivery.entry_id)
    await link.requests.flush()
    return answered


async def _answer_left(link: WorkerLink, ledger: Ledger, delivery: Delivery) -> Outgoing | None:
    if not delivery.fields:
        log.warning("a request was deleted unanswered", entry_id=delivery.entry_id.decode())
        return None
    try:
        request = read_request(delivery.fields)
    except InvalidArgumentError as error:
        log.warning("a request is malformed", entry_id=delivery.entry_id.decode(), error=error.message)
        return salvage(delivery.fields, error, link.incarnation)
    if ledger.admit(request) is Verdict.DROP:
        return None
    reply = reply_after_restart(request, link.incarnation)
    ledger.record(reply)
    if request.kind is Kind.RELEASE:
        await link.unreserve(request.session_id, request.life)
    return Outgoing(request.reply_to, reply)


async def announce(link: WorkerLink, partitions: Partitions) -> int:
    """Tells every session that has room here, and nothing in flight, that its memory is lost; returns how many."""
    told = 0
    for session_id, reservation in (await link.reservations()).items():
        if not isinstance(reservation, Reservation):
            log.warning("a reservation can't be read", session_id=session_id, error=reservation.message)
            continue
        if await _waits_for_an_answer(link, session_id):
            continue
        notice = Notice(
            NoticeKind.WORKER_LOST,
            session_id,
            link.worker_id,
            reservation.life,
            link.incarnation,
            "the worker was restarted",
        )
        await link.send_notice(notice, await partitions())
        told += 1
    return told


async def _waits_for_an_answer(link: WorkerLink, session_id: str) -> bool:
    try:
        return await link.inflight(session_id) is not None
    except CorruptDataError as error:
        log.warning("a state can't be read", session_id=session_id, error=error.message)
        return False
