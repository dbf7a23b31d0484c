"""Reset and close over the engine's RPC, on both sides."""

from types import SimpleNamespace
from typing import Any

import pytest

from contracts.errors import InvalidArgumentError, SessionError
from gpu_worker.omni_lifecycle import ARDiffusionWorkerExtension, ARDiffusionWorkerLifecycle
from support.kv_pipeline import RecordingPipeline, make_runner
from support.omni_doubles import AsyncOmni


def omni(answers: Any) -> AsyncOmni:
    double = AsyncOmni(lambda tick, params: ())
    double.rpc = lambda method, session_id: answers
    return double


@pytest.mark.parametrize("what", ["reset", "close"])
async def test_a_call_names_method_session_stages_and_limit(what: str) -> None:
    double = omni([True])
    lifecycle = ARDiffusionWorkerLifecycle(double, stage_ids=(0, 2), timeout=3.5)

    await getattr(lifecycle, f"{what}_session")("world-1")

    method = f"{what}_ar_diffusion_session"
    assert double.called == [{"method": method, "timeout": 3.5, "args": ("world-1",), "stage_ids": [0, 2]}]


@pytest.mark.parametrize("stage_ids", [(), (-1,), (True,), (0, "1"), (0.0,), (None,)])
def test_stages_are_integers_and_at_least_one(stage_ids: Any) -> None:
    with pytest.raises(ValueError, match="stage_ids") as caught:
        ARDiffusionWorkerLifecycle(omni([True]), stage_ids=stage_ids)
    assert isinstance(caught.value, InvalidArgumentError)


@pytest.mark.parametrize(
    "answers",
    [
        True,
        [True],
        [[True], [True, True]],
        ({"result": [True]},),
        {"result": {"result": (True,)}},
        [[True, None]],
    ],
    ids=repr,
)
async def test_verdicts_are_found_however_they_are_nested(answers: Any) -> None:
    await ARDiffusionWorkerLifecycle(omni(answers), stage_ids=[0]).close_session("w")


@pytest.mark.parametrize(
    "answers",
    [
        [],
        None,
        [None],
        {},
        [{"result": None}],
        ["True"],
        [1],
        [True, False],
        [[True], [[False]]],
        {"result": False},
    ],
    ids=repr,
)
async def test_no_verdict_or_a_false_one_is_an_error(answers: Any) -> None:
    with pytest.raises(SessionError, match="not supported by every selected worker"):
        await ARDiffusionWorkerLifecycle(omni(answers), stage_ids=[0]).reset_session("w")


@pytest.mark.parametrize(
    "answers",
    [
        {"supported": False, "error": "not an AR stage"},
        [[True], {"supported": False, "error": "not an AR stage"}],
        [{"result": [{"error": "not an AR stage"}]}],
    ],
    ids=repr,
)
async def test_an_answer_that_says_why_not_is_told(answers: Any) -> None:
    with pytest.raises(SessionError, match="not an AR stage"):
        await ARDiffusionWorkerLifecycle(omni(answers), stage_ids=[0]).close_session("w")


# ---------------------------------------------------------------------------------------------------- workers' side


class Worker(ARDiffusionWorkerExtension):
    def __init__(self, runner: Any) -> None:
        self.model_runner = runner


def test_a_worker_has_its_runner_release_the_session() -> None:
    pipeline = RecordingPipeline()
    worker = Worker(make_runner(pipeline))

    assert worker.reset_ar_diffusion_session("a") is True
    assert worker.close_ar_diffusion_session("b") is True
    assert pipeline.hooks() == [("reset", "a"), ("close", "b")]


def test_a_runner_without_sessions_says_no() -> None:
    worker = Worker(SimpleNamespace())
    assert worker.reset_ar_diffusion_session("a") is False
    assert worker.close_ar_diffusion_session("a") is False


@pytest.mark.parametrize("session_id", ["", " ", None, 3])
def test_a_worker_refuses_an_empty_session_id(session_id: Any) -> None:
    with pytest.raises(ValueError, match="session_id"):
        Worker(make_runner(RecordingPipeline())).close_ar_diffusion_session(session_id)
