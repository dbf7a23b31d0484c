"""Random sequences of forwards, commits, aborts, resets and releases, against plain lists."""

from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from contracts.kv_spec import ARDiffusionKVBranchSpec
from gpu_worker.kv.cache import ARDiffusionKVCache
from gpu_worker.kv.state import ARDiffusionKVState
from support.kv_cache import make_cache, tiny_spec
from support.plain_kv import PlainTimeline

BLOCK = 4
FRAMES = 3
EXTRA = 3
BRANCHES = ("positive", "negative")
TIMELINES = [(session, branch) for session in "abc" for branch in BRANCHES]

Timeline = tuple[str, str]


class PagedTimelines(RuleBasedStateMachine):
    """Three sessions of two branches on one pool. K holds a number that tells session, branch and frame apart."""

    timelines: Bundle[Timeline] = Bundle("timelines")

    @initialize(
        target=timelines,
        window=st.integers(1, 4),
        sink=st.integers(0, 3),
        reset_at_boundary=st.booleans(),
        staging=st.booleans(),
    )
    def build(self, window: int, sink: int, reset_at_boundary: bool, staging: bool) -> Any:
        spec = tiny_spec(
            tokens_per_frame=BLOCK,
            frames_per_block=FRAMES,
            window_frames=window,
            sink_frames=sink,
            reset_at_boundary=reset_at_boundary,
            kv_branches=tuple(ARDiffusionKVBranchSpec(name, slot) for slot, name in enumerate(BRANCHES)),
            max_scratch_tokens_per_branch=EXTRA,
            session_capacity=3,
        )
        self.cache = make_cache(spec, kv={"reuse_history_staging": staging}, spare_pages=FRAMES)
        self.policy = (window, sink, reset_at_boundary)
        self.states: dict[str, ARDiffusionKVState] = {}
        self.plain: dict[Timeline, PlainTimeline] = {}
        self.open: set[Timeline] = set()
        for name in "abc":
            self._begin(name)
        return multiple(*TIMELINES)

    def _begin(self, name: str) -> None:
        self.states[name] = ARDiffusionKVState(name, self.cache)
        for branch in BRANCHES:
            self.plain[name, branch] = PlainTimeline(*self.policy)
            self.open.discard((name, branch))

    def _abort(self, name: str) -> None:
        """What was prepared and never committed goes with a reset of its session only."""
        if any((name, branch) in self.open for branch in BRANCHES):
            self._reset(name)

    def _reset(self, name: str) -> None:
        self.states[name].reset()
        for branch in BRANCHES:
            self.plain[name, branch].reset()
            self.open.discard((name, branch))

    @staticmethod
    def _mark(timeline: Timeline, frame: int) -> float:
        return TIMELINES.index(timeline) * 1000.0 + frame

    def _forward(self, timeline: Timeline, frames: int, *, commit: bool, extra: int = 0) -> None:
        name, branch = timeline
        state, plain = self.states[name], self.plain[timeline]
        (handle,) = state.get_kv_caches(branch, seq_len=frames * BLOCK, commit_current=commit)
        context = state.prepare_paged_context(branch, extra_tokens=extra)
        assert context.start_frame == plain.committed
        numbers = [self._mark(timeline, frame) for frame in range(plain.committed, plain.committed + frames)]
        k = torch.tensor(numbers).repeat_interleave(BLOCK).view(1, -1, 1, 1)
        more = torch.full((1, extra, 1, 1), -1.0) if extra else None
        # With a zero query every visible key weighs the same, so the output is the mean of the visible V.
        out = handle.write_and_attend(torch.zeros_like(k), k, k, more, more)
        visible = [self._mark(timeline, frame) for frame in plain.visible_with(frames)]
        mean = (sum(visible) * BLOCK - extra) / (len(visible) * BLOCK + extra)
        assert torch.allclose(out, torch.tensor(mean).expand_as(out), rtol=1e-5, atol=1e-3)
        assert context.metadata.num_visible == len(visible) * BLOCK + extra

    @rule(timeline=timelines, frames=st.integers(1, FRAMES), extra=st.sampled_from([0, EXTRA]))
    def probe(self, timeline: Timeline, frames: int, extra: int) -> None:
        self._abort(timeline[0])
        self._forward(timeline, frames, commit=False, extra=extra)

    @rule(timeline=timelines, frames=st.integers(1, FRAMES), probes=st.integers(0, 2))
    def commit(self, timeline: Timeline, frames: int, probes: int) -> None:
        name, branch = timeline
        self._abort(name)
        for _ in range(probes):
            self._forward(timeline, frames, commit=False)
        self._forward(timeline, frames, commit=True)
        self.states[name].commit_paged_context(branch)
        self.plain[timeline].commit(frames)

    @rule(timeline=timelines, frames=st.integers(1, FRAMES))
    def prepare_and_leave_open(self, timeline: Timeline, frames: int) -> None:
        if not self.open:  # one tick is in flight at a time, and room is planned for one
            self._forward(timeline, frames, commit=True)
            self.open.add(timeline)

    @rule(timeline=timelines)
    def reset(self, timeline: Timeline) -> None:
        self._reset(timeline[0])

    @rule(timeline=timelines)
    def release_and_begin_again(self, timeline: Timeline) -> None:
        self.states[timeline[0]].close()
        self._begin(timeline[0])

    @invariant()
    def pages_hold_what_the_lists_hold(self) -> None:
        for timeline, plain in getattr(self, "plain", {}).items():
            adapter = self.states[timeline[0]].adapter(timeline[1])
            committed = adapter.table.ids[: adapter.num_computed_tokens // BLOCK]
            kept = [float(self.cache.k_pages[0][block].mean()) for block in committed]
            assert kept == [self._mark(timeline, frame) for frame in plain.kept]
            assert plain.kept[: self.policy[1]] == list(range(min(plain.committed, self.policy[1])))
            assert adapter.absolute_frames == plain.committed

    @invariant()
    def the_pool_is_conserved(self) -> None:
        cache: ARDiffusionKVCache | None = getattr(self, "cache", None)
        if cache is not None:
            cache.check_integrity()
            held = sum(len(plain.kept) for plain in self.plain.values())
            in_flight = cache.pool.num_usable - cache.pool.num_free - held
            assert in_flight == 0 if not self.open else 1 <= in_flight <= FRAMES
            assert not cache.k_pages[0][0].any()


PagedTimelines.TestCase.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)
TestPagedTimelines = PagedTimelines.TestCase
