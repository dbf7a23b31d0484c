"""The client of one session: commands in, answers and committed chunks out.

async with SessionClient("world-1") as session:
    await session.create(model="reference", prompt="a quiet valley")
    await session.accept_event(ARDiffusionSessionEvent(0, prompt="the same valley in snow"))
    chunk = await session.next_chunk()
    await session.close()
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from actors.broker_pool import Broker
from actors.calls import Reconnection, call
from actors.config import ClientSettings
from actors.presence import Presence
from actors.watch import watch_chunks
from contracts.broker import map_exceptions
from contracts.commands import Command, Op
from contracts.creation import DEFAULT_MAX_PENDING_EVENTS, DEFAULT_RECORDING, DEFAULT_REDUCER, CreateArgs
from contracts.errors import BrokerError, InvalidArgumentError, SessionNotFoundError
from contracts.events import ARDiffusionEventReceipt, ARDiffusionSessionEvent
from contracts.identity import check_session_id, new_command_id
from contracts.lifecycle import Status
from contracts.state import CommittedChunk, SessionState

if TYPE_CHECKING:
    from contracts.payloads import PayloadStore


@dataclass(frozen=True, slots=True)
class SessionStart:
    """Where a life begins: what `create` and `reset` answer."""

    life: str
    chunk_index: int
    event_floor: int


class SessionClient:
    """One session as a program sees it; any number of them may share a `Broker`.

    Args:
        session_id: the session, which need not exist yet.
        broker: a `Broker` to share, a URL, or None for `REDIS_URL`. Only what is made here is closed here.
        settings: read from the environment if None.
        timeout_s: how long a call waits for its answer; by default a tick's whole allowance.

    Each call may name a `command_id`. A call that is repeated with the same one, say after `AnswerTimeoutError`, acts
    once and gets the same answer. Errors are those of `contracts.errors`; nothing else is raised for what the broker,
    the host or the model did.
    """

    def __init__(
        self,
        session_id: str,
        broker: Broker | str | None = None,
        *,
        settings: ClientSettings | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self.session_id = check_session_id(session_id)
        self._owns_broker = not isinstance(broker, Broker)
        self.broker = broker if isinstance(broker, Broker) else Broker(broker, settings)
        self.timeout_s = self.broker.settings.answer_timeout_s if timeout_s is None else timeout_s
        self._keys = self.broker.keys.session(session_id)
        self._payloads: PayloadStore | None = None
        self._presence: Presence | None = None

    async def __aenter__(self) -> Self:
        if self._owns_broker:
            await self.broker.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Ends the keep-alive and the connections; the session lives on."""
        await self._drop_presence()
        if self._owns_broker:
            await self.broker.aclose()

    async def create(
        self,
        *,
        model: str,
        reducer: str = DEFAULT_REDUCER,
        seed: int | None = None,
        prompt: str | None = None,
        params: Mapping[str, Any] | None = None,
        recording: str = DEFAULT_RECORDING,
        max_pending_events: int = DEFAULT_MAX_PENDING_EVENTS,
        pace_ms: int | None = None,
        presence_ms: int | None = None,
        idle_ms: int | None = None,
        command_id: str | None = None,
    ) -> SessionStart:
        """Creates the session; see `CreateArgs` for what the parameters mean.

        With `presence_ms` this client keeps the session's presence alive until it is closed.
        """
        args = CreateArgs(
            model=model,
            reducer=reducer,
            seed=seed,
            prompt=prompt,
            params={} if params is None else params,
            recording=recording,
            max_pending_events=max_pending_events,
            pace_ms=pace_ms,
            presence_ms=presence_ms,
            idle_ms=idle_ms,
        )
        if presence_ms is not None:
            await self.keep_presence(presence_ms)
        try:
            return SessionStart(**await self._call(Op.CREATE, args.to_dict(), command_id))
        except BaseException:
            await self._drop_presence()
            raise

    async def accept_event(self, event: ARDiffusionSessionEvent) -> ARDiffusionEventReceipt:
        """Adds an event to the session's queue. After a broken connection the receipt may say DUPLICATE."""
        reconnection = Reconnection()
        while True:
            try:
                return await self.broker.scripts.accept_event(self.session_id, event)
            except BrokerError as error:
                await reconnection.failed(error)

    async def next_chunk(self, *, command_id: str | None = None) -> CommittedChunk:
        """Generates one chunk from all pending events, and waits until it is committed."""
        return CommittedChunk.from_dict(await self._call(Op.NEXT_CHUNK, {}, command_id))

    async def run(self, pace_ms: int | None = None, *, command_id: str | None = None) -> None:
        """Lets the session run free: one chunk after the other, one each `pace_ms` if given."""
        await self._call(Op.RUN, {} if pace_ms is None else {"pace_ms": pace_ms}, command_id)

    async def pause(self, *, command_id: str | None = None) -> None:
        """Ends free running; the chunk in flight is still committed."""
        await self._call(Op.PAUSE, {}, command_id)

    async def reset(self, *, command_id: str | None = None) -> SessionStart:
        """Starts the world over from its seed: a new life at chunk 0, pending events dropped and reported."""
        return SessionStart(**await self._call(Op.RESET, {}, command_id))

    async def close(self, reason: str | None = None, *, command_id: str | None = None) -> Status:
        """Closes the session and frees its memory; closing a closed session changes nothing."""
        return await self._end(Op.CLOSE, reason, command_id)

    async def disconnect(self, reason: str | None = None, *, command_id: str | None = None) -> Status:
        """The same as `close`, said by a client that goes away."""
        return await self._end(Op.DISCONNECT, reason, command_id)

    async def state(self) -> SessionState:
        """The session as the broker holds it now."""
        with map_exceptions(self._keys.state):
            raw: Any = await self.broker.commands.hgetall(self._keys.state)
        state = SessionState.from_hash(self.session_id, raw)
        if state is None:
            raise SessionNotFoundError(f"session {self.session_id} does not exist", field="session_id")
        return state

    async def pending_events(self) -> int:
        """How many events wait for the next chunk."""
        with map_exceptions(self._keys.events):
            return int(await self.broker.commands.xlen(self._keys.events))

    def watch(self, from_start: bool = False) -> AsyncIterator[CommittedChunk]:
        """Committed chunks as they come, until the session is CLOSED; see `watch_chunks`."""
        return watch_chunks(self.broker, self.session_id, from_start=from_start)

    async def read(self, url: str) -> bytes:
        """The bytes behind a chunk's `payload` or `frames` URL."""
        if self._payloads is None:
            from contracts.payloads import PayloadStore  # numpy comes with it, and few programs read payloads

            self._payloads = PayloadStore(self.broker.commands, keys=self.broker.keys)
        return await self._payloads.read(url)

    async def keep_presence(self, presence_ms: int | None = None) -> None:
        """Keeps the session's presence alive until this client is closed; by default for its own `presence_ms`."""
        lasting = (await self.state()).presence_ms if presence_ms is None else presence_ms
        if lasting is None:
            raise InvalidArgumentError("the session was created without presence_ms", field="presence_ms")
        if self._presence is None:
            self._presence = Presence(self.broker, self.session_id, lasting)
        await self._presence.start()

    async def _drop_presence(self) -> None:
        if self._presence is not None:
            await self._presence.stop()
            self._presence = None

    async def _end(self, op: Op, reason: str | None, command_id: str | None) -> Status:
        args = {} if reason is None else {"reason": reason}
        return Status((await self._call(op, args, command_id))["status"])

    async def _call(self, op: Op, args: Mapping[str, Any], command_id: str | None) -> dict[str, Any]:
        command = Command(op, self.session_id, new_command_id() if command_id is None else command_id, args)
        return await call(self.broker, command, self.timeout_s)
