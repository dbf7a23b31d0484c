"""A chunk as single denoise steps: what is scheduled, what comes back, and the one loop over the step functions."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from contracts.errors import InvalidTypeError, ModelError
from gpu_worker.capability import (
    ARDiffusionRequest,
    DiffusionOutput,
    StepState,
    SupportsStepExecution,
    checked_output,
)


@dataclass(frozen=True, slots=True)
class StepRequest:
    """One request in a cycle.

    Args:
        request_id: the request, and its session.
        request: what to generate, in the cycle that begins it; None continues it.
        seed: random state that it begins with.
    """

    request_id: str
    request: ARDiffusionRequest | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class StepSchedule:
    """One cycle, as a scheduler gives it out.

    Args:
        scheduled: what to run; at most one.
        finished_req_ids: requests that nobody waits for any more, to be released first.
    """

    scheduled: tuple[StepRequest, ...] = ()
    finished_req_ids: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a cycle did for its request.

    Args:
        request_id: the request.
        output: the chunk, or None in the middle of one.
        finished: whether it was the request's last; its session is released.
    """

    request_id: str
    output: DiffusionOutput | None
    finished: bool


class SteppedRequest:
    """One request on its way through a pipeline's step functions.

    Args:
        pipeline: has the functions.
        request: what to generate, with its session's generator.
    """

    def __init__(self, pipeline: SupportsStepExecution, request: ARDiffusionRequest) -> None:
        self._pipeline = pipeline
        self._request = request
        self._state: StepState | None = None
        self._limit = 0
        self._steps_done = 0
        self._in_chunk = False
        self.busy_s = 0.0
        """Time that this chunk has taken so far, without the pauses between its calls."""

    @property
    def finished(self) -> bool:
        """Whether no chunk is left."""
        return self._state is not None and self._state.finished

    def advance(self, *, whole_chunk: bool, at_the_end: Callable[[], None]) -> DiffusionOutput | None:
        """Runs one denoise step, or all that are left of the chunk.

        Args:
            whole_chunk: which of both.
            at_the_end: called once a chunk, when its output is there; its time counts.

        Returns:
            The chunk if this was its last step.

        Raises:
            ModelError: the chunk has steps left where the pipeline said it would have none.
            Whatever a step function raises, unchanged.
        """
        started = time.perf_counter()
        state = self._begun()
        output: DiffusionOutput | None = None
        while output is None:
            self._pipeline.step_scheduler(state, self._pipeline.denoise_step(state))
            self._steps_done += 1
            if state.chunk_complete:
                output = checked_output("post_decode", self._pipeline.post_decode(state))
                self._in_chunk = False
                at_the_end()
            elif self._steps_done >= self._limit:
                raise ModelError(f"Chunk did not complete within {self._limit} denoise steps")
            elif not whole_chunk:
                break
        self.busy_s += time.perf_counter() - started
        return output

    def _begun(self) -> StepState:
        if self._state is None:
            state = self._pipeline.prepare_encode(self._request)
            if not isinstance(state, StepState):
                raise InvalidTypeError(
                    f"prepare_encode() returned {type(state).__name__}, which is no StepState", field="state"
                )
            self._state = state
        if not self._in_chunk:
            self._pipeline.prepare_next_chunk(self._state)
            self._limit = _checked_steps(self._state.num_steps)
            self._steps_done, self._in_chunk, self.busy_s = 0, True, 0.0
        return self._state


def _checked_steps(num_steps: object) -> int:
    if isinstance(num_steps, bool) or not isinstance(num_steps, int) or num_steps < 1:
        raise ModelError(f"num_steps must be an integer >= 1, got {num_steps!r:.80}", field="num_steps")
    return num_steps


def run_one_chunk(pipeline: SupportsStepExecution, request: ARDiffusionRequest) -> DiffusionOutput:
    """The only chunk of a request, by all its steps; what `forward` would return."""
    stepped = SteppedRequest(pipeline, request)
    output = stepped.advance(whole_chunk=True, at_the_end=lambda: None)
    assert output is not None, "a whole chunk has an output"
    if output.error is None and not stepped.finished:
        raise ModelError("one request generates one chunk, and the pipeline has more to come")
    return output
