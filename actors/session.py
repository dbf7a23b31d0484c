"""The session actor: what arrives for one session, handled one thing at a time.

Nothing here waits for a worker. A command puts a request in flight and returns; the reply is another arrival. So an
actor that has just adopted a session stands where the one before it stood, and an idle session costs no task.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Final, Protocol

from actors.closing import Closing
from actors.creation import Creation
from actors.free_run import FreeRun
from actors.inbox import CommandItem, NewsItem
from actors.placement import monotonic_ms
from actors.reset import Reset
from actors.session_core import Finish, Resync, SessionCore, plain_text
from actors.tick_consumer import TickConsumer
from actors.worker_news import WorkerNews
from contracts import failpoints
from contracts.commands import Command, Op
from contracts.errors import (
    BrokerError,
    CommandPoisonedError,
    OwnershipLostError,
    SessionNotFoundError,
    TickFailedError,
    WorldlineError,
)
from contracts.lifecycle import Status, Trigger
from contracts.messages import InFlight, Kind, WorkerReply
from contracts.session_scripts import Failure, Outcome

POISON_ATTEMPTS: Final = 3
_DOUBTS: Final = 5
_DEFECTS: Final = 2
_BACKOFF_S: Final = 0.2

Step = Callable[[], Awaitable[None]]


class Owner(Protocol):
    """What an actor asks of the partition that holds it."""

    caught_up: bool
    recovery: asyncio.Lock

    def done(self, entry_id: str) -> None:
        """The entry's outcome is durable."""
        ...

    def idle(self, session_id: str) -> None:
        """Nothing of this session is left to do, nor to remember."""
        ...

    def lost(self) -> None:
        """Somebody else owns the partition."""
        ...

    async def attempt(self, entry_id: str) -> int:
        """Counts that a claim found the entry; returns how often."""
        ...


class InternalError(WorldlineError):
    """Raised to a client when the host itself has a defect; the log has the rest."""

    code = "internal_error"


class SessionActor:
    """Runs the operations of one session.

    Args:
        make_core: builds the session's core, given what to call when a command's answer is durable.
        owner: the partition.
    """

    def __init__(self, make_core: Callable[[Finish], SessionCore], owner: Owner) -> None:
        self.core = make_core(self._finish)
        self.owner = owner
        self.listed_live = False
        """The partition's `live` set names the session; whether it still should is looked up at the adoption."""
        self._ticks = TickConsumer(self.core)
        self._creation = Creation(self.core)
        self._reset = Reset(self.core)
        self._closing = Closing(self.core)
        self._free_run = FreeRun(self.core)
        self._worker_news = WorkerNews(self.core, self._reset, self._closing)
        self._commands: deque[CommandItem] = deque()
        self._news: deque[NewsItem] = deque()
        self._open: dict[str, list[CommandItem]] = {}
        self._in_hand = ""
        self._stale = True
        self._resend: str | None = None
        """Request id that is sent again without waiting, if it is still in flight by then."""
        self._doubts = self._refusals = self._defects = 0
        self._sent_at_ms = 0.0
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False

    # -- arrivals ----------------------------------------------------------------------------------------------

    def deliver(self, item: CommandItem | NewsItem) -> None:
        """Queues what arrived."""
        if isinstance(item, CommandItem):
            self._commands.append(item)
        else:
            self._news.append(item)
        self.kick()

    def kick(self) -> None:
        """Looks whether there is something to do."""
        if self._task is None and not self._stopped:
            self._task = asyncio.get_running_loop().create_task(self._drain())

    def reconnected(self) -> None:
        """The broker was away: what is in flight may be lost, or its reply, so it is sent again."""
        self._resend_soon()
        self.kick()

    async def stop(self) -> None:
        """Ends after the step in hand; what is unfinished stays in the inbox."""
        self._end()
        if self._task is not None and self._task is not asyncio.current_task():
            await asyncio.wait([self._task], timeout=2 * _BACKOFF_S + 2)

    def _end(self) -> None:
        # A timer that outlived its actor would act beside the next one of the same session.
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def _retire(self) -> None:
        self._end()
        self.owner.idle(self.core.session_id)

    # -- the loop ----------------------------------------------------------------------------------------------

    async def _drain(self) -> None:
        try:
            while not self._stopped and (step := self._next_step()) is not None:
                await self._guarded(step)
        finally:
            self._task = None
        if not self._stopped and self._forgettable():
            self._retire()

    def _next_step(self) -> Step | None:
        if self._stale:
            return self._adopt
        if self._news:
            return self._take_news
        state = self.core.state
        flying = state.inflight if state else None
        if flying is not None and self.owner.caught_up and self._resend_due(flying):
            return self._send_again
        if self.core.busy:
            return None
        if self._commands:
            return self._take_command
        if self.owner.caught_up and self._tick_due():
            return self._tick_freely
        return None

    def _resend_due(self, flying: InFlight) -> bool:
        wait_ms = self._sent_at_ms + self.core.services.resend_after_ms - monotonic_ms()
        return self._resend == flying.request_id or self._due(wait_ms)

    def _resend_soon(self) -> None:
        state = self.core.state
        self._resend = state.inflight.request_id if state and state.inflight else None

    def _tick_due(self) -> bool:
        wait_ms = self._free_run.wait_ms()
        return wait_ms is not None and self._due(wait_ms)

    def _due(self, wait_ms: float) -> bool:
        if wait_ms <= 0:
            return True
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(wait_ms / 1000, self.kick)
        return False

    async def _guarded(self, step: Step) -> None:
        """Runs a step. After any doubt about what the broker holds, the state is read again before the next one."""
        try:
            await step()
        except Resync:
            self._doubts += 1
            await asyncio.sleep(_BACKOFF_S if self._doubts > _DOUBTS else 0)
        except OwnershipLostError as error:
            # Once may mean that the session expired; refused again right after reading it, the partition is lost.
            self.core.log.warning("write refused", error=str(error))
            self._refusals += 1
            if self._refusals > 1:
                self._stopped = True
                self.owner.lost()
        except BrokerError as error:
            self.core.log.warning("broker does not answer", error=str(error))
            await asyncio.sleep(_BACKOFF_S)
        except Exception as error:  # noqa: BLE001 - whatever it is, one session must not stop the others
            await self._defect(step, error)
        else:
            if step != self._adopt:
                self._doubts = self._refusals = self._defects = 0
            return
        self._stale = True

    async def _defect(self, step: Step, error: Exception) -> None:
        """What raised is tried once more, on the state as the broker holds it: every script compares before it writes.

        It must not be met again and again: then it is answered, fails its session, or is dropped.
        """
        self.core.log.error("step failed", step=step.__name__, exc_info=error)
        self._defects += 1
        if self._defects >= _DEFECTS:
            self._defects = 0
            await self._end_defect(step, error)
        await asyncio.sleep(_BACKOFF_S)

    async def _end_defect(self, step: Step, error: Exception) -> None:
        if not isinstance(error, WorldlineError):
            error = InternalError(plain_text(error))
        try:
            if step == self._take_command:
                await self._refuse_unless_begun(error)
            elif step == self._take_news:
                await self._give_up(error)
            elif step == self._tick_freely:
                await self.core.fail(Failure(Trigger.TICK_FAILED, "state_lost", str(error)), release=True)
            elif step == self._adopt:  # a corrupt state: nobody can be served until it is repaired
                await self._abandon(error)
        except Exception as again:  # noqa: BLE001 - it was logged, and the state is read again
            self.core.log.warning("no way out", error=str(again))

    async def _refuse_unless_begun(self, refusal: WorldlineError) -> None:
        """A command that is in flight is answered by what comes of it."""
        await self.core.reload()
        flying = self.core.state.inflight if self.core.state else None
        if flying is None or flying.command_id != self._in_hand:
            await self._refuse(self._in_hand, refusal)

    async def _give_up(self, refusal: WorldlineError) -> None:
        """The news in hand can't be acted on. A request that waits for it fails, so that it does not wait for ever."""
        item = self._news.popleft()
        self.owner.done(item.entry_id)
        if isinstance(item.news, WorkerReply):
            error = TickFailedError(str(refusal), code="state_lost")
            await self._take_reply(replace(item.news, output=None, error=error))

    async def _abandon(self, refusal: WorldlineError) -> None:
        while self._news:
            self.owner.done(self._news.popleft().entry_id)
        while self._commands or self._open:
            for item in self._commands:
                self._open.setdefault(item.command.command_id, []).append(item)
            self._commands.clear()
            await self._refuse(next(iter(self._open)), refusal)
        self._retire()

    async def _refuse(self, command_id: str, refusal: WorldlineError) -> None:
        try:
            await self.core.answer(command_id, refusal)
        except BrokerError:
            raise  # it stays open, and is looked at anew when the broker is back
        except WorldlineError:
            self.core.log.exception("a command can't be answered", command_id=command_id)
            self._finish(command_id)

    # -- steps -------------------------------------------------------------------------------------------------

    async def _adopt(self) -> None:
        core = self.core
        failpoints.hit("host.adopt.before")
        await core.adopt()
        failpoints.hit("host.adopt.after")
        if self.listed_live:
            await core.update_live()
            self.listed_live = False
        self._stale = False
        self._closing.forget_joined()
        self._free_run.found = core.state is not None and core.state.pace_ms is not None
        flying = core.state.inflight if core.state else None
        self._resend_soon()
        self._sent_at_ms = monotonic_ms()
        in_flight = flying.command_id if flying else None
        waiting = [item for name, items in self._open.items() if name != in_flight for item in items]
        self._open = {name: items for name, items in self._open.items() if name == in_flight}
        self._commands.extendleft(reversed(waiting))
        if in_flight:
            self._await_reply(in_flight)

    def _await_reply(self, command_id: str) -> None:
        """A command that was found and is in flight is not looked at again: its answer comes with the reply."""
        begun = [item for item in self._commands if item.command.command_id == command_id]
        for item in begun:
            self._commands.remove(item)
        if begun:
            self._open.setdefault(command_id, []).extend(begun)

    async def _take_command(self) -> None:
        item = self._commands.popleft()
        self._in_hand = item.command.command_id
        # Counted once a claim: what is put back after a doubt is not found anew.
        self._open.setdefault(self._in_hand, []).append(replace(item, found=False))
        failpoints.hit("host.command.read")
        async with self.owner.recovery if item.found else nullcontext():
            try:
                await self._handle(item)
            except (OwnershipLostError, BrokerError):
                raise
            except WorldlineError as error:
                await self.core.answer(self._in_hand, error)
        self._sent_at_ms = monotonic_ms()

    async def _handle(self, item: CommandItem) -> None:
        command, core = item.command, self.core
        state = core.state
        flying = state.inflight if state else None
        if flying is not None and flying.command_id == command.command_id:
            return  # it came twice, or a new owner found it: its answer comes with the reply
        if item.found and await self.owner.attempt(item.entry_id) >= POISON_ATTEMPTS:
            raise CommandPoisonedError(f"command {command.command_id} was found unfinished by three owners")
        # The tick's script looks itself. The others look here, because they touch other keys before their script.
        if command.op is not Op.NEXT_CHUNK and await core.was_answered(command.command_id):
            await core.answer(
                command.command_id, {}
            )  # the first answer is given again, this one is not written
        elif command.op is Op.CREATE:
            await self._creation.run(command, item.entry_id)
        elif state is None:
            raise SessionNotFoundError(f"session {core.session_id} does not exist", field="session_id")
        else:
            await self._run(command)

    async def _run(self, command: Command) -> None:
        match command.op:
            case Op.NEXT_CHUNK:
                await self._begin_tick(command.command_id)
            case Op.RESET:
                await self._reset.begin(command.command_id)
            case Op.CLOSE | Op.DISCONNECT:
                await self._closing.begin(command)
            case Op.RUN | Op.PAUSE:
                await self._free_run.set_pace(command)
            case Op.SWEEP:
                await self.core.read_to_tail()
                await self.core.answer(command.command_id, {"pending": len(self.core.queue.pending)})

    async def _begin_tick(self, command_id: str | None) -> None:
        self._free_run.began()
        await self._ticks.begin(command_id)
        self._sent_at_ms = monotonic_ms()

    async def _tick_freely(self) -> None:
        """Counted where it is the first since an adoption, as a command that was found is: it may kill its host."""
        if not self._free_run.found:
            await self._begin_tick(None)
            return
        async with self.owner.recovery:
            if await self.core.services.scripts.free_attempt(self.core.held) >= POISON_ATTEMPTS:
                await self.core.fail(
                    Failure(
                        Trigger.TICK_FAILED,
                        "reducer_failed",
                        "free running was begun by three owners in vain",
                    ),
                    release=True,
                )
            else:
                await self._begin_tick(None)
        self._free_run.found = False

    async def _take_news(self) -> None:
        if self._news[0].found:
            async with self.owner.recovery:
                await self._count_news()
        item = self._news[0]
        failpoints.hit("host.reply.read")
        if isinstance(item.news, WorkerReply):
            await self._take_reply(item.news)
        elif await self._worker_news.notice(item.news):
            self._resend_soon()
        self._news.popleft()
        self.owner.done(item.entry_id)

    async def _count_news(self) -> None:
        """News that killed the host again and again is not acted on as it stands: its request fails."""
        item = self._news[0]
        self._news[0] = counted = replace(item, found=False)
        if await self.owner.attempt(item.entry_id) >= POISON_ATTEMPTS and isinstance(item.news, WorkerReply):
            error = TickFailedError("the reply was found unfinished by three owners", code="reducer_failed")
            self._news[0] = replace(counted, news=replace(item.news, output=None, error=error))

    async def _take_reply(self, reply: WorkerReply) -> None:
        """A reply counts only if request id and fence equal those in flight."""
        state = self.core.state
        record = state.inflight if state else None
        if (
            state is None
            or record is None
            or (reply.request_id, reply.fence) != (record.request_id, record.fence)
        ):
            self.core.log.debug("reply ignored", request_id=reply.request_id, fence=reply.fence)
            return
        if record.kind is Kind.TICK:
            await self._ticks.finish(record, reply)
        elif record.kind is Kind.RESET:
            await self._reset.finish(record, reply)
        elif state.status is Status.CLOSING:
            await self._closing.finish(record, reply)
        else:
            await self._worker_news.released(record, reply.error)

    async def _send_again(self) -> None:
        core, state = self.core, self.core.held
        if state.inflight is None or state.worker is None:
            raise Resync
        self._resend = None
        self._sent_at_ms = monotonic_ms()
        if await core.services.placement.is_gone(state.worker):
            if await self._worker_news.lost(state, f"worker {state.worker} is gone"):
                self._resend_soon()
            return
        record = replace(state.inflight, fence=state.fence + 1)
        extra = {"tick": self._ticks.rebuild(record)} if record.kind is Kind.TICK else {}
        failpoints.hit("host.resend.before")
        outcome = await core.services.scripts.resend(
            state, record, core.request(record, **extra), state.worker
        )
        failpoints.hit("host.resend.after")
        if outcome is not Outcome.SENT:
            raise Resync
        core.put_in_flight(record)

    # -- book-keeping ------------------------------------------------------------------------------------------

    def _finish(self, command_id: str) -> None:
        for item in self._open.pop(command_id, ()):
            self.owner.done(item.entry_id)

    def _forgettable(self) -> bool:
        state = self.core.state
        over = state is None or state.status is Status.CLOSED
        return over and not (self._commands or self._news or self._open)
