"""What one session's operations share: the mirror of its state, its event queue, its reducer, and how they change."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from actors.close_retry import CloseRetry
from actors.fsm import Lifecycle
from actors.intake import EventQueue, decode
from actors.placement import Placement
from actors.reducers.base import ChecksEvents, ControlReducer
from actors.reducers.registry import make_reducer
from actors.store import SessionStore
from contracts import failpoints
from contracts.commands import Answer
from contracts.errors import OwnershipLostError, TickFailedError, WorldlineError
from contracts.events import ARDiffusionSessionEvent
from contracts.identity import new_request_id
from contracts.lifecycle import Status, Trigger
from contracts.messages import InFlight, Kind, WorkerRequest
from contracts.partition_scripts import PartitionScripts
from contracts.session_scripts import Entry, Failure, Outcome, SessionScripts
from contracts.state import SessionState

Finish = Callable[[str], None]
"""Called with a command id once its answer is durable."""

MAX_MESSAGE: Final = 2_000
"""Characters of a foreign error message that are kept."""


@dataclass(frozen=True, slots=True)
class Services:
    """What a host offers to all its sessions.

    Args:
        resend_after_ms: a request without answer or notice for so long is sent again.
        close_retry: when a close that failed is due again.
    """

    scripts: SessionScripts
    partitions: PartitionScripts
    store: SessionStore
    placement: Placement
    lifecycle: Lifecycle
    resend_after_ms: int
    close_retry: CloseRetry = field(default_factory=CloseRetry)


class SessionCore:
    """The mirror of one session in memory; the broker's copy is the truth.

    Args:
        session_id: the world.
        partition: index of its partition.
        epoch: of the partition's lease; every write carries it.
        inbox: key that workers reply to.
        finish: called with each command id whose answer is durable.
    """

    def __init__(
        self, session_id: str, services: Services, *, partition: int, epoch: int, inbox: str, finish: Finish
    ) -> None:
        self.session_id = session_id
        self.services = services
        self.partition = partition
        self.epoch = epoch
        self.inbox = inbox
        self.finish = finish
        self.state: SessionState | None = None
        self.queue = EventQueue(limit=0)
        self.log = structlog.get_logger("session").bind(session_id=session_id)
        self._reducer: ControlReducer | None = None
        self._unsettled: set[Status] = set()

    # -- the mirror --------------------------------------------------------------------------------------------

    async def adopt(self) -> None:
        """Takes the session over, or reads it again after doubt about what a script did."""
        self._mirror(await self.services.scripts.adopt(self.session_id, self.epoch))
        self.queue = EventQueue(limit=self.state.max_pending_events if self.state else 0)
        await self._settle()

    async def reload(self) -> None:
        """Reads the state after a transition; the event queue stays as it was read."""
        self._mirror(await self.services.store.load(self.session_id))
        if self.state is not None and self.state.epoch != self.epoch:
            raise OwnershipLostError(f"session {self.session_id} belongs to epoch {self.state.epoch}")

    def _mirror(self, state: SessionState | None) -> None:
        self.state = state
        self._reducer = None

    @property
    def held(self) -> SessionState:
        """The state, where an operation has checked that there is one."""
        if self.state is None:
            raise OwnershipLostError(f"session {self.session_id} is gone")
        return self.state

    @property
    def reducer(self) -> ControlReducer:
        """The session's reducer, with the private state that the broker holds."""
        if self._reducer is None:
            reducer = make_reducer(self.held.reducer)
            reducer.load_state(self.held.reducer_state)
            self._reducer = reducer
        return self._reducer

    @property
    def busy(self) -> bool:
        """A tick or a reset is running; other operations wait for it."""
        flying = self.state.inflight if self.state else None
        return flying is not None and flying.kind is not Kind.RELEASE

    def put_in_flight(self, record: InFlight, worker: str | None = None) -> None:
        """Mirrors what a script has just recorded."""
        self.state = self.held.changed(inflight=record, fence=record.fence, worker=worker or self.held.worker)

    # -- events ------------------------------------------------------------------------------------------------

    async def admit(self, entries: Sequence[Entry]) -> None:
        """Takes entries into the queue and moves what can't be applied to `rejected`."""
        state = self.held
        flying = state.inflight.event_ids if state.inflight else ()
        floor = max(state.event_floor, *flying) if flying else state.event_floor
        decoded = decode(entries)
        active = state.status is Status.ACTIVE
        doubtful = {
            d.event.event_id for d in decoded if d.event and (not active or d.event.event_id <= floor)
        }
        recent = await self.services.store.known_ids(self.session_id, doubtful)
        own = set(state.inflight.entries) if state.inflight else set()
        decoded = [item for item in decoded if item.entry_id not in own]
        rejections = self.queue.admit(decoded, floor=floor, recent=recent, check=self._check, active=active)
        if entries:
            self.queue.cursor = entries[-1][0]
        if rejections:
            await self.services.scripts.reject_events(state, rejections)

    async def read_to_tail(self) -> None:
        """Reads the events stream to its end, in batches, so that a long one is swept in bounded memory."""
        while entries := await self.services.store.read_events(self.session_id, self.queue.cursor):
            await self.admit(entries)

    def _check(self, event: ARDiffusionSessionEvent) -> None:
        if isinstance(self.reducer, ChecksEvents):
            self.reducer.check(event)

    # -- answers and transitions -------------------------------------------------------------------------------

    async def was_answered(self, command_id: str) -> bool:
        """Whether the command has its answer already."""
        return await self.services.store.was_answered(self.session_id, command_id)

    async def answer(self, command_id: str, result: dict[str, Any] | WorldlineError) -> None:
        """Ends a command that changed nothing."""
        await self.services.scripts.answer(
            self.session_id, self.epoch, command_id, answer_text(command_id, result)
        )
        self.finish(command_id)

    async def move(
        self, trigger: Trigger, script: Callable[[], Awaitable[Outcome]], wrote: Outcome
    ) -> Outcome:
        """One lifecycle transition: index, script, memory, and what follows from the new state.

        Args:
            trigger: what happens.
            script: runs the script.
            wrote: the outcome with which it says that it wrote.

        Returns the outcome; unless it is `wrote`, nothing has changed.
        """
        services, old = self.services, self.state.status if self.state else Status.CLOSED
        target = services.lifecycle.check(old, trigger)
        outcome = Outcome.STALE
        self._unsettled |= {old, target}
        score = await services.store.enter(self.session_id, target)

        async def persist() -> Status:
            nonlocal outcome
            outcome = await script()
            if outcome is not wrote:
                raise _Refused
            return target

        try:
            with suppress(_Refused):
                await services.lifecycle.move(old, trigger, persist)
        except OwnershipLostError:
            # Nobody else knows of the entry; whoever owns the session now settles only its own.
            await services.store.leave(self.session_id, target, score)
            raise
        await self.reload()
        await self._settle()
        return outcome

    async def _settle(self) -> None:
        """What follows from a state, on other slots than its own; also after a script that was not heard of."""
        if not self._unsettled:
            return
        state = self.state
        await self.services.store.settle(self.session_id, state.status if state else None, self._unsettled)
        await self.update_live()
        if state is not None and state.status is Status.FAILED and state.inflight is None:
            # No release was due, so nothing of the session is left on the worker.
            await self.services.placement.unreserve(state.worker, self.session_id, state.life)
        self._unsettled.clear()

    async def update_live(self) -> None:
        """Whether the next owner of the partition has to adopt this session without being asked."""
        state = self.state
        running = state is not None and state.status is Status.ACTIVE and state.pace_ms is not None
        watched = (
            state is not None
            and state.status is not Status.CLOSED
            and bool(state.presence_ms or state.idle_ms)
        )
        await self.services.partitions.set_live(
            self.partition, self.epoch, self.session_id, running or watched
        )

    # -- requests ----------------------------------------------------------------------------------------------

    def request(self, record: InFlight, **extra: Any) -> WorkerRequest:
        """The worker request of an in-flight record."""
        state = self.held
        return WorkerRequest(
            kind=record.kind,
            session_id=self.session_id,
            request_id=record.request_id,
            life=record.life,
            parent_request_id=state.parent_request_id,
            fence=record.fence,
            reply_to=self.inbox,
            model=state.model,
            params=state.params,
            seed=state.seed,
            **extra,
        )

    def release_record(self, command_id: str | None = None) -> InFlight:
        """A release of the present life, ready to be put in flight."""
        return InFlight(
            request_id=new_request_id(self.session_id, "release"),
            kind=Kind.RELEASE,
            fence=self.held.fence + 1,
            life=self.held.life,
            command_id=command_id,
        )

    async def fail(self, failure: Failure, *, release: bool, command_id: str | None = None) -> None:
        """Makes the session FAILED and ends the command that waited.

        Args:
            failure: why.
            release: whether the worker is told to drop what it holds.
            command_id: the command, where none is in flight yet.
        """
        state = self.held
        waiting = state.inflight.command_id if state.inflight else command_id
        error = TickFailedError(failure.message, field=failure.field, code=failure.code)
        sent = None
        if release and state.worker is not None:
            record = self.release_record()
            sent = (record, self.request(record), state.worker)
        allowed = (
            [Status.ACTIVE, Status.FAILED] if failure.trigger is Trigger.RESET_FAILED else [Status.ACTIVE]
        )
        answer = answer_text(waiting, error) if waiting else ""

        async def script() -> Outcome:
            failpoints.hit("host.fail.before")
            outcome = await self.services.scripts.fail(
                state, failure, allowed=allowed, command_id=waiting or "", answer=answer, release=sent
            )
            failpoints.hit("host.fail.after")
            return outcome

        self.log.warning(
            "session failed", code=failure.code, message=failure.message, chunk_index=state.chunk_index
        )
        if await self.move(failure.trigger, script, Outcome.FAILED) is not Outcome.FAILED:
            raise Resync
        if waiting:
            self.finish(waiting)


class _Refused(Exception):
    """Raised inside a transition whose script wrote nothing."""


class Resync(Exception):
    """Raised when a script found another state than the mirror's: it is read again, and what waits is looked at anew."""


def answer_text(command_id: str, result: dict[str, Any] | WorldlineError) -> str:
    """The JSON of an answer."""
    if isinstance(result, WorldlineError):
        return Answer(command_id, error=result).to_json()
    return Answer(command_id, result=result).to_json()


def plain_text(error: BaseException) -> str:
    """What foreign code raised, as text that every message can carry."""
    text = f"{type(error).__name__}: {error}"[:MAX_MESSAGE]
    return text.encode(errors="replace").decode()
