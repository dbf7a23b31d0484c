"""One request, from its entry to its reply. Runs in the engine's thread, where each call of the engine blocks."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

import structlog

from contracts import failpoints
from contracts.errors import (
    BrokerError,
    CommandExpiredError,
    CorruptDataError,
    InvalidArgumentError,
    TickFailedError,
    WorldlineError,
)
from contracts.identity import check_index, check_session_id, check_text_id
from contracts.messages import ChunkOutput, Kind, WorkerReply, WorkerRequest
from contracts.payloads import PAYLOAD_CONTENT_TYPE, Blob, PayloadStoreError
from contracts.request_stream import Delivery
from contracts.worker_link import WorkerLink
from gpu_worker.encoding import EncodedChunk
from gpu_worker.engine_thread import EngineThread
from gpu_worker.ledger import Ledger, Verdict
from gpu_worker.source_images import with_images_of

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A reply on its way.

    Args:
        reply_to: the inbox; an empty one stands for that of the session's partition.
        reply: what it says.
        blobs: what it refers to and has to be written with it.
    """

    reply_to: str
    reply: WorkerReply
    blobs: tuple[Blob, ...] = ()


def read_request(fields: Mapping[bytes, bytes]) -> WorkerRequest:
    """The request of a stream entry; InvalidArgumentError naming what is malformed."""
    try:
        request = WorkerRequest.from_entry(fields)
    except InvalidArgumentError:
        raise
    except (ValueError, TypeError) as error:
        raise InvalidArgumentError(f"worker request is malformed: {error}", field="request") from None
    if request.tick is not None and request.tick.request_id != request.request_id:
        raise InvalidArgumentError("worker request and its tick have different ids", field="request_id")
    return request


def salvage(fields: Mapping[bytes, bytes], error: InvalidArgumentError, incarnation: str) -> Outgoing | None:
    """The reply to a malformed request, if it says at least whose it is, which one, and under which fence."""
    text = {name.decode(errors="replace"): value.decode(errors="replace") for name, value in fields.items()}
    try:
        request_id = check_text_id(text.get("request_id"), "request_id")
        fence = check_index(int(text.get("fence", "")), "fence")
        session_id = check_session_id(text.get("session_id") or _session_of(request_id))
    except ValueError:
        return None
    failure = TickFailedError(
        f"the worker can't read the request: {error}", field=error.field, code="payload_lost"
    )
    life = text.get("life", "").strip() or request_id
    return Outgoing(
        text.get("reply_to", ""), WorkerReply(session_id, request_id, fence, life, incarnation, error=failure)
    )


def _session_of(request_id: str) -> str:
    """The session in `ar-<session>-<position>-<32 hex>`."""
    return request_id.removeprefix("ar-").rsplit("-", 2)[0]


class RequestHandler:
    """Runs requests one at a time.

    Args:
        link: the broker.
        ledger: what ran before.
        engine: the model.
        busy: marks the worker busy; broker time in ms.
    """

    def __init__(
        self,
        link: WorkerLink,
        ledger: Ledger,
        engine: EngineThread,
        *,
        busy: Callable[[], Awaitable[int]],
    ) -> None:
        self._link = link
        self._ledger = ledger
        self._engine = engine
        self._busy = busy

    async def handle(self, delivery: Delivery, request: WorkerRequest) -> Outgoing | None:
        """The reply to a request; None where nobody waits for one.

        Raises BrokerError before anything was run; the entry is then to be read again.
        """
        verdict = self._ledger.admit(request)
        if verdict is Verdict.DROP:
            log.info("not run", request_id=request.request_id, why=verdict.value)
            return None
        if verdict is Verdict.REPEAT:
            return Outgoing(request.reply_to, self._ledger.repeat(request))
        started_ms = delivery.busy_since_ms
        if started_ms is None:
            started_ms = await self._busy()
        queued_ms = max(0, started_ms - int(delivery.entry_id.partition(b"-")[0]))
        if request.kind is Kind.TICK:
            return await self._tick(request, started_ms, queued_ms)
        reply = await self._release(request, queued_ms)
        self._ledger.record(reply)
        return Outgoing(request.reply_to, reply)

    def answer(
        self,
        request: WorkerRequest,
        *,
        output: ChunkOutput | None = None,
        error: WorldlineError | None = None,
        queued_ms: int = 0,
        executed_ms: int = 0,
    ) -> WorkerReply:
        """A reply to `request`."""
        return WorkerReply(
            session_id=request.session_id,
            request_id=request.request_id,
            fence=request.fence,
            life=request.life,
            incarnation=self._link.incarnation,
            output=output,
            error=error,
            queued_ms=queued_ms,
            executed_ms=executed_ms,
        )

    def without_chunk(self, answer: Outgoing) -> Outgoing:
        """The answer to a tick whose chunk the broker has no room for, in place of the one that was recorded."""
        full = TickFailedError("the broker has no room for the chunk", field="payload", code="payload_lost")
        reply = replace(answer.reply, output=None, error=full)
        self._ledger.record(reply)
        return Outgoing(answer.reply_to, reply)

    # ------------------------------------------------------------------------------------------------ ticks

    async def _tick(self, request: WorkerRequest, started_ms: int, queued_ms: int) -> Outgoing | None:
        if request.expires_at_ms is not None and started_ms > request.expires_at_ms:
            late_ms = started_ms - request.expires_at_ms
            expired = CommandExpiredError(
                f"the tick waited {late_ms} ms past its limit", field="expires_at_ms"
            )
            return Outgoing(request.reply_to, self.answer(request, error=expired, queued_ms=queued_ms))
        if not await self._is_wanted(request):
            log.info("not run", request_id=request.request_id, why="the session does not wait for it")
            return None
        begun_s = time.monotonic()
        output, error = None, None
        blobs: tuple[Blob, ...] = ()
        try:
            output, blobs = await self._execute(request)
        except BrokerError:
            raise  # nothing was run yet
        except WorldlineError as failure:
            error = failure
        executed_ms = int(1000 * (time.monotonic() - begun_s))
        reply = self.answer(request, output=output, error=error, queued_ms=queued_ms, executed_ms=executed_ms)
        self._ledger.record(reply)
        return Outgoing(request.reply_to, reply, blobs)

    async def _is_wanted(self, request: WorkerRequest) -> bool:
        """Whether a tick may run: one that would create a session only if the session's state waits for it."""
        if request.tick is None or request.tick.chunk_index > 0:
            return True
        try:
            inflight = await self._link.inflight(request.session_id)
        except CorruptDataError as error:
            log.warning("a state can't be read", session_id=request.session_id, error=error.message)
            return False
        return inflight is not None and inflight.request_id == request.request_id

    async def _execute(self, request: WorkerRequest) -> tuple[ChunkOutput, tuple[Blob, ...]]:
        """Runs a tick and stores its chunk, but for the blobs; raises the error to answer with."""
        refusal = self._ledger.refusal(request)
        if refusal is not None:
            raise refusal
        params = request.params
        if request.tick is not None:
            params = await with_images_of(request.tick, params, self._link.payloads)
        self._release_other_life(request)
        self._ledger.began(request)
        failpoints.hit("worker.run.before")
        chunk = self._engine.tick(request, params)
        failpoints.hit("worker.run.after")
        if request.tick is not None and request.tick.close_session:
            self._ledger.released(request.session_id)
        else:
            self._ledger.completed(request)
        return await self._store(request, chunk)

    def _release_other_life(self, request: WorkerRequest) -> None:
        """A chunk 0 of one life ends every other; later chunks never get here with another life."""
        held = self._ledger.life_of(request.session_id)
        if held is not None and held != request.life:
            self._engine.close(request.session_id)
            self._ledger.released(request.session_id)

    async def _store(
        self, request: WorkerRequest, chunk: EncodedChunk
    ) -> tuple[ChunkOutput, tuple[Blob, ...]]:
        assert request.tick is not None
        name = (request.session_id, request.life, request.tick.chunk_index)
        try:
            stored = await self._link.payloads.store(*name, chunk.payload, chunk.frames)
        except PayloadStoreError as error:
            raise TickFailedError(error.message, field="payload", code="payload_lost") from error
        failpoints.hit("worker.payload.stored")
        output = ChunkOutput(
            metadata=chunk.metadata,
            payload=stored.payload,
            content_type=PAYLOAD_CONTENT_TYPE,
            sha256=chunk.sha256,
            bytes=len(chunk.payload),
            frames=stored.frames,
        )
        return output, stored.blobs

    # ------------------------------------------------------------------------------------------------ release, reset

    async def _release(self, request: WorkerRequest, queued_ms: int) -> WorkerReply:
        """Ends the life that a release names, or every life for a reset; success where nothing is held."""
        begun_s = time.monotonic()
        held = self._ledger.life_of(request.session_id)
        error: WorldlineError | None = None
        try:
            if request.kind is Kind.RESET and held is not None:
                failpoints.hit("worker.reset.before")
                self._engine.reset(request.session_id)
                failpoints.hit("worker.reset.after")
                self._ledger.released(request.session_id)
            elif request.kind is Kind.RELEASE and held == request.life:
                failpoints.hit("worker.release.before")
                self._engine.close(request.session_id)
                failpoints.hit("worker.release.after")
                self._ledger.released(request.session_id)
        except WorldlineError as failure:
            error = failure
        if request.kind is Kind.RELEASE and error is None:
            # Before the reply, so that whoever reads it finds the room free.
            await self._link.unreserve(request.session_id, request.life)
        executed_ms = int(1000 * (time.monotonic() - begun_s))
        return self.answer(request, error=error, queued_ms=queued_ms, executed_ms=executed_ms)
