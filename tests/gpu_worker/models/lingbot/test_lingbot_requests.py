"""Prompts, first images and parameters: what they become, and how each is refused."""

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import interpolate

from contracts.errors import ConfigurationError, InvalidArgumentError, ModelError
from contracts.events import ARDiffusionControlInput
from contracts.lingbot import actions_control
from contracts.tick import ARDiffusionTickRequest
from gpu_worker.capability import ARDiffusionRequest
from gpu_worker.models.lingbot_world.camera import PictureSize
from gpu_worker.models.lingbot_world.images import first_image, one_image
from gpu_worker.models.lingbot_world.request import check_request
from gpu_worker.models.lingbot_world.text import REMEMBERED, TextEncoder
from gpu_worker.models.lingbot_world.trusted_root import TrustedRoot
from gpu_worker.models.lingbot_world.weights import Checkpoint
from support.kv_cache import CPU
from support.lingbot_checkpoint import SCHEDULER_CONFIG, change_json, write_checkpoint, write_shards
from support.lingbot_model import HEIGHT, TINY, WIDTH, seeded

# ---------------------------------------------------------------------------------------------------- text


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def load_text(folder: Path, text_dim: int = TINY.text_dim) -> TextEncoder:
    return TextEncoder.load(Checkpoint(folder), text_dim, device=CPU, dtype=torch.float32)


@pytest.fixture(scope="module")
def text(checkpoint: Path) -> TextEncoder:
    return load_text(checkpoint)


def test_a_prompt_is_512_vectors_and_padding_is_zero(text: TextEncoder) -> None:
    embedded = text("rain over the valley")

    used = embedded[0].abs().sum(dim=-1) > 0
    assert embedded.shape == (1, 512, TINY.text_dim)
    assert used.tolist() == [True] * 5 + [False] * 507  # four words, and the end


def test_a_prompt_that_is_too_long_is_cut(text: TextEncoder) -> None:
    embedded = text("river " * 600)

    assert embedded.shape == (1, 512, TINY.text_dim)
    assert bool((embedded[0].abs().sum(dim=-1) > 0).all())


def test_different_prompts_differ(text: TextEncoder) -> None:
    assert not torch.equal(text("snow falls"), text("rain falls"))


def test_the_last_prompts_are_remembered_whatever_their_spaces(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = load_text(checkpoint)
    asked: list[str] = []
    embed = text._embed
    monkeypatch.setattr(text, "_embed", lambda prompt: asked.append(prompt) or embed(prompt))

    for prompt in ("snow", " snow\n", "rain", "night", "river", "snow", "valley", "rain", "snow"):
        text(prompt)

    # "rain" was the oldest when "valley" came, because "snow" had been asked for again.
    assert asked == ["snow", "rain", "night", "river", "valley", "rain"]
    assert len(text._remembered) == REMEMBERED


@pytest.mark.parametrize("prompt", [None, "", "  \n", 7])
def test_a_prompt_that_is_none_is_refused(text: TextEncoder, prompt: object) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        text(prompt)
    assert caught.value.field == "prompt"


@pytest.mark.parametrize(
    "names", [["encoder.embed_tokens.weight"], ["encoder.embed_tokens.weight", "shared.weight"]]
)
def test_the_embedding_may_lie_under_either_of_its_names(
    tmp_path: Path, text: TextEncoder, names: list[str]
) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint")
    weights = dict(Checkpoint(folder).weights("text_encoder"))
    table = weights.pop("shared.weight")
    write_shards(folder / "text_encoder", "model", weights | {name: table.clone() for name in names}, 3)

    assert torch.equal(load_text(folder)("rain over snow"), text("rain over snow"))


def test_a_text_encoder_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(ConfigurationError) as caught:
        load_text(folder, text_dim=4096)
    assert caught.value.field == "d_model"
    change_json(folder / "text_encoder" / "config.json", vocab_size=8)
    with pytest.raises(ConfigurationError) as caught:
        load_text(folder)
    assert caught.value.field == "shared.weight"
    (folder / "tokenizer" / "tokenizer.json").write_text("{")
    change_json(folder / "text_encoder" / "config.json", vocab_size=42)
    with pytest.raises(ConfigurationError) as caught:
        load_text(folder)
    assert caught.value.field == "tokenizer"
    assert str(tmp_path) not in caught.value.message


# ---------------------------------------------------------------------------------------------------- images


def picture(width: int = WIDTH, height: int = HEIGHT) -> Image.Image:
    values = torch.randint(0, 256, (height, width, 3), generator=seeded(4), dtype=torch.uint8)
    return Image.fromarray(values.numpy())


def stored(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def test_a_picture_its_bytes_and_its_file_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "image.png").write_bytes(stored(picture()))
    root = TrustedRoot(tmp_path)

    made = [first_image(source, HEIGHT, WIDTH) for source in (picture(), stored(picture()))]
    made.append(first_image("image.png", HEIGHT, WIDTH, root=root))

    exact = torch.from_numpy(np.array(picture())).double() / 127.5 - 1
    assert made[0].shape == (1, 3, HEIGHT, WIDTH)
    torch.testing.assert_close(made[0][0].permute(1, 2, 0).double(), exact, rtol=0, atol=1e-6)
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0], made[2])


def test_a_file_that_was_taken_sideways_stands_upright() -> None:
    sideways = Image.Exif()
    sideways[0x0112] = 6  # to be turned by a quarter, clockwise
    lying = picture(HEIGHT, WIDTH)

    found = first_image(stored(lying, exif=sideways), HEIGHT, WIDTH)

    assert torch.equal(found, first_image(lying.transpose(Image.Transpose.ROTATE_270), HEIGHT, WIDTH))


def test_odd_data_beside_a_picture_are_no_reason_to_refuse_it() -> None:
    found = first_image(stored(picture(), exif=b"Exif\0\0MM\0*\xff\xff\xff\xff"), HEIGHT, WIDTH)

    assert torch.equal(found, first_image(picture(), HEIGHT, WIDTH))


def test_sixteen_bits_of_grey_keep_their_shades() -> None:
    shades = np.linspace(0, 65535, WIDTH).astype(np.uint16)

    found = first_image(stored(Image.fromarray(np.tile(shades, (HEIGHT, 1)))), HEIGHT, WIDTH)

    expected = torch.from_numpy(shades.astype(np.float32)) / 65535 * 2 - 1
    assert (found - expected).abs().max() <= 1 / 255


@pytest.mark.parametrize("mode", ["I", "F"])
def test_shades_without_a_white_are_refused(mode: str) -> None:
    with pytest.raises(InvalidArgumentError, match="the image can't be read"):
        first_image(Image.new(mode, (WIDTH, HEIGHT)), HEIGHT, WIDTH)


def test_tensors_of_every_range_are_the_same() -> None:
    unit = torch.rand(3, HEIGHT, WIDTH, generator=seeded(1))
    unit[0, 0, :2] = torch.tensor([0.0, 1.0])

    made = [first_image(value, HEIGHT, WIDTH) for value in (unit, unit * 255, unit * 2 - 1, unit[None])]

    for one in made:
        torch.testing.assert_close(one, unit[None] * 2 - 1, rtol=0, atol=1e-5)


def test_another_size_is_resized_after_scaling() -> None:
    unit = torch.rand(3, 20, 30, generator=seeded(1))
    expected = interpolate(unit[None] * 2 - 1, (HEIGHT, WIDTH), mode="bicubic", align_corners=False)

    assert torch.equal(first_image(unit, HEIGHT, WIDTH), expected)


def huge_png() -> bytes:
    """A header that claims 5000 x 5000 pixels; there is nothing to decode behind it."""
    header = struct.pack(">IIBBBBB", 5000, 5000, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + header
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))


@pytest.mark.parametrize(
    "source",
    [b"", b"no picture", stored(picture())[:200], huge_png(), stored(picture(), "GIF")],
    ids=["empty", "text", "cut", "huge", "another format"],
)
def test_what_is_no_picture_is_refused_in_one_way(source: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="the image can't be read") as caught:
        first_image(source, HEIGHT, WIDTH)
    assert caught.value.field == "images"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (torch.zeros(4, 8, 8), "shape"),
        (torch.zeros(2, 3, 8, 8), "shape"),
        (torch.full((3, 8, 8), torch.nan), "finite"),
        (torch.full((3, 8, 8), 256.0), "values in"),
        (torch.tensor([-1.5, 0.0, 1.0]).view(3, 1, 1), "values in"),
        (7, "picture"),
    ],
)
def test_an_image_that_is_none_is_refused(source: object, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text) as caught:
        first_image(source, HEIGHT, WIDTH)
    assert caught.value.field == "images"


def test_a_path_stays_beneath_the_root_and_out_of_messages(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "secret.png").write_bytes(stored(picture()))
    with pytest.raises(ConfigurationError, match="lingbot_action_root"):
        first_image("secret.png", HEIGHT, WIDTH)
    for path in ("../secret.png", str(tmp_path / "secret.png"), "missing.png"):
        with pytest.raises(InvalidArgumentError) as caught:
            first_image(path, HEIGHT, WIDTH, root=TrustedRoot(tmp_path / "root"))
        assert "secret" not in caught.value.message
        assert str(tmp_path) not in caught.value.message


@pytest.mark.parametrize("images", [(), (1, 2), None, ([picture()],)])
def test_there_is_exactly_one_image(images: object) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        one_image(images)
    assert caught.value.field == "images"
    assert one_image(("a",)) == "a"


# ---------------------------------------------------------------------------------------------------- parameters

HELD = actions_control((("w",), ("w",), ()))
SCRIPT = [[["w"], ["w"], []], [["l"], [], []]]


def tick(*controls: ARDiffusionControlInput, prompt: str | None = "rain") -> ARDiffusionTickRequest:
    return ARDiffusionTickRequest("s", "r", 0, (), prompt, controls)


def checked(params: dict[str, Any] | None = None, *, deployment: float | None = None, **changes: Any) -> Any:
    values = {"prompt": "rain", "tick": tick(HELD), "generator": seeded(), "params": params or {}} | changes
    return check_request(
        ARDiffusionRequest(**values),
        PictureSize(HEIGHT, WIDTH),
        flow_shift=deployment,
        scheduler=SCHEDULER_CONFIG | {"flow_shift": 3.0},
    )


def test_a_tick_is_one_chunk_with_pictures() -> None:
    made = checked()

    assert (made.prompt, made.chunks, made.decodes, made.reuse_last_step_kv) == ("rain", 1, True, False)
    full = {
        "num_inference_steps": 4,
        "max_sequence_length": 512,
        "num_outputs": 1,
        "num_frames": 9,
        "height": HEIGHT,
        "width": WIDTH,
        "output_type": "latent",
        "lingbot_reuse_last_step_kv": True,
    }
    made = checked(full)
    assert (made.decodes, made.reuse_last_step_kv) == (False, True)


def test_the_shift_is_the_requests_then_the_deployments_then_the_checkpoints() -> None:
    timesteps = [
        round(made.schedule.timesteps[1], 2)
        for made in (checked({"flow_shift": 2.5}, deployment=5.0), checked(deployment=5.0), checked())
    ]
    assert timesteps == [882.35, 937.5, 900.0]


def test_a_clip_has_a_script_or_a_directory() -> None:
    scripted = checked(tick=None, extra_args={"camera_action_script": SCRIPT})
    along = checked({"num_frames": 33}, tick=None, extra_args={"action_path": "00"})

    assert (scripted.chunks, scripted.num_frames, len(scripted.script)) == (2, 21, 2)
    assert (along.chunks, along.num_frames, along.action_path) == (3, 33, "00")
    with pytest.raises(ModelError, match="camera_action_script or action_path"):
        checked(tick=None)


OFFLINE = {"tick": None, "extra_args": {"camera_action_script": SCRIPT}}


@pytest.mark.parametrize(
    ("params", "changes", "field"),
    [
        ({"num_inference_steps": 5}, {}, "num_inference_steps"),
        ({"num_inference_steps": 4.0}, {}, "num_inference_steps"),
        ({"max_sequence_length": 256}, {}, "max_sequence_length"),
        ({"max_sequence_length": True}, {}, "max_sequence_length"),
        ({"num_outputs": 2}, {}, "num_outputs"),
        ({"height": HEIGHT}, {}, "width"),
        ({"height": HEIGHT, "width": WIDTH + 8}, {}, "width"),
        ({"height": HEIGHT, "width": WIDTH + 16}, {}, "width"),
        ({"height": 4096, "width": 4096}, {}, "height"),
        ({"num_frames": 21}, {}, "num_frames"),
        ({"num_frames": 10}, {}, "num_frames"),
        ({"num_frames": True}, {}, "num_frames"),
        ({"flow_shift": 10**400}, {}, "flow_shift"),
        ({"flow_shift": "5"}, {}, "flow_shift"),
        ({"output_type": "pil"}, {}, "output_type"),
        ({"output_type": ["latent"]}, {}, "output_type"),
        ({"lingbot_reuse_last_step_kv": 1}, {}, "lingbot_reuse_last_step_kv"),
        ({"latents": [0]}, {}, "latents"),
        ({"heigth": 32}, {}, "heigth"),
        ({"additional_information": {"action_path": "00"}}, {}, "action_path"),
        ({}, {"extra_args": {"camera_action_script": SCRIPT}}, "camera_action_script"),
        ({}, {"extra_args": {"action_path": "00"}}, "action_path"),
        ({"num_frames": 9}, OFFLINE, "camera_action_script"),
        ({"action_path": "00"}, OFFLINE, "camera_action_script"),
        ({}, {"tick": None, "extra_args": {"camera_action_script": [[["w"]]]}}, "camera_action_script"),
        ({}, {"generator": None}, "generator"),
        ({}, {"generator": [seeded()]}, "generator"),
        ({}, {"prompt": " "}, "prompt"),
        ({}, {"prompt": "snow"}, "prompt"),
        ({}, {"tick": tick()}, "controls"),
        ({}, {"tick": tick(HELD, HELD)}, "controls"),
        ({}, {"tick": tick(ARDiffusionControlInput("camera", "other.v1", {}))}, "schema"),
    ],
)
def test_what_can_not_be_followed_is_refused_by_name(
    params: dict[str, Any], changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        checked(params, **changes)
    assert caught.value.field == field
