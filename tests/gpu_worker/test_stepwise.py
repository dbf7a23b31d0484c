"""Step execution: one request, a denoise step or a chunk at a time."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from contracts.errors import (
    ConfigurationError,
    InvalidArgumentError,
    InvalidTypeError,
    KVStateError,
    ModelError,
    NotResidentError,
)
from gpu_worker import runner as runner_module
from gpu_worker.capability import ARDiffusionRequest, StepState, SupportsStepExecution
from gpu_worker.runner import ARDiffusionModelRunner
from gpu_worker.stepwise import StepRequest, StepResult, StepSchedule
from support.kv_pipeline import RecordingPipeline, make_runner, make_tick
from support.step_pipeline import SteppingPipeline, Steps

NEW = ARDiffusionRequest(prompt="a lake", params={"chunks": 2})


@pytest.fixture
def pipeline() -> SteppingPipeline:
    return SteppingPipeline()


@pytest.fixture
def runner(pipeline: SteppingPipeline) -> ARDiffusionModelRunner:
    """One denoise step a call."""
    return make_runner(pipeline, group_steps=False)


def cycle(
    runner: ARDiffusionModelRunner,
    request_id: str = "r",
    request: ARDiffusionRequest | None = None,
    **changes: Any,
) -> StepResult:
    result = runner.execute_stepwise(StepSchedule((StepRequest(request_id, request, 5),), **changes))
    assert result is not None
    return result


def pool_is_empty(runner: ARDiffusionModelRunner) -> bool:
    runner.check_integrity()
    return runner.session_ids == () and runner.cache.pool.num_free == runner.cache.pool.num_usable


def value(result: StepResult) -> int | None:
    return None if result.output is None else int(result.output.payload["x"])


class BoomError(Exception):
    pass


def boom(_argument: object = None) -> None:
    raise BoomError("boom")


# ---------------------------------------------------------------------------------------------------- the oracle


def test_values_by_hand_a_step_at_a_time(runner: ARDiffusionModelRunner, pipeline: SteppingPipeline) -> None:
    results = [cycle(runner, request=NEW), *(cycle(runner) for _ in range(3))]
    assert pipeline.made[0].values == [12, 29, 68, 141]
    assert [value(result) for result in results] == [None, 29, None, 141]
    assert [result.finished for result in results] == [False, False, False, True]


def test_values_by_hand_a_chunk_at_a_time(pipeline: SteppingPipeline) -> None:
    runner = make_runner(pipeline)
    results = [cycle(runner, request=NEW), cycle(runner)]
    assert pipeline.made[0].values == [12, 29, 68, 141]
    assert [(value(result), result.finished) for result in results] == [(29, False), (141, True)]


@pytest.mark.parametrize("step_execution", [False, True])
def test_ticks_give_the_same_values_by_forward_and_by_steps(
    pipeline: SteppingPipeline, step_execution: bool
) -> None:
    runner = make_runner(pipeline, step_execution=step_execution)
    outputs = [
        runner.execute_model(ARDiffusionRequest(tick=make_tick("world", index)), seed=5) for index in range(2)
    ]
    assert [int(output.payload["x"]) for output in outputs] == [29, 141]
    assert [output.metadata["ar_diffusion"]["chunk_index"] for output in outputs] == [0, 1]
    assert runner.session_ids == ("world",)
    assert ("forward" in pipeline.trace) is not step_execution
    assert pipeline.contexts == [0, 0, 0, 1, 1, 1], "two probes and a commit a chunk, at the same position"
    assert len(runner.timings_ms) == 2


# ---------------------------------------------------------------------------------------------------- order, life


def test_the_step_functions_are_called_in_order(pipeline: SteppingPipeline) -> None:
    runner = make_runner(pipeline)
    cycle(runner, request=NEW)
    cycle(runner)
    chunk = ["chunk", "denoise", "scheduler", "denoise", "scheduler", "decode"]
    assert pipeline.trace == ["encode", *chunk, *chunk]
    assert isinstance(pipeline, SupportsStepExecution)
    assert isinstance(pipeline.made[0], StepState)


def test_the_session_is_the_request_and_is_bound_during_each_call_only(
    runner: ARDiffusionModelRunner, pipeline: SteppingPipeline
) -> None:
    cycle(runner, "request-7", NEW)
    assert pipeline.bound is None
    assert runner.session_ids == ("request-7",)
    assert runner.cache.request_ids == ("ar::request-7::main",)
    cycle(runner, "request-7")
    assert pipeline.bound is None
    assert [call for call in pipeline.calls if call[0] == "bind"] == [("bind", "request-7")] * 2


def test_committed_pages_stay_between_calls(
    runner: ARDiffusionModelRunner, pipeline: SteppingPipeline
) -> None:
    free = runner.cache.pool.num_free
    cycle(runner, request=NEW)
    assert runner.cache.pool.num_free == free, "a denoise step commits nothing"
    cycle(runner)
    assert runner.cache.pool.num_free == free - 1
    cycle(runner)
    assert pipeline.contexts == [0, 0, 0, 1]


def test_a_finished_request_is_closed(runner: ARDiffusionModelRunner, pipeline: SteppingPipeline) -> None:
    cycle(runner, request=NEW)
    for _ in range(3):
        assert pipeline.hooks() == []
        cycle(runner)
    assert pipeline.hooks() == [("close", "r")]
    assert pool_is_empty(runner)
    cycle(runner, request=NEW)
    assert pipeline.made[1].values == [12], "the same id is a new request"


def test_random_state_is_the_seeds_and_continues(
    runner: ARDiffusionModelRunner, pipeline: SteppingPipeline
) -> None:
    expected = torch.rand(2, generator=torch.Generator().manual_seed(5)).tolist()
    drawn: list[float] = []

    def draw(state: Steps) -> None:
        drawn.append(float(torch.rand(1, generator=state.request.generator)))

    pipeline.on["chunk"] = draw
    cycle(runner, request=NEW)
    for _ in range(2):
        cycle(runner)
    assert drawn == expected


@pytest.mark.parametrize("grouped", [False, True])
def test_one_synchronisation_and_one_timing_sample_a_chunk(
    pipeline: SteppingPipeline, monkeypatch: pytest.MonkeyPatch, grouped: bool
) -> None:
    waited: list[int] = []
    monkeypatch.setattr(runner_module, "synchronize", lambda _device: waited.append(len(pipeline.trace)))
    runner = make_runner(pipeline, group_steps=grouped)
    request: ARDiffusionRequest | None = ARDiffusionRequest(params={"chunks": 3})
    for _ in range(3 if grouped else 6):
        cycle(runner, request=request)
        request = None
    assert waited == [7, 13, 19], "after each chunk's last step function"
    assert len(runner.timings_ms) == 3


# ---------------------------------------------------------------------------------------------------- scheduling


def test_nothing_scheduled_is_nothing_done(
    runner: ARDiffusionModelRunner, pipeline: SteppingPipeline
) -> None:
    assert runner.execute_stepwise(StepSchedule()) is None
    assert pipeline.trace == []


def test_an_aborted_request_is_closed_even_when_nothing_is_scheduled(
    runner: ARDiffusionModelRunner, pipeline: SteppingPipeline
) -> None:
    cycle(runner, "r", NEW)
    runner.execute_model(ARDiffusionRequest(tick=make_tick("tick-session")))
    assert runner.execute_stepwise(StepSchedule((), {"r", "tick-session", "never heard of"})) is None
    assert runner.session_ids == ("tick-session",)
    assert pipeline.hooks() == [("close", "r")]
    runner.check_integrity()


def test_an_aborted_request_makes_room_for_the_scheduled_one(
    runner: ARDiffusionModelRunner, pipeline: SteppingPipeline
) -> None:
    for name in ("a", "b"):
        cycle(runner, name, NEW)
    cycle(runner, "c", NEW, finished_req_ids=["b"])
    assert runner.session_ids == ("a", "c")


def test_a_failing_hook_does_not_keep_an_aborted_request(
    runner: ARDiffusionModelRunner, pipeline: SteppingPipeline, caplog: pytest.LogCaptureFixture
) -> None:
    cycle(runner, "r", NEW)
    pipeline.on_close = boom
    runner.execute_stepwise(StepSchedule(finished_req_ids=["r"]))
    assert "abort" in caplog.text
    assert pool_is_empty(runner)


def test_two_scheduled_requests_are_refused(
    runner: ARDiffusionModelRunner, pipeline: SteppingPipeline
) -> None:
    both = StepSchedule((StepRequest("a", NEW), StepRequest("b", NEW)))
    with pytest.raises(RuntimeError, match="one request runs at a time, 2 are scheduled"):
        runner.execute_stepwise(both)
    assert pipeline.trace == []


def test_requests_take_turns_without_touching_each_other(
    runner: ARDiffusionModelRunner, pipeline: SteppingPipeline
) -> None:
    cycle(runner, "a", NEW)
    cycle(runner, "b", NEW)
    for name in ("b", "a", "a", "b", "b", "a"):
        cycle(runner, name)
    assert [steps.values for steps in pipeline.made] == [[12, 29, 68, 141]] * 2
    assert pool_is_empty(runner)


def test_a_request_that_was_evicted_does_not_go_on_as_a_fresh_one(
    runner: ARDiffusionModelRunner, pipeline: SteppingPipeline
) -> None:
    evicted: list[str] = []
    runner.on_evict = evicted.append
    for name in ("a", "b", "c"):
        cycle(runner, name, NEW)
    assert evicted == ["a"]
    with pytest.raises(NotResidentError, match="'a' is not under way") as caught:
        cycle(runner, "a")
    assert caught.value.field == "request_id"
    assert runner.session_ids == ("b", "c")


# ---------------------------------------------------------------------------------------------------- refusals


def test_step_execution_needs_step_functions() -> None:
    with pytest.raises(ValueError, match="step_execution=True") as caught:
        make_runner(RecordingPipeline(), step_execution=True)
    assert isinstance(caught.value, ConfigurationError)
    assert caught.value.field == "step_execution"
    assert make_runner(SteppingPipeline(), step_execution=True).capacity == 2


@pytest.mark.parametrize(
    "method", ["prepare_encode", "prepare_next_chunk", "denoise_step", "step_scheduler", "post_decode"]
)
def test_a_pipeline_that_lacks_one_step_function_has_no_step_execution(method: str) -> None:
    class Lacking(RecordingPipeline):
        pass

    for name in ("prepare_encode", "prepare_next_chunk", "denoise_step", "step_scheduler", "post_decode"):
        if name != method:
            setattr(Lacking, name, getattr(SteppingPipeline, name))
    with pytest.raises(ConfigurationError, match="SupportsStepExecution"):
        make_runner(Lacking(), step_execution=True)


def test_a_pipeline_without_step_functions_refuses_a_cycle() -> None:
    with pytest.raises(RuntimeError, match="step execution"):
        make_runner(RecordingPipeline()).execute_stepwise(StepSchedule((StepRequest("r", NEW),)))


def test_a_tick_inside_a_step_request_is_refused(
    runner: ARDiffusionModelRunner, pipeline: SteppingPipeline
) -> None:
    with pytest.raises(ValueError, match="tick") as caught:
        cycle(runner, request=ARDiffusionRequest(tick=make_tick("r")))
    assert isinstance(caught.value, InvalidArgumentError)
    assert pipeline.trace == []
    assert pool_is_empty(runner)


@pytest.mark.parametrize("request_id", ["", " ", None])
def test_a_request_has_an_id(runner: ARDiffusionModelRunner, request_id: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="session_id"):
        cycle(runner, request_id, NEW)


def test_a_request_begins_once(runner: ARDiffusionModelRunner, pipeline: SteppingPipeline) -> None:
    cycle(runner, "r", NEW)
    runner.execute_model(ARDiffusionRequest(tick=make_tick("world")))
    for name in ("r", "world"):
        with pytest.raises(KVStateError, match="exists already"):
            cycle(runner, name, NEW)
    with pytest.raises(KVStateError, match="step by step"):
        runner.execute_model(ARDiffusionRequest(tick=make_tick("r")))
    with pytest.raises(NotResidentError):
        cycle(runner, "world")
    assert set(runner.session_ids) == {"r", "world"}
    cycle(runner, "r")
    assert pipeline.made[0].values == [12, 29]


# ---------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("name", ["encode", "chunk", "denoise", "scheduler", "decode"])
@pytest.mark.parametrize("grouped", [False, True])
def test_a_failing_step_function_ends_the_request_and_no_other(
    pipeline: SteppingPipeline, name: str, grouped: bool
) -> None:
    runner = make_runner(pipeline, group_steps=grouped)
    cycle(runner, "other", NEW)
    before = pipeline.trace.count("denoise")
    pipeline.on[name] = boom
    request: ARDiffusionRequest | None = NEW
    with pytest.raises(BoomError):  # noqa: PT012 - which of the calls fails depends on the function
        for _ in range(3):
            cycle(runner, "r", request)
            request = None
    assert runner.session_ids == ("other",)
    assert pipeline.hooks() == [("close", "r")]
    assert pipeline.trace[-1] == name, "nothing runs after it"
    assert pipeline.trace.count("denoise") - before <= 2
    assert pipeline.bound is None
    runner.check_integrity()
    pipeline.on.clear()
    with pytest.raises(NotResidentError):
        cycle(runner, "r")
    cycle(runner, "other")
    assert pipeline.made[0].values[:2] == [12, 29]


def test_a_failing_synchronisation_ends_the_request(
    runner: ARDiffusionModelRunner, pipeline: SteppingPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    cycle(runner, request=NEW)
    with monkeypatch.context() as patch:
        patch.setattr(runner_module, "synchronize", boom)
        with pytest.raises(BoomError):
            cycle(runner)
    assert pipeline.hooks() == [("close", "r")]
    assert pool_is_empty(runner)
    assert len(runner.timings_ms) == 0
    cycle(runner, request=NEW)
    cycle(runner)
    assert pipeline.made[-1].values == [12, 29]


@pytest.mark.parametrize("grouped", [False, True])
def test_a_chunk_that_never_completes_fails(pipeline: SteppingPipeline, grouped: bool) -> None:
    def never(state: Steps) -> None:
        state.complete_after = 99

    pipeline.on["chunk"] = never
    runner = make_runner(pipeline, group_steps=grouped)
    request: ARDiffusionRequest | None = NEW
    with pytest.raises(RuntimeError, match="Chunk did not complete within 2 denoise steps") as caught:  # noqa: PT012
        for _ in range(5):
            cycle(runner, request=request)
            request = None
    assert isinstance(caught.value, ModelError)
    assert pipeline.trace.count("denoise") == 2
    assert pipeline.hooks() == [("close", "r")]
    assert pool_is_empty(runner)


def test_an_output_with_an_error_releases_the_request(
    runner: ARDiffusionModelRunner, pipeline: SteppingPipeline
) -> None:
    pipeline.error = "out of ideas"
    cycle(runner, request=NEW)
    result = cycle(runner)
    assert result.output is not None
    assert (result.output.error, result.finished) == ("out of ideas", True)
    assert pipeline.hooks() == [("close", "r")]
    assert pool_is_empty(runner)
    assert len(runner.timings_ms) == 0


BAD: list[tuple[str, str, Callable[[Any], Any], type[Exception], str]] = [
    ("no state", "prepare_encode", lambda _request: object(), InvalidTypeError, "state"),
    ("no output", "post_decode", lambda _state: {"x": 1}, InvalidTypeError, "output"),
    ("no steps", "prepare_next_chunk", lambda state: setattr(state, "num_steps", 0), ModelError, "num_steps"),
    ("bool", "prepare_next_chunk", lambda state: setattr(state, "num_steps", True), ModelError, "num_steps"),
]


@pytest.mark.parametrize(
    ("method", "function", "error", "field"), [case[1:] for case in BAD], ids=[case[0] for case in BAD]
)
def test_what_a_pipeline_returns_is_checked(
    pipeline: SteppingPipeline,
    method: str,
    function: Callable[[Any], Any],
    error: type[Exception],
    field: str,
) -> None:
    setattr(pipeline, method, function)
    runner = make_runner(pipeline)
    with pytest.raises(error, match=f"{method}|{field}") as caught:
        cycle(runner, request=NEW)
    assert caught.value.field == field  # type: ignore[attr-defined]
    assert pool_is_empty(runner)


def test_a_tick_is_one_chunk(pipeline: SteppingPipeline) -> None:
    def more(state: Steps) -> None:
        state.chunks = 2

    pipeline.on["chunk"] = more
    runner = make_runner(pipeline, step_execution=True)
    with pytest.raises(ModelError, match="one chunk"):
        runner.execute_model(ARDiffusionRequest(tick=make_tick()))
    assert pool_is_empty(runner)
