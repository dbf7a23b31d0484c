"""Stands between runner and pipeline: writes down the hooks, and makes calls fail where a check wants it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from contracts.kv_spec import ARDiffusionKVCacheSpec
from gpu_worker.capability import ARDiffusionRequest, DiffusionOutput, SupportsARDiffusionPipeline
from gpu_worker.kv.state import ARDiffusionKVState


class InjectedError(RuntimeError):
    """What a check makes go wrong."""


class Fault(Enum):
    """Where the next call fails."""

    COMMIT = "in the middle of the forward, at its first commit of KV pages"
    END = "at the end of the forward, when everything is written"
    HOOK = "in the lifecycle hook, after the model has run its own"


class _FailingState(ARDiffusionKVState):
    """A session's KV whose commits fail."""

    def commit_paged_context(self, branch: str) -> None:
        raise InjectedError(f"injected failure of a commit of branch {branch!r}")


class _LoanedState(ARDiffusionKVState):
    """A session's KV that is handed out for one call; nobody but the borrower refers to it."""


def _same_state(state: ARDiffusionKVState, kind: type[ARDiffusionKVState]) -> ARDiffusionKVState:
    """The same KV behind another object: both share one set of attributes."""
    other = object.__new__(kind)
    other.__dict__ = state.__dict__
    return other


class Probe:
    """A pipeline for the runner, which calls the one under test.

    Attributes:
        resets, closes: session ids in the order in which the hooks were called.
        frames: for each session, the frames that each branch had committed at the end of its last call.
        fault: where the next call fails; None once it has.
    """

    def __init__(self, pipeline: SupportsARDiffusionPipeline) -> None:
        self.pipeline = pipeline
        self.resets: list[str] = []
        self.closes: list[str] = []
        self.frames: dict[str, dict[str, int]] = {}
        self.fault: Fault | None = None
        self.lend = False
        self._loan: weakref.ref[ARDiffusionKVState] | None = None

    def ar_diffusion_kv_cache_spec(self) -> ARDiffusionKVCacheSpec:
        return self.pipeline.ar_diffusion_kv_cache_spec()

    @contextmanager
    def bind_ar_diffusion_state(self, session_id: str, state: ARDiffusionKVState) -> Iterator[None]:
        with self.pipeline.bind_ar_diffusion_state(session_id, self._handed_out(state)):
            yield
        branches = self.ar_diffusion_kv_cache_spec().branch_names
        self.frames[session_id] = {name: state.adapter(name).absolute_frames for name in branches}

    def forward(self, request: ARDiffusionRequest) -> DiffusionOutput:
        output = self.pipeline.forward(request)
        if self._takes(Fault.END):
            raise InjectedError("injected failure at the end of a forward")
        return output

    def reset_ar_diffusion_session(self, session_id: str) -> None:
        self.resets.append(session_id)
        self.pipeline.reset_ar_diffusion_session(session_id)
        self._fail_hook()

    def close_ar_diffusion_session(self, session_id: str) -> None:
        self.closes.append(session_id)
        self.pipeline.close_ar_diffusion_session(session_id)
        self._fail_hook()

    def loan_is_kept(self) -> bool:
        """Whether anything still refers to the state that the last call was lent."""
        if self._loan is None or self._loan() is None:
            return False
        gc.collect()  # a cycle that nobody holds is no one who keeps it
        return self._loan() is not None

    def forget_calls(self) -> None:
        """Empties the lists of hooks."""
        self.resets.clear()
        self.closes.clear()

    def _handed_out(self, state: ARDiffusionKVState) -> ARDiffusionKVState:
        if self._takes(Fault.COMMIT):
            return _same_state(state, _FailingState)
        if not self.lend:
            return state
        loan = _same_state(state, _LoanedState)
        self._loan = weakref.ref(loan)
        return loan

    def _fail_hook(self) -> None:
        if self._takes(Fault.HOOK):
            raise InjectedError("injected failure of a lifecycle hook")

    def _takes(self, fault: Fault) -> bool:
        if self.fault is not fault:
            return False
        self.fault = None
        return True
