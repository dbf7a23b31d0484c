"""`TickEngine` over several ranks: each has an engine of its own, and all do what rank 0 says, at the same time.

Every rank runs the whole host logic, so pages, evictions and random states are the same everywhere without being sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import structlog

from contracts.errors import ConfigurationError, KVStateError, ModelError
from contracts.tick import ARDiffusionTickRequest
from gpu_worker.capability import DiffusionOutput
from gpu_worker.engine import SeedsSessions, TickEngine
from gpu_worker.parallel.errors import RankMismatchError
from gpu_worker.parallel.ranks import Ranks
from gpu_worker.parallel.requests import Order, RankRequest

log = structlog.get_logger(__name__)


@runtime_checkable
class ReplicatedEngine(TickEngine, Protocol):
    """An engine that can be one of several that do the same."""

    def layout(self) -> str:
        """Which pages belong to whom; equal on engines that did the same. For an engine that is not started, too."""
        ...


class Member:
    """One rank's engine.

    Args:
        engine: not started yet.
        ranks: the others.

    Raises:
        ConfigurationError: the engine can't be one of several.
    """

    def __init__(self, engine: TickEngine, ranks: Ranks) -> None:
        if not isinstance(engine, ReplicatedEngine):
            raise ConfigurationError(
                f"{type(engine).__name__} runs on one device only", field="ulysses_degree"
            )
        self.engine = engine
        self.ranks = ranks

    def perform(self, request: RankRequest) -> DiffusionOutput | None:
        """Does what every rank does now; the chunk of a tick.

        Raises:
            What failed here, or a typed error that says which rank failed. The tick's session is released everywhere.
            KVStateError: memory is not accounted for, or the ranks don't hold the same any more.
        """
        output: DiffusionOutput | None = None
        error: BaseException | None = None
        try:
            output = self._run(request)
            if output is not None and output.error is not None:
                error = ModelError(output.error)
        except BaseException as failure:  # noqa: BLE001 - whatever a model raises, all have to know
            error = failure
        try:
            self.ranks.agree(error, patient=request.order is Order.START)
        except BaseException as failure:
            if error is None and request.tick is not None:
                self._release(request.tick.session_id)
            if request.order is Order.CHECK and not isinstance(failure, KVStateError):
                raise RankMismatchError(str(failure), field="block_tables") from failure
            raise
        if request.order in {Order.START, Order.CHECK}:
            self.ranks.check_equal(hashlib.sha256(self.engine.layout().encode()).digest())
        return output

    def _run(self, request: RankRequest) -> DiffusionOutput | None:
        engine, tick = self.engine, request.tick
        match request.order:
            case Order.TICK if tick is not None:
                return engine.execute_tick(tick, params=request.params, seed=request.seed)
            case Order.RESET:
                engine.reset_session(request.session_id)
            case Order.CLOSE:
                engine.close_session(request.session_id)
            case Order.START:
                engine.start()
            case Order.CHECK:
                engine.check_integrity()
            case _:
                raise ModelError(f"a rank can't follow {request.order}", field="order")
        return None

    def _release(self, session_id: str) -> None:
        try:
            self.engine.close_session(session_id)
        except Exception:
            log.exception("a session can't be released", session_id=session_id)


class LeadingEngine:
    """The `TickEngine` of rank 0: every call is made on all ranks.

    Args:
        member: this rank's own.
    """

    def __init__(self, member: Member) -> None:
        self._member = member
        self._engine = member.engine
        self.model = self._engine.model
        self.capacity = self._engine.capacity
        self.default_seed = self._engine.default_seed if isinstance(self._engine, SeedsSessions) else 0

    @property
    def on_evict(self) -> Callable[[str], None] | None:
        """Called with the session id that made room for another."""
        return self._engine.on_evict

    @on_evict.setter
    def on_evict(self, callback: Callable[[str], None] | None) -> None:
        self._engine.on_evict = callback

    def start(self) -> None:
        """Allocates memory and warms up."""
        self._all(RankRequest(Order.START))

    def execute_tick(
        self, tick: ARDiffusionTickRequest, *, params: Mapping[str, object], seed: int
    ) -> DiffusionOutput:
        """Generates the tick's chunk; what fails on one rank fails on all, and all release the session."""
        output = self._all(RankRequest(Order.TICK, tick=tick, params=params, seed=seed))
        assert output is not None, "a tick has an output"
        return output

    def reset_session(self, session_id: str) -> None:
        """Releases a session that starts again."""
        self._all(RankRequest(Order.RESET, session_id))

    def close_session(self, session_id: str) -> None:
        """Releases a session; does nothing when it is not resident."""
        self._all(RankRequest(Order.CLOSE, session_id))

    def is_resident(self, session_id: str) -> bool:
        """Whether the session's memory is here, and so on every rank."""
        return self._engine.is_resident(session_id)

    def resident_sessions(self) -> tuple[str, ...]:
        """Resident sessions, least recently used first."""
        return self._engine.resident_sessions()

    def check_integrity(self) -> None:
        """KVStateError unless memory is accounted for on every rank, and the same everywhere."""
        self._all(RankRequest(Order.CHECK))

    def memory(self) -> Mapping[str, int]:
        """Bytes and pages of this rank; the others have as many."""
        return self._engine.memory()

    def shut_down(self) -> None:
        """Lets the other ranks end."""
        self._member.ranks.send(RankRequest(Order.STOP).encode())
        self._member.ranks.leave()

    def _all(self, request: RankRequest) -> DiffusionOutput | None:
        message = request.encode()
        self._member.ranks.send(message)
        return self._member.perform(RankRequest.decode(message))  # what the others get, to the last type


def follow(member: Member) -> Exception | None:
    """Another rank than 0: does what rank 0 says until that stops; what it stopped for, if that was a failure."""
    fatal: Exception | None = None
    while (request := RankRequest.decode(member.ranks.receive())).order is not Order.STOP:
        try:
            member.perform(request)
        except BaseException as error:  # noqa: BLE001 - rank 0 has it as well, and answers
            log.warning("a request failed", order=request.order.value, error=str(error))
            if isinstance(error, Exception) and request.order in {Order.START, Order.CHECK}:
                fatal = error
    return fatal
