"""A pipeline that misuses its KV is told so by a typed error, and nobody else is harmed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch

from contracts.errors import InvalidArgumentError, KVStateError, PoolExhaustedError, WorldlineError
from contracts.kv_spec import ARDiffusionKVBranchSpec
from gpu_worker.capability import ARDiffusionRequest, DiffusionOutput
from gpu_worker.kv.errors import FrameAlignmentError, UnknownNameError
from gpu_worker.kv.state import ARDiffusionKVState
from gpu_worker.runner import ARDiffusionModelRunner
from support.kv_pipeline import RecordingPipeline, make_runner, make_tick

GOOD = torch.zeros(1, 16, 1, 1)
CFG = (ARDiffusionKVBranchSpec("main", 0), ARDiffusionKVBranchSpec("negative", 0))


def layers(count: int, *, tokens: int = 2) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.full((1, tokens, 1, 1), 9.0), torch.full((1, tokens, 1, 1), 9.0))] * count


def half_way() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    yield layers(1)[0]
    raise InvalidArgumentError("the projection failed", field="projection")


def attend(state: ARDiffusionKVState, *tensors: Any, commit: bool = True, extra: int = 0) -> None:
    handle = state.get_kv_caches("main", seq_len=16, commit_current=commit)[0]
    state.prepare_paged_context("main", extra_tokens=extra)
    handle.write_and_attend(*tensors)


def close_first(state: ARDiffusionKVState) -> None:
    state.close()
    state.get_kv_caches("main", seq_len=16)


def two_commits(state: ARDiffusionKVState) -> None:
    for _ in range(2):
        state.get_kv_caches("main", seq_len=16, commit_current=True)
        state.prepare_paged_context("main")


def populate(state: ARDiffusionKVState, what: Any, branch: str = "main", name: str = "text") -> None:
    state.populate_cross_attention(branch, name, what)


def closing(state: ARDiffusionKVState) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    yield from layers(2)
    state.close()


Case = tuple[str, Callable[[ARDiffusionKVState], object], type[Exception], str | None]

CASES: list[Case] = [
    ("q of another head size", lambda s: attend(s, torch.zeros(1, 16, 1, 2), GOOD, GOOD), KVStateError, "q"),
    ("q without queries", lambda s: attend(s, torch.zeros(1, 0, 1, 1), GOOD, GOOD), KVStateError, "q"),
    ("k too short", lambda s: attend(s, GOOD, torch.zeros(1, 15, 1, 1), GOOD), KVStateError, "k"),
    ("v with a batch of two", lambda s: attend(s, GOOD, GOOD, torch.zeros(2, 16, 1, 1)), KVStateError, "v"),
    ("k is a list", lambda s: attend(s, GOOD, GOOD.tolist(), GOOD), KVStateError, "k"),
    ("v is None", lambda s: attend(s, GOOD, GOOD, None), KVStateError, "v"),
    ("q is a number", lambda s: attend(s, 1.0, GOOD, GOOD), KVStateError, "q"),
    ("k holds integers", lambda s: attend(s, GOOD, GOOD.long(), GOOD), KVStateError, "k"),
    ("v on another device", lambda s: attend(s, GOOD, GOOD, GOOD.to("meta")), KVStateError, "v"),
    ("extra tokens not announced", lambda s: attend(s, GOOD, GOOD, GOOD, GOOD, GOOD), KVStateError, "extra_k"),
    ("extra tokens left out", lambda s: attend(s, GOOD, GOOD, GOOD, extra=2), KVStateError, "extra_k"),
    ("more extra tokens than declared", lambda s: attend(s, GOOD, GOOD, GOOD, commit=False, extra=17), PoolExhaustedError, None),
    ("extra tokens of no number", lambda s: attend(s, GOOD, GOOD, GOOD, extra=1.5), InvalidArgumentError, "extra_tokens"),  # type: ignore[arg-type]
    ("no seq_len", lambda s: s.get_kv_caches("main"), InvalidArgumentError, "seq_len"),
    ("seq_len off frame", lambda s: s.get_kv_caches("main", seq_len=17), FrameAlignmentError, "seq_len"),
    ("seq_len of no number", lambda s: s.get_kv_caches("main", seq_len="16"), InvalidArgumentError, "seq_len"),  # type: ignore[arg-type]
    ("too many frames", lambda s: s.get_kv_caches("main", seq_len=32, commit_current=True), InvalidArgumentError, "seq_len"),
    ("foreign branch", lambda s: s.get_kv_caches("third", seq_len=16), UnknownNameError, "branch"),
    ("prepare without forward", lambda s: s.prepare_paged_context("main"), KVStateError, None),
    ("commit left open", two_commits, KVStateError, None),
    ("use after close", close_first, KVStateError, None),
    ("too few layers", lambda s: populate(s, layers(1)), InvalidArgumentError, "text"),
    ("too many layers", lambda s: populate(s, layers(3)), InvalidArgumentError, "text"),
    ("layers of another length", lambda s: populate(s, layers(2, tokens=3)), InvalidArgumentError, "text"),
    ("layers that are no pairs", lambda s: populate(s, [GOOD, GOOD]), InvalidArgumentError, "text"),
    ("layers that are no tensors", lambda s: populate(s, [("k", "v")] * 2), InvalidArgumentError, "text"),
    ("layers in one tensor", lambda s: populate(s, GOOD), InvalidArgumentError, "text"),
    ("no layers at all", lambda s: populate(s, None), InvalidArgumentError, "text"),
    ("layers of complex numbers", lambda s: populate(s, [(k.cfloat(), v) for k, v in layers(2)]), InvalidArgumentError, "text"),
    ("layers without numbers", lambda s: populate(s, [(k, v.to("meta")) for k, v in layers(2)]), InvalidArgumentError, "text"),
    ("layers that are sparse", lambda s: populate(s, [(k.to_sparse(), v) for k, v in layers(2)]), InvalidArgumentError, "text"),
    ("a generator that ends the session", lambda s: populate(s, closing(s)), KVStateError, None),
    ("a generator that raises half-way", lambda s: populate(s, half_way()), InvalidArgumentError, "projection"),
    ("a branch of no name", lambda s: s.get_kv_caches(["main"], seq_len=16), UnknownNameError, "branch"),  # type: ignore[arg-type]
    ("a cache of no name", lambda s: s.clear_cross_attention(name=["text"]), UnknownNameError, "name"),  # type: ignore[arg-type]
    ("a reset that keeps a foreign cache", lambda s: s.reset(keep_cross_attention="audio"), UnknownNameError, "name"),
    ("a reset that keeps a number", lambda s: s.reset(keep_cross_attention=5), UnknownNameError, "name"),  # type: ignore[arg-type]
    ("foreign branch of a cache", lambda s: populate(s, layers(2), branch="third"), UnknownNameError, "branch"),
    ("foreign cache", lambda s: populate(s, layers(2), name="audio"), UnknownNameError, "name"),
    ("read before publication", lambda s: s.get_cross_attention_kv("negative", "text"), KVStateError, None),
    ("clear of a foreign cache", lambda s: s.clear_cross_attention(name="audio"), UnknownNameError, "name"),
]  # fmt: skip


class Misusing(RecordingPipeline):
    """Commits one frame a tick; where it is told to, it misuses its state instead."""

    def __init__(self) -> None:
        super().__init__(num_layers=2, kv_branches=CFG, max_scratch_tokens_per_branch=16)
        self.misuse: Callable[[ARDiffusionKVState], object] | None = None

    def forward(self, request: ARDiffusionRequest) -> Any:
        state = self.bound
        assert state is not None
        self.states.append(state)
        if self.misuse is not None:
            self.misuse(state)
        state.populate_cross_attention("main", "text", layers(2))
        handles = state.get_kv_caches("main", seq_len=16, commit_current=True)
        start = float(state.prepare_paged_context("main").start_frame) + 1
        for layer, handle in enumerate(handles):
            k = torch.full((1, 16, 1, 1), start + layer)
            handle.write_and_attend(GOOD, k, k)
        state.commit_paged_context("main")
        return DiffusionOutput()


@pytest.fixture
def pipeline() -> Misusing:
    return Misusing()


@pytest.fixture
def runner(pipeline: Misusing) -> ARDiffusionModelRunner:
    """Two sessions, two frames each."""
    runner = make_runner(pipeline)
    for index in range(2):
        for name in ("other", "culprit"):
            run(runner, name, index)
    return runner


def run(runner: ARDiffusionModelRunner, session_id: str, chunk_index: int) -> Any:
    return runner.execute_model(ARDiffusionRequest(tick=make_tick(session_id, chunk_index)))


def kv_of(runner: ARDiffusionModelRunner, session_id: str) -> list[torch.Tensor]:
    """Copies of all that a session holds: pages of every layer and branch, cross-attention, positions."""
    cache = runner.cache
    held: list[torch.Tensor] = []
    for state in {id(s): s for s in runner.pipeline.states if s.session_id == session_id}.values():  # type: ignore[attr-defined]
        if state.closed:
            continue
        for branch in cache.spec.branch_names:
            adapter = state.adapter(branch)
            held.append(torch.tensor([adapter.absolute_tokens, adapter.compacted_tokens, *adapter.table.ids]))
            held += [pages[list(adapter.table.ids)] for pages in (*cache.k_pages, *cache.v_pages)]
    held += [
        layer[key].clone()  # type: ignore[literal-required]
        for layer in cache.cross_attention.get(session_id, "main", "text")
        for key in ("k", "v")
    ]
    return held


def assert_only_the_culprit_suffers(
    runner: ARDiffusionModelRunner, before: list[torch.Tensor], free_before: int
) -> None:
    runner.check_integrity()
    assert runner.session_ids == ("other",)
    assert runner.cache.pool.num_free == free_before + 2, "the culprit's two pages are free again"
    after = kv_of(runner, "other")
    assert len(after) == len(before) > 6
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(after, before, strict=True))


@pytest.mark.parametrize(
    ("misuse", "error", "field"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_misuse_is_a_typed_error_that_harms_no_other_session(
    runner: ARDiffusionModelRunner,
    pipeline: Misusing,
    misuse: Callable[[ARDiffusionKVState], object],
    error: type[Exception],
    field: str | None,
) -> None:
    before, free = kv_of(runner, "other"), runner.cache.pool.num_free
    pipeline.misuse = misuse
    with pytest.raises(error) as caught:
        run(runner, "culprit", 2)
    assert isinstance(caught.value, WorldlineError)
    assert caught.value.field == field
    assert str(caught.value)
    assert pipeline.hooks() == [("close", "culprit")]
    assert_only_the_culprit_suffers(runner, before, free)
    pipeline.misuse = None
    run(runner, "other", 2)
    run(runner, "culprit", 0)
    runner.check_integrity()


def test_a_pipeline_that_closes_its_kv_and_says_nothing_loses_the_session(
    runner: ARDiffusionModelRunner, pipeline: Misusing
) -> None:
    before, free = kv_of(runner, "other"), runner.cache.pool.num_free

    def close(_request: ARDiffusionRequest) -> DiffusionOutput:
        assert pipeline.bound is not None
        pipeline.bound.close()
        return DiffusionOutput()

    pipeline.forward = close  # type: ignore[method-assign]
    with pytest.raises(KVStateError, match="closed the KV of session 'culprit'"):
        run(runner, "culprit", 2)
    assert pipeline.hooks() == [("close", "culprit")]
    assert_only_the_culprit_suffers(runner, before, free)


def test_a_binding_that_swallows_errors_hides_no_failure(
    runner: ARDiffusionModelRunner, pipeline: Misusing, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, free = kv_of(runner, "other"), runner.cache.pool.num_free
    bind = pipeline.bind_ar_diffusion_state

    @contextmanager
    def swallowing(session_id: str, state: ARDiffusionKVState) -> Iterator[None]:
        with suppress(Exception), bind(session_id, state):
            yield

    monkeypatch.setattr(pipeline, "bind_ar_diffusion_state", swallowing)
    pipeline.misuse = two_commits
    with pytest.raises(KVStateError, match="bind_ar_diffusion_state hid why"):
        run(runner, "culprit", 2)
    assert_only_the_culprit_suffers(runner, before, free)


@pytest.mark.parametrize(
    ("error", "builtin"),
    [(UnknownNameError, KeyError), (FrameAlignmentError, AssertionError), (FrameAlignmentError, ValueError)],
)
def test_plain_python_catches_it_too(error: type[WorldlineError], builtin: type[Exception]) -> None:
    assert issubclass(error, builtin)
    assert str(error("which one", field="x")) == "which one"


# ---------------------------------------------------------------------------------------------------- keeping


USES: dict[str, Callable[[ARDiffusionKVState], object]] = {
    "get_kv_caches": lambda state: state.get_kv_caches("main", seq_len=16, commit_current=True),
    "prepare": lambda state: state.prepare_paged_context("main"),
    "commit": lambda state: state.commit_paged_context("main"),
    "populate": lambda state: state.populate_cross_attention("main", "text", layers(2)),
    "get": lambda state: state.get_cross_attention_kv("main", "text"),
    "populated": lambda state: state.is_cross_attention_populated("main", "text"),
    "clear": lambda state: state.clear_cross_attention(),
    "reset": lambda state: state.reset(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_kept_state_is_of_no_use_between_calls(
    runner: ARDiffusionModelRunner, pipeline: Misusing, use: Callable[[ARDiffusionKVState], object]
) -> None:
    kept, before = pipeline.states[0], kv_of(runner, "other")
    assert kept.session_id == "other"
    with pytest.raises(KVStateError, match="not bound"):
        use(kept)
    assert kept.adapter("main").absolute_frames == 2, "looking at its position is allowed"
    assert all(torch.equal(a, b) for a, b in zip(kv_of(runner, "other"), before, strict=True))
    runner.check_integrity()


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_state_kept_from_another_session_fails_the_session_that_uses_it(
    runner: ARDiffusionModelRunner, pipeline: Misusing, use: Callable[[ARDiffusionKVState], object]
) -> None:
    kept, before, free = pipeline.states[0], kv_of(runner, "other"), runner.cache.pool.num_free
    pipeline.misuse = lambda _state: use(kept)
    with pytest.raises(KVStateError, match="'other' is not bound"):
        run(runner, "culprit", 2)
    assert_only_the_culprit_suffers(runner, before, free)


def test_a_kept_handle_or_context_writes_nothing_between_calls(
    runner: ARDiffusionModelRunner, pipeline: Misusing
) -> None:
    kept: list[Any] = []

    def leave_open(request: ARDiffusionRequest) -> DiffusionOutput:
        assert pipeline.bound is not None
        kept.extend(pipeline.bound.get_kv_caches("main", seq_len=16)[:1])
        kept.append(pipeline.bound.prepare_paged_context("main"))
        return DiffusionOutput()

    pipeline.forward = leave_open  # type: ignore[method-assign]
    run(runner, "other", 2)
    pages = runner.cache.k_pages[0].clone()
    handle, context = kept
    for write in (
        lambda: handle.write_and_attend(GOOD, GOOD + 5, GOOD),
        lambda: context.write_and_attend(0, GOOD, GOOD + 5, GOOD),
        lambda: handle.metadata,
    ):
        with pytest.raises(KVStateError, match="not bound"):
            write()
    assert torch.equal(runner.cache.k_pages[0], pages)


# ---------------------------------------------------------------------------------------------------- hooks


@pytest.mark.parametrize("release", ["close_session", "reset_session", "eviction", "failure"])
def test_a_hook_that_raises_releases_all_the_same(
    runner: ARDiffusionModelRunner, pipeline: Misusing, release: str
) -> None:
    before, free = kv_of(runner, "other"), runner.cache.pool.num_free

    def hook() -> None:
        raise InvalidArgumentError("the hook failed", field="hook")

    pipeline.on_close = pipeline.on_reset = hook
    if release == "eviction":
        runner.execute_model(ARDiffusionRequest(tick=make_tick("other", 2)))  # used last, so the culprit goes
        before, free = kv_of(runner, "other"), runner.cache.pool.num_free
        run(runner, "third", 0)
        pipeline.on_close = lambda: None
        runner.close_session("third")
    elif release == "failure":
        pipeline.misuse = CASES[0][1]
        with pytest.raises(KVStateError):
            run(runner, "culprit", 2)
    else:
        with pytest.raises(InvalidArgumentError, match="the hook failed"):
            getattr(runner, release)("culprit")
    assert_only_the_culprit_suffers(runner, before, free)
