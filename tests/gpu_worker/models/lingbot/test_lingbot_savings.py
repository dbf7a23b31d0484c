"""Work that is done once, at the end never again, or not at all; and what must not be kept for it."""

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

from contracts.errors import InvalidArgumentError
from gpu_worker.capability import ARDiffusionRequest
from gpu_worker.models.lingbot_world.conditioning import EncoderState
from gpu_worker.models.lingbot_world.pipeline import LingBotWorldPipeline
from gpu_worker.stepwise import StepRequest, StepSchedule
from support.lingbot_model import TINY
from support.lingbot_worlds import Worlds, held, picture

WALK = [held("w", "w", "w"), held("wl", "l", ""), held("d", "di", "i")]
STEPS = ("prepare_encode", "prepare_next_chunk", "denoise_step", "step_scheduler", "post_decode")


def count_calls(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that gets one entry a call."""
    run, calls = getattr(owner, name), []

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(name)
        return run(*arguments, **options)

    monkeypatch.setattr(owner, name, counted)
    return calls


def is_at_rest(pipeline: LingBotWorldPipeline, session: str = "w") -> bool:
    encoder = pipeline._worlds[session].encoder
    return encoder is not None and encoder.condition is not None


def run_until_at_rest(worlds: Worlds) -> list[Any]:
    outputs = [worlds.tick(control=WALK[0])]
    while not is_at_rest(worlds.pipeline):
        assert len(outputs) < 40, "the image never passes through"
        outputs.append(worlds.tick(control=WALK[len(outputs) % 3]))
    return outputs


# ---------------------------------------------------------------------------------------------------- the encoder


def test_an_encoder_at_rest_is_not_run_and_no_bit_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    resting, running = Worlds(), Worlds()
    made = run_until_at_rest(resting)
    calls = count_calls(resting.pipeline._encoder, "_call", monkeypatch)
    for _ in range(3):
        made.append(resting.tick(control=WALK[len(made) % 3]))
    assert calls == []

    calls = count_calls(running.pipeline._encoder, "_call", monkeypatch)
    for index, expected in enumerate(made):
        if index:
            world = running.pipeline._worlds["w"]
            assert world.encoder is not None
            running.pipeline._worlds["w"] = replace(world, encoder=EncoderState(world.encoder.history))
        again = running.tick(control=WALK[index % 3])
        assert torch.equal(again.payload["latents"], expected.payload["latents"]), index
        assert torch.equal(again.frames, expected.frames), index
    assert len(calls) == 3 * len(made)


@pytest.mark.parametrize("end", ["reset", "close"])
def test_a_world_that_begins_anew_is_encoded_anew(end: str) -> None:
    worlds, fresh = Worlds(), Worlds()
    run_until_at_rest(worlds)
    worlds.reset() if end == "reset" else worlds.runner.close_session("w")
    worlds._next.clear()

    for control in WALK:
        again, first = (one.tick(control=control, images=(picture(9),)) for one in (worlds, fresh))
        assert torch.equal(again.payload["latents"], first.payload["latents"])
        assert torch.equal(again.frames, first.frames)
        assert not is_at_rest(worlds.pipeline)


# ---------------------------------------------------------------------------------------------------- the camera


@pytest.mark.parametrize("stepped", [False, True], ids=["ticks", "step by step"])
def test_the_camera_is_modulated_once_for_the_five_passes_of_a_chunk_and_anew_for_the_next(
    stepped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    worlds = Worlds(stepped=stepped)
    model, seen = worlds.pipeline._transformer, []
    calls = [count_calls(block, "camera_affine", monkeypatch) for block in model.blocks]
    run = model.forward

    def forward(latents: torch.Tensor, timestep: float, *, chunk: Any, **options: Any) -> torch.Tensor:
        seen.append(chunk.camera)
        return run(latents, timestep, chunk=chunk, **options)

    monkeypatch.setattr(model, "forward", forward)
    for index, control in enumerate(WALK):
        worlds.tick(control=control)
        assert [len(block) for block in calls] == [index + 1] * TINY.num_layers
    assert len(seen) == 15
    assert [camera is seen[5 * (place // 5)] for place, camera in enumerate(seen)] == [True] * 15
    assert not torch.equal(seen[0][0][0], seen[5][0][0])


# ---------------------------------------------------------------------------------------------------- the order


def test_a_tick_and_single_steps_are_the_same_calls_in_the_same_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks, stepped = Worlds(), Worlds(stepped=True)
    traces = []
    for worlds in (ticks, stepped):
        trace: list[str] = []
        traces.append(trace)
        for name in STEPS:
            _record(worlds.pipeline, name, trace, monkeypatch)
        for _ in range(2):
            worlds.tick()

    chunk = [*STEPS[:2], *STEPS[2:4] * 4, STEPS[4]]
    assert traces == [chunk * 2, chunk * 2]


def test_a_clip_is_prepared_once_and_its_chunks_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    worlds, trace = Worlds(), []
    for name in STEPS:
        _record(worlds.pipeline, name, trace, monkeypatch)
    request = ARDiffusionRequest(
        prompt="rain", images=(picture(),), extra_args={"camera_action_script": [[["w"]] * 3] * 2}
    )
    outputs, finished = [], False
    while not finished:
        first = StepRequest("w", None if trace else request, seed=1)
        result = worlds.runner.execute_stepwise(StepSchedule((first,)))
        assert result is not None
        outputs.append(result.output is not None)
        finished = result.finished

    assert trace == [STEPS[0], *[STEPS[1], *STEPS[2:4] * 4, STEPS[4]] * 2]
    assert outputs == [True, True]


def test_a_clip_that_nobody_waits_for_any_more_leaves_nothing() -> None:
    worlds = Worlds()
    request = ARDiffusionRequest(
        prompt="rain", images=(picture(),), extra_args={"camera_action_script": [[["w"]] * 3] * 3}
    )
    worlds.runner.execute_stepwise(StepSchedule((StepRequest("w", request, seed=1),)))
    assert list(worlds.pipeline._worlds) == ["w"]

    worlds.runner.execute_stepwise(StepSchedule((), {"w"}))

    kept = (worlds.pipeline._worlds, worlds.pipeline._decoded, worlds.pipeline._prompts)
    assert kept == ({}, {}, {})
    assert worlds.runner.session_ids == ()
    worlds.runner.check_integrity()


def _record(owner: Any, name: str, trace: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *arguments: trace.append(name) or run(*arguments))


# ---------------------------------------------------------------------------------------------------- not at all


@pytest.mark.parametrize(
    "params", [{"output_type": "pil"}, {"num_frames": 21}, {"height": 480, "width": 832}], ids=str
)
def test_what_is_refused_is_refused_before_anything_is_encoded(
    params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    worlds = Worlds()
    encoded = [
        count_calls(owner, name, monkeypatch)
        for owner, name in (
            (worlds.pipeline._encoder, "encode"),
            (worlds.pipeline._text, "_embed"),
            (worlds.pipeline._transformer, "prepare_chunk"),
        )
    ]

    with pytest.raises(InvalidArgumentError) as caught:
        worlds.tick(params=params)

    assert caught.value.field in params
    assert encoded == [[], [], []]


# ---------------------------------------------------------------------------------------------------- released


@pytest.mark.parametrize("end", ["reset", "close", "evict", "fail"])
def test_what_a_session_held_is_free_once_it_has_ended_and_others_keep_theirs(end: str) -> None:
    worlds, alone = Worlds(), Worlds()
    for world in (worlds, alone):
        world.tick("other", seed=2)
    worlds.tick()
    worlds.tick()
    held_tensors = [weakref.ref(tensor) for tensor in _tensors_of(worlds.pipeline, "w")]
    assert len(held_tensors) > 16

    if end == "reset":
        worlds.reset()
    elif end == "close":
        worlds.runner.close_session("w")
    elif end == "evict":
        worlds.tick("other", seed=2)
        worlds.tick("third")
        assert worlds.runner.session_ids == ("other", "third")
        alone.tick("other", seed=2)
    else:
        with pytest.raises(InvalidArgumentError):
            worlds.tick(params={"flow_shift": -1})
    gc.collect()

    assert [one for one in held_tensors if one() is not None] == []
    again, expected = (world.tick("other", seed=2) for world in (worlds, alone))
    assert torch.equal(again.payload["latents"], expected.payload["latents"])
    assert torch.equal(again.frames, expected.frames)


def _tensors_of(pipeline: LingBotWorldPipeline, session: str) -> list[torch.Tensor]:
    encoder = pipeline._worlds[session].encoder
    assert encoder is not None
    slots = [*encoder.history, *pipeline._decoded[session].history]
    return [slot for slot in slots if isinstance(slot, torch.Tensor)]
