"""Runs requests of resident sessions through a pipeline, one at a time.

The runner owns the paged pool and every session's KV and random state. A pipeline sees a session's KV only while a
call of its own runs. However a session ends (reset, close, eviction, a failed call), it leaves the same way.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Final, NoReturn

import torch

from contracts.capacity import CapacityPlan, plan_capacity
from contracts.errors import (
    KVStateError,
    ModelError,
)
from contracts.kv_spec import resolve_kv_config
from gpu_worker.capability import (
    WARMUP_SESSION_ID,
    ARDiffusionRequest,
    DiffusionOutput,
    SupportsStepExecution,
    SupportsWarmup,
    check_pipeline,
    checked_output,
    step_functions,
)
from gpu_worker.device import free_memory_bytes, synchronize
from gpu_worker.kv.backends import make_attention_backend
from gpu_worker.kv.cache import ARDiffusionKVCache
from gpu_worker.runner_options import RunnerOptions
from gpu_worker.session_request import SessionRequest, check_begins, check_session_name
from gpu_worker.sessions import ResidentSession, ResidentSessions
from gpu_worker.step_executor import StepExecutor
from gpu_worker.stepwise import StepResult, StepSchedule, run_one_chunk

__all__ = ["ARDiffusionModelRunner", "RunnerOptions"]

logger = logging.getLogger(__name__)

_TIMINGS_KEPT: Final = 1000


class ARDiffusionModelRunner:
    """Execution over paged sessions, a request or a denoise step at a time.

    Args:
        pipeline: implements `SupportsARDiffusionPipeline`, else InvalidTypeError.
        device: where pool and random states live.
        dtype: element type of the pool.
        options: the deployment's settings.

    Raises:
        CapacityError: not even one session fits.
        ConfigurationError: a setting asks for what the pipeline or the device can't do.
    """

    def __init__(
        self,
        pipeline: object,
        *,
        device: torch.device,
        dtype: torch.dtype,
        options: RunnerOptions | None = None,
    ) -> None:
        options = options or RunnerOptions()
        self.pipeline, self.spec = check_pipeline(pipeline)
        self._options = options
        self.device = device
        self.config = resolve_kv_config(self.spec, options.kv)
        self.plan = self._plan(options, dtype.itemsize)
        self.dtype = dtype
        self._attention = make_attention_backend(
            options.attention_backend, self.spec, self.config, device=device, dtype=dtype
        )
        self._cache: ARDiffusionKVCache | None = None
        self.timings_ms: deque[float] = deque(maxlen=_TIMINGS_KEPT)
        self._warms_up = self.config.warmup_cudagraph and not options.enforce_eager
        self._sessions = ResidentSessions(self.pipeline, device, self.plan.capacity)
        self._steps = step_functions(pipeline, required=options.step_execution)
        self._step_executor = None if self._steps is None else self._make_step_executor(self._steps)

    def _plan(self, options: RunnerOptions, itemsize: int) -> CapacityPlan:
        available = options.available_bytes
        plan = plan_capacity(
            self.spec,
            self.config,
            available_bytes=free_memory_bytes(self.device) if available is None else available,
            itemsize=itemsize,
            requested_capacity=options.session_capacity,
            scratch_blocks_minimum=options.scratch_blocks_per_branch,
        )
        if plan.capacity < plan.requested_capacity:
            logger.warning(
                "%d resident sessions fit into %d bytes, %d were asked for",
                plan.capacity,
                plan.budget_bytes,
                plan.requested_capacity,
            )
        return plan

    def _make_step_executor(self, pipeline: SupportsStepExecution) -> StepExecutor:
        return StepExecutor(
            pipeline,
            self._sessions,
            grouped=self._options.group_steps,
            synchronize=lambda: synchronize(self.device),
            timings_ms=self.timings_ms,
        )

    def load(self) -> None:
        """Allocates the pool; the second time does nothing."""
        if self._cache is None:
            self._cache = ARDiffusionKVCache(
                self.spec,
                self.config,
                self.plan,
                device=self.device,
                dtype=self.dtype,
                attention=self._attention,
            )

    @property
    def cache(self) -> ARDiffusionKVCache:
        """The pool; KVStateError before `load`."""
        if self._cache is None:
            raise KVStateError("the KV pool is not allocated yet: call load() first")
        return self._cache

    # ------------------------------------------------------------------------------------------- sessions

    @property
    def capacity(self) -> int:
        """Sessions that can be resident at once."""
        return self.plan.capacity

    @property
    def session_ids(self) -> tuple[str, ...]:
        """Resident sessions, least recently used first."""
        return self._sessions.ids

    def is_resident(self, session_id: str) -> bool:
        """Whether the session's KV is here."""
        return session_id in self._sessions

    @property
    def on_evict(self) -> Callable[[str], None] | None:
        """Told the session id that made room; an error of it fails the request that needed the room."""
        return self._sessions.on_evict

    @on_evict.setter
    def on_evict(self, callback: Callable[[str], None] | None) -> None:
        self._sessions.on_evict = callback

    def reset_session(self, session_id: str) -> None:
        """Releases a session's memory and calls the pipeline's reset hook; its next request starts a new world.

        Both are attempted; the first error is raised.
        """
        check_session_name(session_id)
        self._sessions.reset(session_id)

    def close_session(self, session_id: str) -> None:
        """Releases a session's memory and calls the pipeline's close hook, also for one that is not resident.

        Both are attempted; the first error is raised.
        """
        check_session_name(session_id)
        self._sessions.close(session_id)

    # ------------------------------------------------------------------------------------------- requests

    def execute_model(self, request: ARDiffusionRequest, *, seed: int = 0) -> DiffusionOutput:
        """Runs one request in its session.

        The session is the tick's, else `extra_args["session_id"]`, else "default". A reset flag releases it first, a
        close flag afterwards.

        Args:
            request: what to generate; its generator is replaced by the session's own.
            seed: random state of a session that starts with this request.

        Raises:
            NotResidentError: a tick beyond chunk 0 whose session is not here, or is to start again; nothing was
                touched.
            Whatever the forward raises, unchanged; the session was released.
        """
        flags = SessionRequest.of(request)
        if flags.reset:
            check_begins(flags.session_id, request)
            self.reset_session(flags.session_id)
        output = self._forward(flags.session_id, request, seed)
        if flags.close_session and output.error is None:
            self.close_session(flags.session_id)
        return output

    def execute_model_batch(self, _requests: object) -> NoReturn:
        """Refused: a tick changes its session, so requests run one at a time."""
        raise RuntimeError("request-batch execution is not supported")

    def _session_of(self, session_id: str, request: ARDiffusionRequest, seed: int) -> ResidentSession:
        session = self._sessions.use(session_id)
        if session is None:
            check_begins(session_id, request)
            return self._sessions.create(session_id, self.cache, seed)
        if session.stepped is not None:
            raise KVStateError(f"session {session_id!r} runs a request step by step", field="session_id")
        return session

    def _forward(self, session_id: str, request: ARDiffusionRequest, seed: int) -> DiffusionOutput:
        session = self._session_of(session_id, request, seed)
        request = replace(request, generator=session.generator)
        started = time.perf_counter()

        def generate() -> DiffusionOutput:
            if self._steps is not None and self._options.step_execution:
                output = run_one_chunk(self._steps, request)
            else:
                output = checked_output("forward", self.pipeline.forward(request))
            synchronize(self.device)
            return output

        output = self._sessions.call(session, generate)
        if output.error is not None:
            self._sessions.release_quietly(session_id, "an output with an error")
            return output
        self.timings_ms.append((time.perf_counter() - started) * 1000)
        return output

    # ------------------------------------------------------------------------------------------- single steps

    def execute_stepwise(self, schedule: StepSchedule) -> StepResult | None:
        """Runs one cycle: releases what nobody waits for, then takes the scheduled request one call further.

        A request's session has the request's id and is released when the request finishes or fails. One call is one
        denoise step, or with `group_steps` all steps of a chunk; a chunk is synchronised and timed once, at its end.
        None comes back when nothing is scheduled.

        Raises:
            RuntimeError: the pipeline has no step functions, or more than one request is scheduled.
            NotResidentError: the request continues, but its session is not here.
            Whatever the step functions raise, unchanged; the session was released.
        """
        if self._step_executor is None:
            raise RuntimeError(f"{type(self.pipeline).__name__} does not support step execution")
        return self._step_executor.execute(schedule, self.cache)

    # ------------------------------------------------------------------------------------------- warm-up

    def warm_up(self) -> None:
        """Executes the pipeline's warm-up requests in a session of their own, then forgets it. Failure only warns."""
        if not self._warms_up or not isinstance(self.pipeline, SupportsWarmup):
            return
        try:
            self._run_warm_up(self.pipeline)
            if self.config.warmup_capture_reset:
                self.reset_session(WARMUP_SESSION_ID)
                self._run_warm_up(self.pipeline)
        except Exception:
            logger.warning("warm-up failed, the first requests will be slower", exc_info=True)
        finally:
            self._sessions.release_quietly(WARMUP_SESSION_ID, "warm-up")
            self.timings_ms.clear()

    def _run_warm_up(self, pipeline: SupportsWarmup) -> None:
        for request in pipeline.ar_diffusion_warmup_requests():
            output = self._forward(WARMUP_SESSION_ID, request, seed=0)
            if output.error is not None:
                raise ModelError(output.error)

    # ------------------------------------------------------------------------------------------- accounting

    def memory(self) -> dict[str, int]:
        """Planned and allocated bytes, managed pages in all and free; what is allocated is 0 before `load`."""
        cache, plan = self._cache, self.plan
        return {
            "available_bytes": plan.available_bytes,
            "budget_bytes": plan.budget_bytes,
            "planned_bytes": plan.planned_bytes,
            "allocated_bytes": 0 if cache is None else cache.allocated_bytes(),
            "page_bytes": plan.memory.page_bytes,
            "blocks_total": plan.num_blocks - 1,
            "blocks_free": 0 if cache is None else cache.pool.num_free,
            "capacity": plan.capacity,
            "resident": len(self._sessions),
        }

    def layout(self) -> str:
        """Which pages belong to whom: equal on runners that have run the same requests."""
        cache = self._cache
        held = None if cache is None else (cache.layout(), cache.cross_attention.session_ids)
        return repr((self.plan.num_blocks, self.plan.capacity, self.session_ids, held))

    def check_integrity(self) -> None:
        """KVStateError unless pages, timelines and resident sessions agree."""
        self._sessions.check_integrity(self.cache)
