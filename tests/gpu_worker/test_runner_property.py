"""Random sequences of ticks, failures, resets, closes and aborted steps over several sessions, against plain lists."""

from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from contracts.errors import NotResidentError
from gpu_worker.capability import ARDiffusionRequest
from gpu_worker.runner import ARDiffusionModelRunner
from support.kv_pipeline import RecordingPipeline, make_runner, make_tick
from support.plain_kv import PlainTimeline
from support.plain_residency import PlainResidency

NAMES = st.sampled_from("abcd")


class BoomError(Exception):
    pass


def boom() -> None:
    raise BoomError


class ResidentWorlds(RuleBasedStateMachine):
    """Four sessions where two fit. A chunk's output is the mean of the frames that it saw."""

    @initialize(window=st.integers(1, 3), sink=st.integers(0, 2))
    def build(self, window: int, sink: int) -> None:
        self.pipeline = RecordingPipeline(window_frames=window, sink_frames=sink)
        self.runner: ARDiffusionModelRunner = make_runner(self.pipeline)
        self.evicted: list[str] = []
        self.runner.on_evict = self.evicted.append
        self.plain = PlainResidency(2)
        self.policy = (window, sink, False)
        self.timelines: dict[str, PlainTimeline] = {}

    def _execute(self, name: str, chunk: int, **changes: Any) -> Any:
        return self.runner.execute_model(ARDiffusionRequest(tick=make_tick(name, chunk, **changes)))

    def _begin(self, name: str, chunk: int) -> bool:
        """Whether the plain runner runs this tick; it may begin the session."""
        fresh = name not in self.plain.order
        runs = self.plain.tick(name, chunk)
        if runs and fresh:
            self.timelines[name] = PlainTimeline(*self.policy)
        return runs

    @rule(name=NAMES, close=st.booleans())
    def tick(self, name: str, close: bool) -> None:
        chunk = self.plain.chunks.get(name, 0)
        self._begin(name, chunk)
        frames = self.timelines[name].visible_with(1)
        output = self._execute(name, chunk, close_session=close)
        expected = torch.tensor(frames, dtype=torch.float32).mean()
        assert torch.isclose(output.payload["mean"], expected)
        self.timelines[name].commit(1)
        self.plain.done(name)
        if close:
            self.plain.release(name, "close")

    @rule(name=NAMES)
    def tick_of_a_session_that_is_gone(self, name: str) -> None:
        if not self._begin(name, self.plain.chunks.get(name, 3)):
            with pytest.raises(NotResidentError):
                self._execute(name, 3)
        else:
            self.plain.done(name)
            self.timelines[name].commit(1)
            self._execute(name, self.plain.chunks[name] - 1)

    @rule(name=NAMES, hook_fails=st.booleans())
    def tick_that_fails(self, name: str, hook_fails: bool) -> None:
        chunk = self.plain.chunks.get(name, 0)
        self._begin(name, chunk)
        self.pipeline.before_output = boom  # pages of the commit are allocated by then
        self.pipeline.on_close = boom if hook_fails else lambda: None
        with pytest.raises(BoomError):
            self._execute(name, chunk)
        self.pipeline.before_output = self.pipeline.on_close = lambda: None
        self.plain.release(name, "close")

    @rule(name=NAMES)
    def tick_that_starts_again(self, name: str) -> None:
        self.plain.release(name, "reset")
        self._begin(name, 0)
        self._execute(name, 0, reset=True)
        self.timelines[name].commit(1)
        self.plain.done(name)

    @rule(name=NAMES, hook=st.sampled_from(["reset", "close"]))
    def release(self, name: str, hook: str) -> None:
        getattr(self.runner, f"{hook}_session")(name)
        self.plain.release(name, hook)

    @invariant()
    def the_runner_holds_what_the_lists_hold(self) -> None:
        if not hasattr(self, "runner"):
            return
        assert list(self.runner.session_ids) == self.plain.order
        assert self.evicted == self.plain.evicted
        assert self.pipeline.hooks() == self.plain.hooks
        assert self.pipeline.bound is None

    @invariant()
    def the_pool_is_conserved(self) -> None:
        if not hasattr(self, "runner"):
            return
        self.runner.check_integrity()
        pool = self.runner.cache.pool
        held = sum(len(self.timelines[name].kept) for name in self.plain.order)
        assert pool.num_free == pool.num_usable - held
        assert set(self.runner.cache.cross_attention.session_ids) == set(self.plain.order)


ResidentWorlds.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestResidentWorlds = ResidentWorlds.TestCase
