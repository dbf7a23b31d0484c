"""Reset and close over the engine's RPC: each line of the contract, over doubles of the published shapes."""

from typing import Any

import pytest

from contracts.errors import InvalidArgumentError, InvalidTypeError, SessionError
from gpu_worker.omni_rpc import ARDiffusionOmniLifecycle, ARDiffusionSessionMethods
from support.omni_doubles import AsyncOmniDouble, RunnerDouble

CALLS = ["reset_session", "close_session"]


@pytest.fixture
def engine() -> AsyncOmniDouble:
    return AsyncOmniDouble()


# --- 1: the call
@pytest.mark.parametrize(
    ("call", "method"),
    [
        ("reset_session", "reset_ar_diffusion_session"),
        ("close_session", "close_ar_diffusion_session"),
    ],
)
async def test_the_call_names_method_timeout_session_and_stages(
    engine: AsyncOmniDouble, call: str, method: str
) -> None:
    lifecycle = ARDiffusionOmniLifecycle(engine, (1, 2), timeout_s=5)
    await getattr(lifecycle, call)("world-1")
    assert engine.rpcs == [{"method": method, "timeout": 5.0, "args": ("world-1",), "stage_ids": [1, 2]}]
    assert engine.runner.calls == [(call.removesuffix("_session"), "world-1")] * 2


async def test_an_engine_that_answers_at_once_will_do() -> None:
    class Blocking:
        def collective_rpc(self, **_: Any) -> Any:
            return [True]

    await ARDiffusionOmniLifecycle(Blocking(), [0]).close_session("world-1")


# --- 2: stages
@pytest.mark.parametrize("stage_ids", [[], (), None, 1, "1", [-1], [0, -1], [True], [False], [1.0], ["1"]])
def test_stage_ids_are_ints_of_at_least_0_and_not_none_of_them(
    engine: AsyncOmniDouble, stage_ids: Any
) -> None:
    with pytest.raises(InvalidArgumentError, match="stage_ids") as caught:
        ARDiffusionOmniLifecycle(engine, stage_ids)
    assert isinstance(caught.value, ValueError)
    assert caught.value.field == "stage_ids"


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf"), True, "5", None])
def test_the_timeout_is_a_positive_number(engine: AsyncOmniDouble, timeout_s: Any) -> None:
    with pytest.raises(ValueError, match="timeout_s"):
        ARDiffusionOmniLifecycle(engine, [0], timeout_s=timeout_s)


def test_an_engine_that_calls_no_workers_is_refused() -> None:
    with pytest.raises(InvalidTypeError, match="object has no collective_rpc"):
        ARDiffusionOmniLifecycle(object(), [0])  # type: ignore[arg-type]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("session_id", ["", "  ", None, 3])
async def test_without_a_session_nothing_is_called(
    engine: AsyncOmniDouble, call: str, session_id: Any
) -> None:
    with pytest.raises(ValueError, match="session_id"):
        await getattr(ARDiffusionOmniLifecycle(engine, [0]), call)(session_id)
    assert engine.rpcs == []


# --- 3 and 4: results
@pytest.mark.parametrize(
    "results",
    [
        True,
        [True],
        [[True], (True, [True])],
        {"result": True},
        [{"result": [True, {"result": (True,)}]}],
        {"supported": True, "result": True, "error": None},
        [None, "text", 1, True],
    ],
)
@pytest.mark.parametrize("call", CALLS)
async def test_it_succeeds_when_every_bool_is_true_however_deep(
    engine: AsyncOmniDouble, call: str, results: Any
) -> None:
    engine.rpc_result = results
    await getattr(ARDiffusionOmniLifecycle(engine, [0]), call)("world-1")


@pytest.mark.parametrize(
    "results",
    [
        False,
        [],
        {},
        [True, False],
        [[True], [{"result": (True, [False])}]],
        [None, 1, "True"],
        {"other": True},
        [{"supported": False}, True],
        {"supported": False, "result": True},
    ],
)
@pytest.mark.parametrize("call", CALLS)
async def test_it_fails_without_a_bool_or_with_a_false_one(
    engine: AsyncOmniDouble, call: str, results: Any
) -> None:
    engine.rpc_result = lambda _: results
    with pytest.raises(SessionError, match="not supported by every selected worker"):
        await getattr(ARDiffusionOmniLifecycle(engine, [0]), call)("world-1")


@pytest.mark.parametrize(
    "results",
    [
        {"supported": False, "error": "not an AR stage"},
        [True, {"supported": False, "error": "not an AR stage"}],
        [[{"result": {"supported": False, "error": "not an AR stage"}}]],
        {"error": "not an AR stage", "result": True},
        [True, RuntimeError("not an AR stage")],
    ],
)
@pytest.mark.parametrize("call", CALLS)
async def test_a_part_that_reports_an_error_fails_with_its_text(
    engine: AsyncOmniDouble, call: str, results: Any
) -> None:
    engine.rpc_result = results
    with pytest.raises(SessionError, match="not an AR stage") as caught:
        await getattr(ARDiffusionOmniLifecycle(engine, [0]), call)("world-1")
    assert isinstance(caught.value, RuntimeError)


# --- 5: the workers' side
@pytest.mark.parametrize("call", ["reset", "close"])
def test_a_worker_delegates_to_its_runner_and_says_so(call: str) -> None:
    runner = RunnerDouble()
    method = getattr(ARDiffusionSessionMethods(runner), f"{call}_ar_diffusion_session")
    assert method("world-1") is True
    assert runner.calls == [(call, "world-1")]


@pytest.mark.parametrize("call", ["reset", "close"])
def test_a_worker_whose_runner_keeps_no_sessions_says_so(call: str) -> None:
    assert getattr(ARDiffusionSessionMethods(object()), f"{call}_ar_diffusion_session")("world-1") is False


@pytest.mark.parametrize("call", ["reset", "close"])
@pytest.mark.parametrize("session_id", ["", " ", None])
def test_a_worker_refuses_an_empty_session_id(call: str, session_id: Any) -> None:
    runner = RunnerDouble()
    with pytest.raises(ValueError, match="session_id"):
        getattr(ARDiffusionSessionMethods(runner), f"{call}_ar_diffusion_session")(session_id)
    assert runner.calls == []


async def test_a_stage_without_sessions_fails_the_whole_call(engine: AsyncOmniDouble) -> None:
    engine.runner = object()  # type: ignore[assignment]
    with pytest.raises(SessionError, match="not supported by every selected worker"):
        await ARDiffusionOmniLifecycle(engine, [0, 1]).close_session("world-1")


async def test_what_a_worker_raises_comes_out_unchanged(engine: AsyncOmniDouble) -> None:
    engine.runner.fails["close"] = 1
    with pytest.raises(RuntimeError, match="scripted failure of a close"):
        await ARDiffusionOmniLifecycle(engine, [0]).close_session("world-1")
