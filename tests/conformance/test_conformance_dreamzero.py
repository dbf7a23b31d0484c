"""`dreamzero` over a tiny checkpoint keeps the contract; controls and images of ticks, as the suite takes them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from contracts.dreamzero import OBSERVATION_SCHEMA, OBSERVATION_TRACK
from contracts.events import ARDiffusionControlInput
from gpu_worker.conformance import Outcome, Subject, run_conformance
from gpu_worker.conformance.__main__ import app
from gpu_worker.conformance.suite import check_names
from gpu_worker.models.dreamzero.pipeline import DreamZeroPipeline
from gpu_worker.models.dreamzero.spec import kv_spec
from support.broken_pipelines import Sound
from support.dreamzero_worlds import VIEWS, arm, cameras, observed, pictures_of, png, shared_checkpoint

torch.set_num_threads(1)


def test_it_passes_every_check_that_applies() -> None:
    subject = Subject(
        DreamZeroPipeline,
        config={"checkpoint": str(shared_checkpoint())},
        params={"images": list(pictures_of(0)), "num_inference_steps": 1},
        planned_spec=lambda config: kv_spec({**config, "dtype": "float32"}),
        controls=lambda prompt: (observed(0, language=prompt),),
    )

    found = {result.name: (result.outcome, result.message) for result in run_conformance(subject)}

    assert found.pop("step_execution")[0] is Outcome.NOT_APPLICABLE
    assert {outcome for outcome, _ in found.values()} == {Outcome.PASSED}, found
    assert set(found) == set(check_names()) - {"step_execution"}


def test_the_command_hands_controls_and_images_to_every_tick(tmp_path: Path) -> None:
    options = ["dreamzero", "--json", "--config", f"checkpoint={json.dumps(str(shared_checkpoint()))}"]
    data = {"images": dict.fromkeys(VIEWS, "redis:a"), "state": arm(0), "language": "{prompt}"}
    options += ["--control", f"{OBSERVATION_TRACK}:{OBSERVATION_SCHEMA}:{json.dumps(data)}"]
    for view in VIEWS[:2]:  # one too few: the model says so, and no check passes that asks for a chunk
        (tmp_path / view).write_bytes(png(cameras(0)[view]))
        options += ["--image", str(tmp_path / view)]

    done = CliRunner().invoke(app, options)

    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert done.exit_code == 1
    assert checks["spec"]["outcome"] == "passed"
    assert "names 3 images, 2 came with it" in checks["identity"]["message"]


@pytest.mark.parametrize(
    "options", [["--control", "observation:v1"], ["--control", "a:b:{"], ["--image", "/nowhere/at/all.png"]]
)
def test_options_that_can_not_be_followed_are_told(options: list[str]) -> None:
    done = CliRunner().invoke(app, ["reference", *options])
    assert done.exit_code == 2
    assert "error: " in done.output


class ClaimsToBeginAnew(Sound):
    """Says that another prompt is another world, and goes on with the one it has."""

    begins_anew_on_prompt = True


def test_a_pipeline_that_only_says_that_it_begins_anew_is_found_out() -> None:
    found = {result.name: result.outcome for result in run_conformance(Subject(ClaimsToBeginAnew))}

    assert [name for name, outcome in found.items() if outcome is Outcome.FAILED] == ["prompt_switch"]


def test_every_tick_carries_the_controls_of_its_prompt() -> None:
    seen: list[Any] = []

    class Seeing(Sound):
        def forward(self, request: Any) -> Any:
            seen.append((request.prompt, request.tick.controls))
            return super().forward(request)

    def controls(prompt: str) -> tuple[ARDiffusionControlInput, ...]:
        return (ARDiffusionControlInput("light", "some.light.v1", {"of": prompt}),)

    results = run_conformance(Subject(Seeing, controls=controls))

    assert all(result.outcome is not Outcome.FAILED for result in results)
    assert len({prompt for prompt, _ in seen}) == 2
    assert all(carried == controls(prompt) for prompt, carried in seen)
