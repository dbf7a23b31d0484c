"""The conformance suite: sound pipelines pass it, and each fault fails the check that is made for it."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from typer.testing import CliRunner

from gpu_worker.conformance import Outcome, Subject, run_conformance
from gpu_worker.conformance.__main__ import app
from gpu_worker.conformance.memory import live_bytes
from gpu_worker.conformance.suite import CHECKS, check_names, passed
from support.broken_pipelines import BROKEN, DividesByZeroLater, NeverCommits, Sound, Stepping
from support.sketch_pipeline import WorldPipeline
from support.tree import REPOSITORY

torch.set_num_threads(1)

CPU = torch.device("cpu")


def outcomes(factory: Any, **options: Any) -> dict[str, Outcome]:
    return {result.name: result.outcome for result in run_conformance(Subject(factory, **options))}


def failed(found: dict[str, Outcome]) -> list[str]:
    return [name for name, outcome in found.items() if outcome is Outcome.FAILED]


# ---------------------------------------------------------------------------------------------------- sound ones


def test_the_published_sketch_passes_with_the_one_session_that_it_allows() -> None:
    found = outcomes(WorldPipeline)
    assert found == dict.fromkeys(check_names(), Outcome.PASSED) | {
        "interleaving": Outcome.NOT_APPLICABLE,
        "step_execution": Outcome.NOT_APPLICABLE,
    }


def test_the_sketch_with_two_sessions_passes_every_check_in_bfloat16_too() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert outcomes(Stepping, dtype=dtype) == dict.fromkeys(check_names(), Outcome.PASSED)


# ---------------------------------------------------------------------------------------------------- faulty ones


def test_every_check_has_a_pipeline_that_fails_it() -> None:
    assert tuple(BROKEN) == check_names()


@pytest.mark.parametrize(
    ("check", "pipeline"),
    [
        pytest.param(check, pipeline, id=pipeline.__name__)
        for check, kinds in BROKEN.items()
        for pipeline in kinds
    ],
)
def test_a_fault_fails_its_own_check_and_no_other(check: str, pipeline: type[Sound]) -> None:
    found = outcomes(pipeline)
    without = {other.name for other in CHECKS if check in other.needs or check == "spec"}

    assert failed(found) == [check]
    assert {name for name, outcome in found.items() if outcome is Outcome.NOT_RUN} == without


def test_a_spec_that_plans_are_not_made_with_is_a_fault() -> None:
    other = replace(
        WorldPipeline(device=torch.device("cpu"), dtype=torch.float32).ar_diffusion_kv_cache_spec()
    )
    same = Subject(WorldPipeline, planned_spec=lambda config: other)
    smaller = Subject(WorldPipeline, planned_spec=lambda config: replace(other, window_frames=1))

    assert run_conformance(same)[0].outcome is Outcome.PASSED
    assert (
        run_conformance(smaller)[0].message == "the spec that plans are made with is not the pipeline's own"
    )


def test_two_faults_are_told_with_their_own_messages() -> None:
    class Two(NeverCommits, DividesByZeroLater):
        pass

    results = {result.name: result for result in run_conformance(Subject(Two))}

    assert results["finite_output"].message == "payload 'latents' of chunk 5 is not finite everywhere"
    assert "committed no frame" in results["rolling_window"].message
    assert results["failure"].message == "needs rolling_window"
    assert not passed(results.values())


def test_a_pipeline_that_can_be_built_only_once_is_told_so_and_nothing_is_raised() -> None:
    built: list[object] = []

    def once(**circumstances: Any) -> NeverCommits:
        if built:
            raise OSError("the checkpoint is locked")
        built.append(NeverCommits(**circumstances))
        return built[0]

    results = {result.name: result for result in run_conformance(Subject(once))}

    assert results["rolling_window"].outcome is Outcome.FAILED
    assert results["memory"].message == "OSError: the checkpoint is locked"
    assert list(results) == list(check_names())


def test_what_a_compiler_keeps_is_no_tensor_of_the_session() -> None:
    before = live_bytes(CPU)
    real = torch.empty(1000, dtype=torch.float32)
    with FakeTensorMode():
        traced = torch.empty(1000)
    assert live_bytes(CPU) - before == real.nbytes == traced.nbytes


def test_a_prompt_that_never_matters_is_no_fault() -> None:
    class Blind(Sound):
        def use_prompt(self, kv: Any, state: Any, prompt: str | None) -> None:
            super().use_prompt(kv, state, None)

    assert outcomes(Blind)["prompt_switch"] is Outcome.NOT_APPLICABLE


def test_parameters_reach_the_pipeline() -> None:
    class Asks(Sound):
        def forward(self, request: Any) -> Any:
            assert (request.params["fov"], request.images) == (60, ("a.png",))
            return super().forward(request)

    assert failed(outcomes(Asks, params={"fov": 60, "images": ["a.png"]})) == []
    assert "identity" in failed(outcomes(Asks))


def test_the_page_on_adapters_names_every_check() -> None:
    page = (REPOSITORY / "docs" / "adapters.md").read_text(encoding="utf-8")
    rows = page.partition("| check | asks |")[2].partition("\n\n")[0]
    assert re.findall(r"`([a-z_]+)`", " ".join(row.split("|")[1] for row in rows.splitlines()[2:])) == list(
        check_names()
    )


# ---------------------------------------------------------------------------------------------------- the command


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "gpu_worker.conformance", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=100)


def test_the_reference_world_passes_every_check_by_the_command() -> None:
    done = command("reference", "--json", "--config", "session_capacity=3", "--param", "fov=60")
    document = json.loads(done.stdout)

    assert (done.returncode, document["model"], document["passed"]) == (0, "reference", True)
    assert [check["name"] for check in document["checks"]] == list(check_names())
    assert {check["outcome"] for check in document["checks"]} == {"passed"}
    assert all(check["message"] for check in document["checks"])


def test_the_command_prints_a_table_and_exits_with_1_for_a_faulty_model() -> None:
    done = command("reference", "--config", "windw_frames=3")

    assert done.returncode == 1
    assert "windw_frames" in done.stdout
    assert done.stdout.count("not run") == len(CHECKS)


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (("nothing",), 78, "installed pipelines: "),
        (("reference", "--device", "abacus"), 78, "abacus"),
        (("reference", "--dtype", "int8"), 78, "int8"),
        (("reference", "--param", "fov"), 2, "K=JSON"),
        (("reference", "--config", "x={"), 2, "config x"),
        ((), 2, "MODEL"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_the_command_refuses_what_makes_no_sense(
    arguments: tuple[str, ...], status: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("logging.disable", lambda level: None)
    done = CliRunner().invoke(app, arguments)

    assert (done.exit_code, done.stdout) == (status, "")
    assert text in done.stderr
