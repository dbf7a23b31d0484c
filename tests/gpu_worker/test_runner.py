"""The runner: sessions, flags, eviction, failures, warm-up."""

import logging
import weakref
from typing import Any

import pytest
import torch

from contracts.errors import (
    CapacityError,
    ConfigurationError,
    InvalidArgumentError,
    InvalidTypeError,
    KVStateError,
    NotResidentError,
)
from gpu_worker import device as device_module
from gpu_worker import runner as runner_module
from gpu_worker.capability import WARMUP_SESSION_ID, ARDiffusionRequest
from gpu_worker.runner import ARDiffusionModelRunner, RunnerOptions
from support.kv_cache import CPU
from support.kv_pipeline import RecordingPipeline, WarmingPipeline, make_runner, make_tick


@pytest.fixture
def pipeline() -> RecordingPipeline:
    return RecordingPipeline()


@pytest.fixture
def runner(pipeline: RecordingPipeline) -> ARDiffusionModelRunner:
    return make_runner(pipeline)


def run(
    runner: ARDiffusionModelRunner, session_id: str = "world", chunk_index: int = 0, **changes: Any
) -> Any:
    request = ARDiffusionRequest(tick=make_tick(session_id, chunk_index, **changes))
    return runner.execute_model(request, seed=5)


def pool_is_empty(runner: ARDiffusionModelRunner) -> bool:
    runner.check_integrity()
    return (
        runner.cache.pool.num_free == runner.cache.pool.num_usable
        and runner.cache.request_ids == ()
        and runner.cache.cross_attention.session_ids == ()
    )


class BoomError(Exception):
    pass


def boom() -> None:
    raise BoomError("boom")


# ---------------------------------------------------------------------------------------------------- set-up


@pytest.mark.parametrize(
    "method",
    [
        "ar_diffusion_kv_cache_spec",
        "bind_ar_diffusion_state",
        "reset_ar_diffusion_session",
        "close_ar_diffusion_session",
        "forward",
    ],
)
def test_a_pipeline_that_lacks_a_method_is_a_type_error(pipeline: RecordingPipeline, method: str) -> None:
    setattr(pipeline, method, None)
    with pytest.raises(TypeError, match=f"SupportsARDiffusionPipeline.*{method}") as caught:
        make_runner(pipeline)
    assert isinstance(caught.value, InvalidTypeError)


def test_a_spec_of_another_type_is_a_type_error(pipeline: RecordingPipeline) -> None:
    pipeline.ar_diffusion_kv_cache_spec = lambda: {"num_layers": 1}  # type: ignore[assignment, method-assign, return-value]
    with pytest.raises(TypeError, match="ARDiffusionKVCacheSpec"):
        make_runner(pipeline)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_num_seqs": 2}, "max_num_seqs"),
        ({"supports_request_batch": True}, "request-batch execution"),
    ],
)
def test_more_than_one_request_at_a_time_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text) as caught:
        RunnerOptions(**options)
    assert isinstance(caught.value, ConfigurationError)


def test_a_batch_of_requests_is_refused(runner: ARDiffusionModelRunner) -> None:
    with pytest.raises(RuntimeError, match="request-batch execution"):
        runner.execute_model_batch([ARDiffusionRequest(), ARDiffusionRequest()])


def test_too_little_memory_fails_at_start(pipeline: RecordingPipeline) -> None:
    with pytest.raises(CapacityError, match=r"available=1 bytes, required=\d+ bytes"):
        make_runner(pipeline, available_bytes=1)


def test_a_smaller_capacity_than_asked_only_warns(
    pipeline: RecordingPipeline, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        small = make_runner(pipeline, available_bytes=1200)
    assert small.capacity == 1
    assert "1 resident sessions fit" in caplog.text


def test_deploy_overrides_reach_the_cache(pipeline: RecordingPipeline) -> None:
    runner = make_runner(pipeline, kv={"window_chunks": 5, "sink_chunks": 1}, session_capacity=1)
    assert (runner.cache.window.window_chunks, runner.cache.window.sink_chunks, runner.capacity) == (5, 1, 1)


def test_without_a_device_there_is_no_free_memory() -> None:
    with pytest.raises(RuntimeError, match="no device"):
        device_module.free_memory_bytes(None)


def test_free_memory_of_the_system_is_what_the_cpu_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_module.free_memory_bytes(CPU) > 1 << 20
    monkeypatch.setattr("builtins.open", lambda *_args, **_kwargs: (_ for _ in ()).throw(FileNotFoundError()))
    assert device_module.free_memory_bytes(CPU) > 1 << 20


def test_free_memory_of_an_unknown_kind_of_device_must_be_set() -> None:
    with pytest.raises(ConfigurationError, match="available_bytes"):
        device_module.free_memory_bytes(torch.device("meta"))


def test_the_pool_is_allocated_by_load_and_once(pipeline: RecordingPipeline) -> None:
    runner = ARDiffusionModelRunner(
        pipeline, device=CPU, dtype=torch.float32, options=RunnerOptions(available_bytes=1 << 20)
    )
    with pytest.raises(KVStateError, match="load"):
        _ = runner.cache
    assert runner.memory()["allocated_bytes"] == 0
    runner.load()
    cache = runner.cache
    runner.load()
    assert runner.cache is cache
    assert 0 < runner.memory()["allocated_bytes"] <= runner.memory()["planned_bytes"]


# ---------------------------------------------------------------------------------------------------- sessions


def test_the_session_is_the_ticks_then_the_extra_args_then_default(
    runner: ARDiffusionModelRunner, pipeline: RecordingPipeline
) -> None:
    runner.execute_model(ARDiffusionRequest(tick=make_tick("t"), extra_args={"session_id": "other"}))
    runner.execute_model(ARDiffusionRequest(extra_args={"session_id": "e"}))
    runner.execute_model(ARDiffusionRequest())
    assert [call for call in pipeline.calls if call[0] == "bind"] == [
        ("bind", "t"),
        ("bind", "e"),
        ("bind", "default"),
    ]


def test_a_session_keeps_its_state_from_request_to_request(
    runner: ARDiffusionModelRunner, pipeline: RecordingPipeline
) -> None:
    means = [float(run(runner, chunk_index=index).payload["mean"]) for index in range(4)]
    assert means == [0, 0.5, 1.5, 2.5]
    assert len({id(state) for state in pipeline.states}) == 1
    assert runner.cache.request_ids == ("ar::world::main",)


def test_the_state_is_bound_during_the_forward_only(
    runner: ARDiffusionModelRunner, pipeline: RecordingPipeline
) -> None:
    bound: list[bool] = []
    pipeline.before_output = lambda: bound.append(pipeline.bound is not None)
    assert pipeline.bound is None
    run(runner)
    assert bound == [True]
    assert pipeline.bound is None


def test_the_output_comes_back_unchanged_with_the_ticks_identity(runner: ARDiffusionModelRunner) -> None:
    output = run(runner, applied_event_ids=(3, 4))
    assert output.metadata["ar_diffusion"] == {
        "session_id": "world",
        "request_id": "world-0",
        "chunk_index": 0,
        "applied_event_ids": [3, 4],
    }


def test_a_tick_that_continues_a_session_which_is_not_here_is_refused(
    runner: ARDiffusionModelRunner, pipeline: RecordingPipeline
) -> None:
    run(runner, "a")
    run(runner, "b")
    with pytest.raises(NotResidentError, match="not resident") as caught:
        run(runner, "c", 1)
    assert caught.value.code == "not_resident"
    assert runner.session_ids == ("a", "b"), "nobody was evicted for it"
    assert pipeline.hooks() == []


def test_a_tick_that_resets_beyond_chunk_0_is_refused_before_the_reset(
    runner: ARDiffusionModelRunner, pipeline: RecordingPipeline
) -> None:
    run(runner, "a")
    with pytest.raises(NotResidentError, match="chunk 1"):
        runner.execute_model(ARDiffusionRequest(tick=make_tick("a", 1, reset=True)))
    assert (runner.session_ids, pipeline.hooks()) == (("a",), [])
    run(runner, "a", 1)


def test_random_state_is_a_function_of_the_seed_and_continues(runner: ARDiffusionModelRunner) -> None:
    expected = torch.rand(3, generator=torch.Generator().manual_seed(5)).tolist()
    assert [float(run(runner, "a", index).payload["noise"]) for index in range(2)] == expected[:2]
    run(runner, "b")
    assert float(run(runner, "a", 2).payload["noise"]) == expected[2]
    runner.reset_session("a")
    assert float(run(runner, "a").payload["noise"]) == expected[0]


def test_other_random_state_of_the_process_does_not_matter(runner: ARDiffusionModelRunner) -> None:
    torch.manual_seed(1)
    first = float(run(runner, "a").payload["noise"])
    torch.manual_seed(2)
    assert float(run(runner, "b").payload["noise"]) == first


@pytest.mark.parametrize("seed", [-1, 2**63, True, 1.5])
def test_a_bad_seed_is_named_and_evicts_nobody(runner: ARDiffusionModelRunner, seed: Any) -> None:
    run(runner, "a")
    run(runner, "b")
    with pytest.raises(InvalidArgumentError, match="seed"):
        runner.execute_model(ARDiffusionRequest(tick=make_tick("c")), seed=seed)
    assert runner.session_ids == ("a", "b")


@pytest.mark.parametrize(
    ("extra_args", "field"),
    [
        ({"session_id": " "}, "session_id"),
        ({"session_id": 7}, "session_id"),
        ({"reset": 1}, "reset"),
        ({"close_session": "yes"}, "close_session"),
        (None, "extra_args"),
    ],
)
def test_malformed_extra_args_are_named(
    runner: ARDiffusionModelRunner, extra_args: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=field) as caught:
        runner.execute_model(ARDiffusionRequest(extra_args=extra_args))
    assert caught.value.field == field


def test_a_request_of_another_type_is_a_type_error(runner: ARDiffusionModelRunner) -> None:
    with pytest.raises(InvalidTypeError, match="dict") as caught:
        runner.execute_model({"prompt": "a valley"})  # type: ignore[arg-type]
    assert caught.value.field == "request"


# ---------------------------------------------------------------------------------------------------- release


@pytest.mark.parametrize("kind", ["reset", "close"])
def test_release_frees_kv_first_then_calls_the_hook(
    runner: ARDiffusionModelRunner, pipeline: RecordingPipeline, kind: str
) -> None:
    free_in_hook: list[int] = []
    hook = lambda: free_in_hook.append(runner.cache.pool.num_free)  # noqa: E731 - one of two hooks
    pipeline.on_reset = pipeline.on_close = hook
    run(runner)
    getattr(runner, f"{kind}_session")("world")
    assert pipeline.hooks() == [(kind, "world")]
    assert free_in_hook == [runner.cache.pool.num_usable]
    assert pool_is_empty(runner)
    run(runner)
    assert pipeline.states[0] is not pipeline.states[1]


@pytest.mark.parametrize("kind", ["reset", "close"])
def test_release_attempts_both_steps_and_raises_the_first_error(
    runner: ARDiffusionModelRunner,
    pipeline: RecordingPipeline,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    pipeline.on_reset = pipeline.on_close = boom
    run(runner)
    with pytest.raises(BoomError):
        getattr(runner, f"{kind}_session")("world")
    assert pool_is_empty(runner)

    run(runner)

    def failing_close(_state: object) -> None:
        raise OSError("first")

    monkeypatch.setattr("gpu_worker.kv.state.ARDiffusionKVState.close", failing_close)
    with pytest.raises(OSError, match="first"):
        getattr(runner, f"{kind}_session")("world")
    assert pipeline.hooks() == [(kind, "world")] * 2
    assert not runner.is_resident("world")


@pytest.mark.parametrize("session_id", ["", "  ", None])
def test_release_needs_a_session_id(runner: ARDiffusionModelRunner, session_id: Any) -> None:
    for release in (runner.reset_session, runner.close_session):
        with pytest.raises(ValueError, match="session_id"):
            release(session_id)


def test_a_reset_flag_starts_again_before_the_forward(
    runner: ARDiffusionModelRunner, pipeline: RecordingPipeline
) -> None:
    run(runner)
    run(runner, chunk_index=1)
    output = run(runner, reset=True)
    assert float(output.payload["mean"]) == 0
    assert pipeline.calls == [("bind", "world"), ("bind", "world"), ("reset", "world"), ("bind", "world")]
    runner.execute_model(ARDiffusionRequest(extra_args={"session_id": "world", "reset": True}))
    assert pipeline.hooks() == [("reset", "world")] * 2


def test_a_close_flag_releases_after_the_forward(
    runner: ARDiffusionModelRunner, pipeline: RecordingPipeline
) -> None:
    output = run(runner, close_session=True)
    assert output.error is None
    assert pipeline.hooks() == [("close", "world")]
    assert pool_is_empty(runner)


def test_a_state_does_not_outlive_its_session(
    pipeline: RecordingPipeline, runner: ARDiffusionModelRunner
) -> None:
    run(runner)
    state = weakref.ref(pipeline.states.pop())
    runner.close_session("world")
    assert state() is None


# ---------------------------------------------------------------------------------------------------- eviction


def test_the_least_recently_used_session_makes_room(
    runner: ARDiffusionModelRunner, pipeline: RecordingPipeline
) -> None:
    evicted: list[str] = []
    runner.on_evict = evicted.append
    for session_id in ("old", "new", "newest"):
        run(runner, session_id)
    assert runner.session_ids == ("new", "newest")
    assert pipeline.hooks() == [("close", "old")]
    assert evicted == ["old"]
    assert runner.cache.request_ids == ("ar::new::main", "ar::newest::main")
    assert runner.cache.cross_attention.session_ids == ("new", "newest")
    runner.check_integrity()
    with pytest.raises(NotResidentError):
        run(runner, "old", 1)


def test_use_makes_a_session_the_most_recent(runner: ARDiffusionModelRunner) -> None:
    run(runner, "a")
    run(runner, "b")
    run(runner, "a", 1)
    run(runner, "c")
    assert runner.session_ids == ("a", "c")


def test_a_failing_close_hook_does_not_stop_an_eviction(
    runner: ARDiffusionModelRunner, pipeline: RecordingPipeline, caplog: pytest.LogCaptureFixture
) -> None:
    run(runner, "a")
    run(runner, "b")
    pipeline.on_close = boom
    run(runner, "c")
    assert runner.session_ids == ("b", "c")
    assert "eviction" in caplog.text
    runner.check_integrity()


def test_a_failing_evict_callback_fails_the_request_that_needed_the_room(
    runner: ARDiffusionModelRunner, pipeline: RecordingPipeline
) -> None:
    run(runner, "a")
    run(runner, "b")
    runner.on_evict = lambda _session_id: boom()
    with pytest.raises(BoomError):
        run(runner, "c")
    assert runner.session_ids == ("b",)
    runner.check_integrity()
    assert run(runner, "c").error is None


# ---------------------------------------------------------------------------------------------------- failures


def fail_in_forward(pipeline: RecordingPipeline, _monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline.before_output = boom


def fail_in_synchronize(_pipeline: RecordingPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize(_device: torch.device) -> None:
        raise BoomError("asynchronous error")

    monkeypatch.setattr(runner_module, "synchronize", synchronize)


@pytest.mark.parametrize("fail", [fail_in_forward, fail_in_synchronize])
@pytest.mark.parametrize("hook_fails", [False, True])
def test_a_failed_forward_releases_the_session_and_no_other(
    runner: ARDiffusionModelRunner,
    pipeline: RecordingPipeline,
    monkeypatch: pytest.MonkeyPatch,
    fail: Any,
    hook_fails: bool,
) -> None:
    run(runner, "other")
    run(runner, "world")
    free = runner.cache.pool.num_free
    samples = len(runner.timings_ms)
    with monkeypatch.context() as patch:
        fail(pipeline, patch)
        if hook_fails:
            patch.setattr(pipeline, "on_close", lambda: (_ for _ in ()).throw(OSError("hook")))
        with pytest.raises(BoomError):
            run(runner, "world", 1)
    pipeline.before_output = lambda: None
    assert pipeline.bound is None
    assert pipeline.hooks() == [("close", "world")]
    assert runner.session_ids == ("other",)
    assert runner.cache.pool.num_free == free + 1
    assert len(runner.timings_ms) == samples
    runner.check_integrity()

    with pytest.raises(NotResidentError):
        run(runner, "world", 1)
    assert float(run(runner, "world").payload["mean"]) == 0
    assert float(run(runner, "other", 1).payload["mean"]) == 0.5


def test_a_cancelled_forward_releases_too(
    runner: ARDiffusionModelRunner, pipeline: RecordingPipeline
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    pipeline.before_output = interrupt
    with pytest.raises(KeyboardInterrupt):
        run(runner)
    assert pool_is_empty(runner)


def test_an_output_with_an_error_releases_the_session_and_is_returned(
    runner: ARDiffusionModelRunner, pipeline: RecordingPipeline
) -> None:
    pipeline.error = "out of ideas"
    assert run(runner, close_session=True).error == "out of ideas"
    assert pipeline.hooks() == [("close", "world")]
    assert pool_is_empty(runner)
    assert len(runner.timings_ms) == 0


def test_a_forward_that_returns_something_else_is_a_failure(
    runner: ARDiffusionModelRunner, pipeline: RecordingPipeline
) -> None:
    pipeline.forward = lambda _request: {"payload": 1}  # type: ignore[assignment, method-assign, return-value]
    with pytest.raises(TypeError, match="DiffusionOutput"):
        run(runner)
    assert pool_is_empty(runner)


def test_a_failed_reset_flag_is_raised_and_leaves_nothing(
    runner: ARDiffusionModelRunner, pipeline: RecordingPipeline
) -> None:
    run(runner)
    pipeline.on_reset = boom
    with pytest.raises(BoomError):
        run(runner, reset=True)
    assert pool_is_empty(runner)


def test_integrity_finds_what_belongs_to_nobody(runner: ARDiffusionModelRunner) -> None:
    run(runner)
    runner.cache.begin_request("stray", 0)
    with pytest.raises(KVStateError, match="timelines"):
        runner.check_integrity()


def test_integrity_finds_an_orphaned_cross_attention_cache(runner: ARDiffusionModelRunner) -> None:
    run(runner)
    layers = [(torch.ones(1, 2, 1, 1), torch.ones(1, 2, 1, 1))]
    runner.cache.cross_attention.populate("stray", "main", "text", layers)
    with pytest.raises(KVStateError, match="stray"):
        runner.check_integrity()


# ---------------------------------------------------------------------------------------------------- warm-up


def test_warm_up_runs_every_request_and_leaves_nothing() -> None:
    pipeline = WarmingPipeline()
    evicted: list[str] = []
    runner = make_runner(pipeline)
    runner.on_evict = evicted.append
    runner.warm_up()
    assert pipeline.calls == [
        ("bind", WARMUP_SESSION_ID),
        ("bind", WARMUP_SESSION_ID),
        ("close", WARMUP_SESSION_ID),
    ]
    assert WARMUP_SESSION_ID == "__ardiffusion_warmup__"
    assert pool_is_empty(runner)
    assert runner.session_ids == tuple(evicted) == ()
    assert len(runner.timings_ms) == 0


def test_warm_up_can_cover_a_reset() -> None:
    pipeline = WarmingPipeline()
    runner = make_runner(pipeline, kv={"warmup_capture_reset": True})
    runner.warm_up()
    assert [name for name, _ in pipeline.calls] == ["bind", "bind", "reset", "bind", "bind", "close"]
    assert pool_is_empty(runner)


@pytest.mark.parametrize("how", ["raises", "reports"])
def test_a_failed_warm_up_only_warns(how: str, caplog: pytest.LogCaptureFixture) -> None:
    pipeline = WarmingPipeline()
    if how == "raises":
        pipeline.before_output = boom
    else:
        pipeline.error = "boom"
    runner = make_runner(pipeline)
    runner.warm_up()
    assert "warm-up failed" in caplog.text
    assert pool_is_empty(runner)
    pipeline.before_output, pipeline.error = lambda: None, None
    assert run(runner).error is None


@pytest.mark.parametrize("options", [{"enforce_eager": True}, {"kv": {"warmup_cudagraph": False}}])
def test_warm_up_can_be_switched_off(options: dict[str, Any]) -> None:
    pipeline = WarmingPipeline()
    make_runner(pipeline, **options).warm_up()
    assert pipeline.calls == []


def test_a_pipeline_without_warm_up_requests_is_not_warmed_up(
    runner: ARDiffusionModelRunner, pipeline: RecordingPipeline
) -> None:
    runner.warm_up()
    assert pipeline.calls == []
