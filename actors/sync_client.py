"""The client for programs without an event loop: the same calls, each of which blocks.

with SyncSessionClient("world-1") as session:
    session.create(model="reference")
    chunk = session.next_chunk()
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

from actors.client import SessionClient, SessionStart
from actors.config import ClientSettings
from contracts.errors import WorldlineError
from contracts.events import ARDiffusionEventReceipt, ARDiffusionSessionEvent
from contracts.lifecycle import Status
from contracts.state import CommittedChunk, SessionState

P = ParamSpec("P")
T = TypeVar("T")


class SyncSessionClient:
    """`SessionClient` behind plain calls; an event loop runs in a thread of its own from `with` to its end.

    Args:
        session_id: the session, which need not exist yet.
        url: of the broker; `REDIS_URL` if None.
        settings: read from the environment if None.
        timeout_s: how long a call waits for its answer.

    Any thread may call. The parameters of each call are those of `SessionClient`.
    """

    def __init__(
        self,
        session_id: str,
        url: str | None = None,
        *,
        settings: ClientSettings | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self.session_id = session_id
        self._arguments = (session_id, url, settings, timeout_s)
        self._client: SessionClient | None = None

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        name = f"session {self.session_id}"
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        try:
            self._client = self._wait(self._connect())
        except BaseException:
            self._end_loop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._wait(self._open.aclose())
        finally:
            self._client = None
            self._end_loop()

    def create(self, **parameters: Any) -> SessionStart:
        """Creates the session."""
        return self._blocking(self._open.create)(**parameters)

    def accept_event(self, event: ARDiffusionSessionEvent) -> ARDiffusionEventReceipt:
        """Adds an event to the session's queue."""
        return self._blocking(self._open.accept_event)(event)

    def next_chunk(self, **options: str | None) -> CommittedChunk:
        """Generates one chunk and waits until it is committed."""
        return self._blocking(self._open.next_chunk)(**options)

    def run(self, pace_ms: int | None = None) -> None:
        """Lets the session run free."""
        self._blocking(self._open.run)(pace_ms)

    def pause(self) -> None:
        """Ends free running."""
        self._blocking(self._open.pause)()

    def reset(self) -> SessionStart:
        """Starts the world over from its seed."""
        return self._blocking(self._open.reset)()

    def close(self, reason: str | None = None) -> Status:
        """Closes the session and frees its memory."""
        return self._blocking(self._open.close)(reason)

    def disconnect(self, reason: str | None = None) -> Status:
        """The same as `close`, said by a client that goes away."""
        return self._blocking(self._open.disconnect)(reason)

    def state(self) -> SessionState:
        """The session as the broker holds it now."""
        return self._blocking(self._open.state)()

    def read(self, url: str) -> bytes:
        """The bytes behind a chunk's `payload` or `frames` URL."""
        return self._blocking(self._open.read)(url)

    def watch(self, from_start: bool = False) -> Iterator[CommittedChunk]:
        """Committed chunks as they come, until the session is CLOSED."""
        chunks = self._open.watch(from_start)
        try:
            while (chunk := self._wait(_next_or_none(chunks))) is not None:
                yield chunk
        finally:
            self._wait(_close(chunks))

    @property
    def _open(self) -> SessionClient:
        if self._client is None:
            raise WorldlineError("the client is not open: use it in a `with` block")
        return self._client

    async def _connect(self) -> SessionClient:
        session_id, url, settings, timeout_s = self._arguments
        client = SessionClient(session_id, url, settings=settings, timeout_s=timeout_s)
        return await client.__aenter__()

    def _blocking(self, method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
        def wait(*args: P.args, **kwargs: P.kwargs) -> T:
            return self._wait(method(*args, **kwargs))

        return wait

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C here ends the call there, too
            raise

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _next_or_none(chunks: AsyncIterator[CommittedChunk]) -> CommittedChunk | None:
    return await anext(chunks, None)


async def _close(chunks: AsyncIterator[CommittedChunk]) -> None:
    closing = getattr(chunks, "aclose", None)
    if closing is not None:
        await closing()
