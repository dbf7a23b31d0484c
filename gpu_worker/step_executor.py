"""Cycles of step execution over resident sessions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from contracts.errors import InvalidArgumentError, KVStateError, NotResidentError
from gpu_worker.capability import DiffusionOutput, SupportsStepExecution
from gpu_worker.kv.cache import ARDiffusionKVCache
from gpu_worker.session_request import check_session_name
from gpu_worker.sessions import ResidentSession, ResidentSessions
from gpu_worker.stepwise import SteppedRequest, StepRequest, StepResult, StepSchedule


class StepExecutor:
    """Takes requests through a pipeline's step functions. A request's session has the request's id.

    Args:
        pipeline: has the step functions.
        sessions: those of the runner.
        grouped: whether a call runs all denoise steps of a chunk, or one.
        synchronize: waits for the device.
        timings_ms: gets one sample a chunk.
    """

    def __init__(
        self,
        pipeline: SupportsStepExecution,
        sessions: ResidentSessions,
        *,
        grouped: bool,
        synchronize: Callable[[], None],
        timings_ms: deque[float],
    ) -> None:
        self._pipeline = pipeline
        self._sessions = sessions
        self._grouped = grouped
        self._synchronize = synchronize
        self._timings_ms = timings_ms

    def execute(self, schedule: StepSchedule, cache: ARDiffusionKVCache) -> StepResult | None:
        """Releases what nobody waits for, then takes the scheduled request one call further."""
        for request_id in schedule.finished_req_ids:
            session = self._sessions.get(request_id)
            if session is not None and session.stepped is not None:
                self._sessions.release_quietly(request_id, "an abort")
        if len(schedule.scheduled) > 1:
            raise RuntimeError(f"one request runs at a time, {len(schedule.scheduled)} are scheduled")
        return self._run(schedule.scheduled[0], cache) if schedule.scheduled else None

    def _run(self, scheduled: StepRequest, cache: ARDiffusionKVCache) -> StepResult:
        name = scheduled.request_id
        session, stepped = self._session_of(scheduled, cache)

        def advance() -> DiffusionOutput | None:
            return stepped.advance(whole_chunk=self._grouped, at_the_end=self._synchronize)

        output = self._sessions.call(session, advance)
        if output is None:
            return StepResult(name, None, finished=False)
        if output.error is not None:
            self._sessions.release_quietly(name, "an output with an error")
            return StepResult(name, output, finished=True)
        self._timings_ms.append(stepped.busy_s * 1000)
        finished = stepped.finished
        if finished:
            self._sessions.close(name)
        return StepResult(name, output, finished)

    def _session_of(
        self, scheduled: StepRequest, cache: ARDiffusionKVCache
    ) -> tuple[ResidentSession, SteppedRequest]:
        name, request = scheduled.request_id, scheduled.request
        check_session_name(name)
        if request is None:
            session = self._sessions.use(name)
            if session is None or session.stepped is None:
                raise NotResidentError(f"request {name!r} is not under way here", field="request_id")
            return session, session.stepped
        if name in self._sessions:
            raise KVStateError(f"session {name!r} exists already", field="request_id")
        if request.tick is not None:
            raise InvalidArgumentError(
                "a request that runs step by step has no tick: its session is its request id", field="tick"
            )
        session = self._sessions.create(name, cache, scheduled.seed)
        session.stepped = SteppedRequest(self._pipeline, replace(request, generator=session.generator))
        return session, session.stepped
