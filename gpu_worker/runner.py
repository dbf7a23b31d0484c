"""Runs requests of resident sessions through a pipeline, one at a time.

The runner owns the paged pool and every session's KV and random state. A pipeline sees a session's KV only while its
own forward runs. However a session ends (reset, close, eviction, a failed forward), it leaves by `_release`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NoReturn

import torch

from contracts.capacity import CapacityPlan, plan_capacity
from contracts.errors import (
    ConfigurationError,
    InvalidTypeError,
    KVStateError,
    ModelError,
    NotResidentError,
)
from contracts.kv_spec import ARDiffusionKVOverrides, resolve_kv_config
from gpu_worker.capability import (
    WARMUP_SESSION_ID,
    ARDiffusionRequest,
    DiffusionOutput,
    SupportsWarmup,
    check_pipeline,
)
from gpu_worker.device import free_memory_bytes, seeded_generator, synchronize
from gpu_worker.kv.cache import ARDiffusionKVCache
from gpu_worker.kv.state import ARDiffusionKVState
from gpu_worker.session_request import SessionRequest, check_session_name
from gpu_worker.sessions import ResidentSession, ResidentSessions

logger = logging.getLogger(__name__)

_TIMINGS_KEPT: Final = 1000


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """How a deployment runs a pipeline.

    Args:
        kv: KV overrides; None in them means unset.
        session_capacity: resident sessions wanted, None for the pipeline's cap.
        available_bytes: device memory to plan with; None asks the device.
        scratch_blocks_per_branch: lower bound of scratch pages, None for the derived number.
        max_num_seqs: requests at a time; only 1 exists.
        supports_request_batch: whether batches of requests are wanted; they are refused.
        enforce_eager: no compiled graphs, so nothing to warm up.
    """

    kv: ARDiffusionKVOverrides | Mapping[str, Any] | None = None
    session_capacity: int | None = None
    available_bytes: int | None = None
    scratch_blocks_per_branch: int | None = None
    max_num_seqs: int = 1
    supports_request_batch: bool = False
    enforce_eager: bool = False

    def __post_init__(self) -> None:
        if self.max_num_seqs != 1:
            raise ConfigurationError(f"max_num_seqs must be 1, got {self.max_num_seqs}", field="max_num_seqs")
        if self.supports_request_batch:
            raise ConfigurationError(
                "request-batch execution is not supported", field="supports_request_batch"
            )


class ARDiffusionModelRunner:
    """Request execution over paged sessions.

    Args:
        pipeline: implements `SupportsARDiffusionPipeline`, else InvalidTypeError.
        device: where pool and random states live.
        dtype: element type of the pool.
        options: the deployment's settings.

    Raises:
        CapacityError: not even one session fits.
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
        self.device = device
        self.config = resolve_kv_config(self.spec, options.kv)
        self.plan = self._plan(options, dtype.itemsize)
        self.dtype = dtype
        self._cache: ARDiffusionKVCache | None = None
        self.timings_ms: deque[float] = deque(maxlen=_TIMINGS_KEPT)
        self.on_evict: Callable[[str], None] | None = None
        """Told the session id that made room; an error of it fails the request that needed the room."""
        self._warms_up = self.config.warmup_cudagraph and not options.enforce_eager
        self._sessions = ResidentSessions()

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

    def load(self) -> None:
        """Allocates the pool; the second time does nothing."""
        if self._cache is None:
            self._cache = ARDiffusionKVCache(
                self.spec, self.config, self.plan, device=self.device, dtype=self.dtype
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

    def reset_session(self, session_id: str) -> None:
        """Releases a session's memory and calls the pipeline's reset hook; its next request starts a new world.

        Both are attempted; the first error is raised.
        """
        check_session_name(session_id)
        self._release(session_id, self.pipeline.reset_ar_diffusion_session)

    def close_session(self, session_id: str) -> None:
        """Releases a session's memory and calls the pipeline's close hook, also for one that is not resident.

        Both are attempted; the first error is raised.
        """
        check_session_name(session_id)
        self._release(session_id, self.pipeline.close_ar_diffusion_session)

    def _release(self, session_id: str, hook: Callable[[str], None]) -> None:
        """The only way out for a session: KV and cross-attention first, then the model's own state."""
        session = self._sessions.pop(session_id)
        steps: list[Callable[[], None]] = [partial(hook, session_id)]
        if session is not None:
            steps.insert(0, session.kv.close)
        errors: list[Exception] = []
        for step in steps:
            try:
                step()
            except Exception as error:  # noqa: BLE001 - whatever the first step raises, the second must run
                errors.append(error)
        if errors:
            raise errors[0]

    def _release_quietly(self, session_id: str, why: str) -> None:
        """Releases on a path that has an error or another session's request to go on with."""
        try:
            self._release(session_id, self.pipeline.close_ar_diffusion_session)
        except Exception:
            logger.exception("releasing session %r after %s failed", session_id, why)

    def _get_or_create(self, session_id: str, request: ARDiffusionRequest, seed: int) -> ResidentSession:
        session = self._sessions.use(session_id)
        if session is not None:
            return session
        if request.tick is not None and request.tick.chunk_index > 0:
            raise NotResidentError(
                f"session {session_id!r} is not resident, so chunk {request.tick.chunk_index} can't continue it",
                field="session_id",
            )
        generator = seeded_generator(self.device, seed)
        while len(self._sessions) >= self.capacity:
            self._evict(self._sessions.ids[0])
        session = ResidentSession(
            session_id, ARDiffusionKVState(session_id, self.cache), generator, time.monotonic()
        )
        self._sessions.add(session)
        return session

    def _evict(self, session_id: str) -> None:
        self._release_quietly(session_id, "eviction")
        logger.info("evicted session %r for room", session_id)
        if self.on_evict is not None:
            self.on_evict(session_id)

    # ------------------------------------------------------------------------------------------- requests

    def execute_model(self, request: ARDiffusionRequest, *, seed: int = 0) -> DiffusionOutput:
        """Runs one request in its session.

        The session is the tick's, else `extra_args["session_id"]`, else "default". A reset flag releases it first, a
        close flag afterwards.

        Args:
            request: what to generate; its generator is replaced by the session's own.
            seed: random state of a session that starts with this request.

        Raises:
            NotResidentError: a tick beyond chunk 0 whose session is not here; nothing was touched.
            Whatever the forward raises, unchanged; the session was released.
        """
        flags = SessionRequest.of(request)
        if flags.reset:
            self.reset_session(flags.session_id)
        output = self._forward(flags.session_id, request, seed)
        if flags.close_session and output.error is None:
            self.close_session(flags.session_id)
        return output

    def execute_model_batch(self, _requests: object) -> NoReturn:
        """Refused: a tick changes its session, so requests run one at a time."""
        raise RuntimeError("request-batch execution is not supported")

    def _forward(self, session_id: str, request: ARDiffusionRequest, seed: int) -> DiffusionOutput:
        session = self._get_or_create(session_id, request, seed)
        request = replace(request, generator=session.generator)
        started = time.perf_counter()
        try:
            with torch.inference_mode(), self.pipeline.bind_ar_diffusion_state(session_id, session.kv):
                output = _checked_output(self.pipeline.forward(request))
                synchronize(self.device)
        except BaseException:
            # The forward may have written half a chunk: nothing of the session can be trusted any more.
            self._release_quietly(session_id, "a forward exception")
            raise
        if output.error is not None:
            self._release_quietly(session_id, "an output with an error")
            return output
        self.timings_ms.append((time.perf_counter() - started) * 1000)
        return output

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
            self._release_quietly(WARMUP_SESSION_ID, "warm-up")
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

    def check_integrity(self) -> None:
        """KVStateError unless pages, timelines and resident sessions agree."""
        self.cache.check_integrity()
        resident = set(self._sessions.ids)
        expected = {
            f"ar::{session_id}::{branch}" for session_id in resident for branch in self.spec.branch_names
        }
        if set(self.cache.request_ids) != expected:
            raise KVStateError("the KV timelines are not those of the resident sessions")
        orphans = set(self.cache.cross_attention.session_ids) - resident
        if orphans:
            raise KVStateError(f"cross-attention caches without a resident session: {sorted(orphans)}")


def _checked_output(output: object) -> DiffusionOutput:
    if not isinstance(output, DiffusionOutput):
        raise InvalidTypeError(
            f"forward() returned {type(output).__name__}, not DiffusionOutput", field="output"
        )
    return output
