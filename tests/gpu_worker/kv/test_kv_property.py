"""Random sequences of forwards, commits, resets and ends, against plain lists."""

from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from gpu_worker.kv.cache import ARDiffusionKVCache
from gpu_worker.kv.state import ARDiffusionKVState
from support.kv_cache import make_cache, tiny_spec
from support.plain_kv import PlainTimeline

BLOCK = 4
FRAMES = 3


class PagedTimelines(RuleBasedStateMachine):
    """Three sessions on one pool. K holds the absolute frame number, so a page tells which frame it is."""

    sessions: Bundle[str] = Bundle("sessions")

    @initialize(
        target=sessions,
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
            session_capacity=3,
        )
        self.cache = make_cache(spec, kv={"reuse_history_staging": staging})
        self.policy = (window, sink, reset_at_boundary)
        self.states: dict[str, ARDiffusionKVState] = {}
        self.plain: dict[str, PlainTimeline] = {}
        for name in "abc":
            self._begin(name)
        return multiple("a", "b", "c")

    def _begin(self, name: str) -> None:
        self.states[name] = ARDiffusionKVState(name, self.cache)
        self.plain[name] = PlainTimeline(*self.policy)

    def _forward(self, name: str, frames: int, *, commit: bool) -> None:
        state, plain = self.states[name], self.plain[name]
        (handle,) = state.get_kv_caches("main", seq_len=frames * BLOCK, commit_current=commit)
        context = state.prepare_paged_context("main")
        assert context.start_frame == plain.committed
        numbers = torch.arange(plain.committed, plain.committed + frames, dtype=torch.float32)
        k = numbers.repeat_interleave(BLOCK).view(1, -1, 1, 1)
        # With a zero query every visible key weighs the same, so the output is the mean of the visible V.
        out = handle.write_and_attend(torch.zeros_like(k), k, k)
        visible = plain.visible_with(frames)
        assert torch.allclose(
            out, torch.tensor(visible, dtype=torch.float32).mean().expand_as(out), atol=1e-4
        )
        assert int(context.metadata.seq_lens) == len(visible) * BLOCK

    @rule(name=sessions, frames=st.integers(1, FRAMES))
    def probe(self, name: str, frames: int) -> None:
        self._forward(name, frames, commit=False)

    @rule(name=sessions, frames=st.integers(1, FRAMES), probes=st.integers(0, 2))
    def commit(self, name: str, frames: int, probes: int) -> None:
        for _ in range(probes):
            self._forward(name, frames, commit=False)
        self._forward(name, frames, commit=True)
        self.states[name].commit_paged_context("main")
        self.plain[name].commit(frames)

    @rule(name=sessions)
    def reset(self, name: str) -> None:
        self.states[name].reset()
        self.plain[name].reset()

    @rule(name=sessions, in_flight=st.booleans())
    def end_and_begin_again(self, name: str, in_flight: bool) -> None:
        if in_flight:
            self._forward(name, 1, commit=True)
        self.states[name].close()
        self._begin(name)

    @invariant()
    def pages_hold_what_the_lists_hold(self) -> None:
        for name, state in getattr(self, "states", {}).items():
            adapter, plain = state.adapter("main"), self.plain[name]
            kept = [int(self.cache.k_pages[0][block].mean()) for block in adapter.table.ids]
            assert kept == plain.kept
            assert adapter.absolute_frames == plain.committed

    @invariant()
    def the_pool_is_conserved(self) -> None:
        cache: ARDiffusionKVCache | None = getattr(self, "cache", None)
        if cache is not None:
            cache.check_integrity()
            held = sum(len(plain.kept) for plain in self.plain.values())
            assert cache.pool.num_free == cache.pool.num_usable - held
            assert not cache.k_pages[0][0].any()


PagedTimelines.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestPagedTimelines = PagedTimelines.TestCase
