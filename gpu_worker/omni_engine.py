"""`TickEngine` over an AsyncOmni engine: `worldline-worker --engine vllm-omni`, or a factory of one's own.

The engine is asynchronous, the worker calls from a thread: so the engine lives on an event loop of its own. Its memory
can't be seen from here, so the sessions in it are counted here: the one that makes room is closed by us, and is told.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, Protocol

from contracts.errors import (
    ConfigurationError,
    InvalidArgumentError,
    InvalidTypeError,
    KVStateError,
    ModelError,
    NotResidentError,
)
from contracts.tick import ARDiffusionTickRequest
from gpu_worker.capability import DiffusionOutput
from gpu_worker.loop_thread import LoopThread
from gpu_worker.omni_rooms import OmniRooms
from gpu_worker.omni_rpc import ARDiffusionOmniLifecycle
from gpu_worker.omni_setup import OmniSession, OmniSetup

PACKAGE: Final = "vllm_omni"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Connection:
    setup: OmniSetup
    lifecycle: ARDiffusionOmniLifecycle


class OmniTickEngine:
    """One model in an AsyncOmni engine.

    Args:
        model: the name that sessions ask for.
        connect: returns, or awaits, the engine and its setup; called once, on the engine's event loop.
        capacity: sessions that the engine keeps; with a larger number than its own it evicts unseen.
    """

    def __init__(
        self, model: str, connect: Callable[[], OmniSetup | Awaitable[OmniSetup]], *, capacity: int
    ) -> None:
        self.model = model
        self.capacity = _check_capacity(capacity)
        self.on_evict: Callable[[str], None] | None = None
        self._connect = connect
        self._connection: _Connection | None = None
        self._loop = LoopThread("omni")
        self._rooms = OmniRooms(capacity)

    def start(self) -> None:
        """Starts the event loop and the engine on it; ConfigurationError for one that can't execute ticks."""
        self._loop.start()
        try:
            self._connection = self._loop.run(self._connected())
        except BaseException:
            self._loop.stop()
            raise

    def stop(self) -> None:
        """Ends the event loop, for an engine that ends before its process does."""
        self._loop.stop()

    async def _connected(self) -> _Connection:
        made = self._connect()
        setup = await made if inspect.isawaitable(made) else made
        if not isinstance(setup, OmniSetup):
            raise ConfigurationError(
                f"the engine's setup must be an OmniSetup, got {type(setup).__name__}", field="engine"
            )
        try:
            setup.consumer()  # made anew for each tick: here, to find out at start what would fail all of them
            return _Connection(setup, setup.lifecycle())
        except (InvalidArgumentError, InvalidTypeError) as error:
            raise ConfigurationError(f"the engine is unsuitable: {error}", field=error.field) from error

    # ------------------------------------------------------------------------------------------- ticks

    def execute_tick(
        self, tick: ARDiffusionTickRequest, *, params: Mapping[str, object], seed: int
    ) -> DiffusionOutput:
        """Generates the tick's chunk.

        Raises:
            NotResidentError: the tick continues a session that is not here; nothing was touched.
            InvalidArgumentError: the setup can't follow the session's parameters; nothing was touched.
            Whatever the engine raises, unchanged; the session was released, or keeps its room until it can be.
        """
        begins = tick.reset or not self._rooms.is_usable(tick.session_id)
        if begins and tick.chunk_index > 0:
            raise NotResidentError(
                f"session {tick.session_id!r} is not resident, so chunk {tick.chunk_index} can't continue it",
                field="session_id",
            )
        session = self._loop.run(self._session(params, seed))
        if begins:
            self._find_room(tick.session_id)
        self._rooms.use(tick.session_id)
        try:
            output = self._loop.run(session.execute_tick(tick))
        except BaseException:
            self._release_quietly(tick.session_id, "a failed tick")
            raise
        if tick.close_session:  # the engine did so after the forward
            self._rooms.free(tick.session_id)
        return output

    async def _session(self, params: Mapping[str, object], seed: int) -> OmniSession:
        return OmniSession.of(self._ready().setup, params, seed)

    def _find_room(self, session_id: str) -> None:
        if session_id in self._rooms.stuck:
            self.close_session(session_id)
        if session_id not in self._rooms:
            self._make_room()

    def _make_room(self) -> None:
        """Rooms of sessions that should be gone come first; while one can't be had back, no other session pays."""
        for session_id in self._rooms.stuck if self._rooms.full else ():
            self._release_quietly(session_id, "a failed release")
        if not self._rooms.full:
            return
        if not self._rooms.stuck:
            self._evict(self._rooms.ids[0])
        if self._rooms.full:
            stuck = ", ".join(self._rooms.stuck)
            raise ModelError(
                f"there is no room: the engine does not release {stuck:.200}", field="session_id"
            )

    def _evict(self, session_id: str) -> None:
        """Told even if the release failed: nothing may follow in that session any more."""
        self._release_quietly(session_id, "eviction")
        logger.info("evicted session %r for room", session_id)
        if self.on_evict is not None:
            self.on_evict(session_id)

    # ------------------------------------------------------------------------------------------- releases

    def reset_session(self, session_id: str) -> None:
        """Has a session start again; if that fails, it keeps its room, and the error is raised."""
        self._release(session_id, self._ready().lifecycle.reset_session)

    def close_session(self, session_id: str) -> None:
        """Has a session released, if it has a room; if that fails, it keeps it, and the error is raised."""
        if session_id in self._rooms:
            self._release(session_id, self._ready().lifecycle.close_session)

    def _release(self, session_id: str, call: Callable[[str], Any]) -> None:
        try:
            self._loop.run(call(session_id))
        except BaseException:
            self._rooms.mark_stuck(session_id)
            raise
        self._rooms.free(session_id)

    def _release_quietly(self, session_id: str, why: str) -> None:
        try:
            self.close_session(session_id)
        except Exception:
            logger.exception("releasing session %r after %s failed; its room stays taken", session_id, why)

    # ------------------------------------------------------------------------------------------- accounting

    def is_resident(self, session_id: str) -> bool:
        """Whether the session has, or may have, memory in the engine."""
        return session_id in self._rooms

    def resident_sessions(self) -> tuple[str, ...]:
        """Those sessions, least recently used first."""
        return self._rooms.ids

    def check_integrity(self) -> None:
        """KVStateError when the engine's event loop has ended: what the engine holds can't be reached any more."""
        if not self._loop.running:
            raise KVStateError("the event loop of the engine does not run")

    def memory(self) -> Mapping[str, int]:
        """Rooms in all, taken, and taken by sessions whose release failed."""
        return {
            "capacity": self.capacity,
            "resident": len(self._rooms),
            "unreleased": len(self._rooms.stuck),
        }

    def _ready(self) -> _Connection:
        if self._connection is None:
            raise KVStateError("the engine is not started yet: call start() first")
        return self._connection


def _check_capacity(capacity: object) -> int:
    if not isinstance(capacity, int) or isinstance(capacity, bool) or capacity < 1:
        raise ConfigurationError(
            f"capacity must be an integer of at least 1, got {capacity!r:.40}", field="capacity"
        )
    return capacity


# --------------------------------------------------------------------------------------- --engine vllm-omni


class OmniSettings(Protocol):
    """What is read of the worker's settings."""

    @property
    def model(self) -> str:
        """Name that the engine is built with."""
        ...

    @property
    def session_capacity(self) -> int | None:
        """Sessions that the engine keeps; None for the one that it always admits."""
        ...

    @property
    def omni_setup(self) -> str | None:
        """`module:function`, called as `function(engine, settings)`; returns, or awaits, an `OmniSetup`."""
        ...


def make_engine(settings: OmniSettings) -> OmniTickEngine:
    """An AsyncOmni of the settings' model, with the setup that they name.

    ConfigurationError where the package, the function or the model can't be loaded.
    """
    async_omni = _async_omni()
    describe = _setup_function(settings.omni_setup)

    def connect() -> Any:
        try:
            engine = async_omni(model=settings.model)
        except Exception as error:
            raise ConfigurationError(
                f"vllm-omni can't serve {settings.model!r:.200}: {type(error).__name__}: {error}",
                field="model",
            ) from error
        return describe(engine, settings)

    capacity = 1 if settings.session_capacity is None else settings.session_capacity
    return OmniTickEngine(settings.model, connect, capacity=capacity)


def _async_omni() -> Callable[..., Any]:
    try:
        async_omni: Callable[..., Any] = import_module(PACKAGE).AsyncOmni
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"the engine vllm-omni can't be loaded: {error}; it comes with worldline[vllm-omni]",
            field="engine",
        ) from error
    return async_omni


def _setup_function(name: str | None) -> Callable[[Any, OmniSettings], Any]:
    if name is None:
        raise ConfigurationError(
            "the engine vllm-omni needs a module:function that returns its OmniSetup", field="omni_setup"
        )
    module, _, attribute = name.partition(":")
    try:
        function: Callable[[Any, OmniSettings], Any] = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"{name!r:.200} can't be loaded: {error}", field="omni_setup") from error
    return function
