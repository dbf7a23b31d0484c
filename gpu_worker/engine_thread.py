"""The engine and its thread. Heartbeats go on in another one while a call runs here.

Whoever reads requests and answers them does so in the engine's thread too, on an event loop that stands still while the
engine works: handing a tick over from thread to thread and back costs a tenth of all that there is around the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

import structlog

from contracts import event_loop
from contracts.errors import FAILURE_CODES, ModelError, WorldlineError
from contracts.messages import WorkerRequest
from gpu_worker.call_thread import CallThread
from gpu_worker.encoding import EncodedChunk, encode_output
from gpu_worker.engine import EndsWithWorker, SeedsSessions, TickEngine

T = TypeVar("T")

FIGURES_PERIOD_S: Final = 1.0
END_PATIENCE_S: Final = 15.0
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
    """A `TickEngine` in its thread.

    Args:
        make: builds the engine; called in the thread.
        on_evict: called in the thread with the id of a session that the engine has just dropped for room.

    Attributes:
        figures: how full the engine is.
        running: whether a call runs right now.
    """

    def __init__(self, make: Callable[[], TickEngine], on_evict: Callable[[str], None]) -> None:
        self._make = make
        self._on_evict = on_evict
        self._thread = CallThread("engine")
        self._engine: TickEngine | None = None
        self._end_engine: Callable[[], None] | None = None
        self._default_seed = 0
        self._figures_due_s = 0.0
        self.figures = EngineFigures()
        self.running = False

    @property
    def model(self) -> str:
        return self._ready().model

    @property
    def capacity(self) -> int:
        return self._ready().capacity

    # -- from any other thread -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Builds and starts the engine; raises what that raises."""

        def start() -> None:
            engine = self._make()
            if isinstance(engine, EndsWithWorker):
                self._end_engine = engine.shut_down
            engine.on_evict = self._on_evict
            engine.start()
            self._engine = engine
            self._default_seed = engine.default_seed if isinstance(engine, SeedsSessions) else 0

        await self._thread.call(lambda: self._call(start))

    async def run(self, main: Callable[[], Coroutine[None, None, None]]) -> None:
        """Runs a coroutine in the thread, on a loop of its own; it alone may call what follows. Raises what it raises."""
        await self._thread.call(lambda: event_loop.run(main()))

    async def shut_down(self) -> None:
        """Ends the engine and lets the thread go; does not wait for a call that still runs."""
        if self._end_engine is not None and not self.running:
            try:
                await asyncio.wait_for(self._thread.call(self._end_engine), END_PATIENCE_S)
            except Exception as error:  # noqa: BLE001 - the worker ends anyway
                log.warning("the engine did not end in order", error=str(error))
        self._thread.end()

    # -- in the thread -------------------------------------------------------------------------------------------

    def tick(self, request: WorkerRequest, params: Mapping[str, object]) -> EncodedChunk:
        """Generates the chunk of a tick and encodes it; raises an error that a reply can carry.

        Args:
            request: carries the tick.
            params: the session's creation parameters, with bytes in place of the images that were URLs.
        """
        engine, tick = self._ready(), request.tick
        assert tick is not None, "a tick request carries its tick"
        if request.model != engine.model:
            raise ModelError(f"this worker serves {engine.model!r}, not {request.model!r:.80}", field="model")
        seed = self._default_seed if request.seed is None else request.seed
        return self._guarded(lambda: encode_output(engine.execute_tick(tick, params=params, seed=seed)))

    def reset(self, session_id: str) -> None:
        """Releases a session that starts again; raises an error that a reply can carry."""
        self._guarded(lambda: self._ready().reset_session(session_id))

    def close(self, session_id: str) -> None:
        """Releases a session; raises an error that a reply can carry."""
        self._guarded(lambda: self._ready().close_session(session_id))

    def check_integrity(self) -> None:
        """Raises what the engine raises: its memory can't be trusted any more."""
        self._call(self._ready().check_integrity)

    def refresh_figures(self) -> None:
        """Brings `figures` up to date, if they are old."""
        now_s = time.monotonic()
        if self._engine is not None and now_s >= self._figures_due_s:
            self._figures_due_s = now_s + FIGURES_PERIOD_S
            self._update_figures(self._engine)

    def _guarded(self, function: Callable[[], T]) -> T:
        try:
            return self._call(function)
        except BaseException as error:  # whatever a model raises is its own failure, never the worker's
            failure = as_failure(error)
            log.warning("the engine failed", code=failure.code, error=failure.message, exc_info=error)
            raise failure from error

    def _call(self, function: Callable[[], T]) -> T:
        self.running = True
        try:
            with _outside_of_the_loop():
                return function()
        finally:
            self.running = False
            self.refresh_figures()

    def _update_figures(self, engine: TickEngine) -> None:
        try:
            self.figures = EngineFigures(len(engine.resident_sessions()), dict(engine.memory()))
        except Exception:
            log.warning("the engine's figures can't be read", exc_info=True)

    def _ready(self) -> TickEngine:
        assert self._engine is not None, "the engine has been started"
        return self._engine


@contextlib.contextmanager
def _outside_of_the_loop() -> Iterator[None]:
    """Hides the thread's loop, so that an engine can run one of its own."""
    loop = asyncio._get_running_loop()  # noqa: SLF001 - what loops themselves use
    if loop is None:
        yield
        return
    task = _swap_current_task(loop, None)
    asyncio._set_running_loop(None)  # noqa: SLF001
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)  # noqa: SLF001
        _swap_current_task(loop, task)


def _swap_current_task(
    loop: asyncio.AbstractEventLoop, task: asyncio.Task[None] | None
) -> asyncio.Task[None] | None:
    """Matters from Python 3.12 on, which has this function: there the current task is the thread's."""
    swap = getattr(asyncio.tasks, "_swap_current_task", None)
    return None if swap is None else swap(loop, task)
