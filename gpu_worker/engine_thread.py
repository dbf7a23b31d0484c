"""The engine in a thread of its own: one blocking call at a time, while the loop's heartbeats go on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

import structlog

from contracts.errors import FAILURE_CODES, ModelError, WorldlineError
from contracts.messages import WorkerRequest
from gpu_worker.call_thread import CallThread
from gpu_worker.encoding import EncodedChunk, encode_output
from gpu_worker.engine import TickEngine

T = TypeVar("T")

FIGURES_PERIOD_S: Final = 1.0
_MESSAGE_LIMIT: Final = 2_000

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """How full the engine is, as of its last quiet moment."""

    resident: int = 0
    memory: Mapping[str, int] = field(default_factory=dict)


def as_failure(error: BaseException) -> WorldlineError:
    """What a reply says about an exception of the engine: a failure code of its own is kept, all else is the model's."""
    if isinstance(error, WorldlineError):
        if error.code in FAILURE_CODES:
            return error
        return ModelError(error.message[:_MESSAGE_LIMIT], field=error.field)
    return ModelError(f"{type(error).__name__}: {error}".removesuffix(": ")[:_MESSAGE_LIMIT])


class EngineThread:
    """Asynchronous face of a `TickEngine`. Its methods must not overlap; the caller sees to that.

    Args:
        make: builds the engine; called in the thread.
        on_evict: called in the event loop with the id of a session that the engine has just dropped for room.

    Attributes:
        figures: how full the engine is.
        running: whether a call runs right now, also one that nobody waits for any more.
    """

    def __init__(self, make: Callable[[], TickEngine], on_evict: Callable[[str], None]) -> None:
        self._make = make
        self._on_evict = on_evict
        self._thread = CallThread("engine")
        self._engine: TickEngine | None = None
        self._figures_due_s = 0.0
        self.figures = EngineFigures()
        self._calls = 0
        self.running = False

    @property
    def model(self) -> str:
        return self._ready().model

    @property
    def capacity(self) -> int:
        return self._ready().capacity

    async def start(self) -> None:
        """Builds and starts the engine; raises what that raises."""
        loop = asyncio.get_running_loop()

        def evicted(session_id: str) -> None:
            loop.call_soon_threadsafe(self._on_evict, session_id)

        def start() -> TickEngine:
            engine = self._make()
            engine.on_evict = evicted
            engine.start()
            return engine

        self._engine = await self._call(start)
        await self.refresh_figures()

    async def tick(self, request: WorkerRequest, params: Mapping[str, object]) -> EncodedChunk:
        """Generates the chunk of a tick and encodes it; raises an error that a reply can carry.

        Args:
            request: carries the tick.
            params: the session's creation parameters, with bytes in place of the images that were URLs.
        """
        engine, tick = self._ready(), request.tick
        assert tick is not None, "a tick request carries its tick"
        if request.model != engine.model:
            raise ModelError(f"this worker serves {engine.model!r}, not {request.model!r:.80}", field="model")
        seed = 0 if request.seed is None else request.seed
        return await self._guarded(lambda: encode_output(engine.execute_tick(tick, params=params, seed=seed)))

    async def reset(self, session_id: str) -> None:
        """Releases a session that starts again; raises an error that a reply can carry."""
        await self._guarded(lambda: self._ready().reset_session(session_id))

    async def close(self, session_id: str) -> None:
        """Releases a session; raises an error that a reply can carry."""
        await self._guarded(lambda: self._ready().close_session(session_id))

    async def check_integrity(self) -> None:
        """Raises what the engine raises: its memory can't be trusted any more."""
        await self._call(self._ready().check_integrity)

    async def refresh_figures(self) -> None:
        """Brings `figures` up to date if the engine is idle; a busy one does so at the end of its call."""
        if self._engine is not None and self._calls == 0:
            await self._call(lambda: None)

    def shut_down(self) -> None:
        """Lets the thread go; does not wait for a call that still runs."""
        self._thread.end()

    async def _guarded(self, function: Callable[[], T]) -> T:
        try:
            return await self._call(function)
        except (
            Exception,
            SystemExit,
        ) as error:  # whatever a model raises is its own failure, never the worker's
            failure = as_failure(error)
            log.warning("the engine failed", code=failure.code, error=failure.message, exc_info=error)
            raise failure from error

    async def _call(self, function: Callable[[], T]) -> T:
        self._calls += 1
        try:
            return await self._thread.call(lambda: self._run(function))
        finally:
            self._calls -= 1

    def _run(self, function: Callable[[], T]) -> T:
        self.running = True
        try:
            return function()
        finally:
            self.running = False
            now_s = time.monotonic()
            if self._engine is not None and now_s >= self._figures_due_s:
                self._figures_due_s = now_s + FIGURES_PERIOD_S
                self._update_figures(self._engine)

    def _update_figures(self, engine: TickEngine) -> None:
        try:
            self.figures = EngineFigures(len(engine.resident_sessions()), dict(engine.memory()))
        except Exception:
            log.warning("the engine's figures can't be read", exc_info=True)

    def _ready(self) -> TickEngine:
        assert self._engine is not None, "the engine has been started"
        return self._engine
