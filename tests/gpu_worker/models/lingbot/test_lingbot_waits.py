"""A chunk waits for its device once, however it is run: all that the host must know is read together, at the end."""

import io

import pytest
import torch
from PIL import Image

from gpu_worker.models.lingbot_world.steps import read_together
from support.device_reads import DeviceReads
from support.lingbot_worlds import Worlds, held

LAYER_NUMBERS = "gpu_worker/kv/layer.py"
"""Reads the numbers of the layers, which are tensors for the compiler's sake and never on a device."""

AT_THE_END = "gpu_worker/models/lingbot_world/steps.py tolist"
TEXT_LIBRARY = "masking_utils.py __bool__"
"""The text encoder's library asks whether there is padding, once a prompt; not in all of its versions."""

AFTER_A_NEW_PROMPT = ([TEXT_LIBRARY, AT_THE_END], [AT_THE_END])


def stored_image() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (48, 32), "teal").save(buffer, "PNG")
    return buffer.getvalue()


def reads_of_a_tick(worlds: Worlds, prompt: str = "rain", **changes: object) -> list[str]:
    with DeviceReads(host=[LAYER_NUMBERS]) as reads:
        worlds.tick("w", prompt, held("w", "wl", ""), images=(stored_image(),), **changes)
    assert reads.operators == []
    return reads.found


def at_rest(worlds: Worlds) -> bool:
    encoder = worlds.pipeline._worlds["w"].encoder
    return encoder is not None and encoder.condition is not None


@pytest.mark.parametrize("stepped", [False, True], ids=["ticks", "step by step"])
def test_a_chunk_is_read_once_at_its_end(stepped: bool) -> None:
    worlds = Worlds(stepped=stepped)

    # A first chunk, chunks whose encoder may have come to rest, and chunks without an encoder.
    reads = [reads_of_a_tick(worlds) for _ in range(2)]
    while not at_rest(worlds):
        reads.append(reads_of_a_tick(worlds))
    reads += [reads_of_a_tick(worlds) for _ in range(2)]

    assert reads[0] in AFTER_A_NEW_PROMPT
    assert reads[1:] == [[AT_THE_END]] * (len(reads) - 1)


def test_latents_alone_are_read_once_too() -> None:
    worlds = Worlds()
    reads_of_a_tick(worlds)

    assert reads_of_a_tick(worlds, params={"output_type": "latent"}) == [AT_THE_END]


def test_a_new_prompt_costs_one_more_at_most_and_a_known_one_none() -> None:
    worlds = Worlds()
    reads_of_a_tick(worlds, "rain")

    assert reads_of_a_tick(worlds, "snow") in AFTER_A_NEW_PROMPT
    assert reads_of_a_tick(worlds, "rain") == [AT_THE_END], "its embedding was remembered"


def test_reading_between_the_steps_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    worlds = Worlds()
    reads_of_a_tick(worlds)
    advance = worlds.pipeline.step_scheduler

    def looking(state: object, prediction: torch.Tensor) -> None:
        float(prediction.mean())
        prediction[prediction > 0]
        advance(state, prediction)  # type: ignore[arg-type]

    monkeypatch.setattr(worlds.pipeline, "step_scheduler", looking)
    with DeviceReads(host=[LAYER_NUMBERS]) as reads:
        worlds.tick("w", "rain", images=(stored_image(),))

    here = "tests/gpu_worker/models/lingbot/test_lingbot_waits.py __float__"
    assert reads.found == [*[here] * 4, AT_THE_END]
    assert reads.operators == ["aten::index.Tensor"] * 4


def test_what_is_known_already_is_not_read() -> None:
    yes, no = torch.tensor(True), torch.tensor(False)

    with DeviceReads() as reads:
        assert read_together(True, False) == [True, False]
    assert reads.found == []
    with DeviceReads() as reads:
        assert read_together(yes, False, no, True) == [True, False, False, True]
    assert reads.found == [AT_THE_END]
