"""Camera pictures: decoded within limits, cropped, resized, stitched, and shown to the model."""

import io
import math
import struct
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from contracts.errors import InvalidArgumentError
from gpu_worker.models.dreamzero import pictures
from gpu_worker.models.dreamzero.embodiment import Embodiment, Place
from gpu_worker.models.dreamzero.pictures import (
    check_views,
    decode_picture,
    fit_view,
    stitch,
    to_pixels,
)
from support.dreamzero_worlds import camera, png
from support.kv_cache import CPU

ROBOT = Embodiment(
    name="arm",
    prompt="{language}",
    view_height=8,
    view_width=12,
    layout=((Place("wrist", 2),), (Place("left"), Place("right"))),
    optional_views=frozenset({"right"}),
    state=(),
    action=(),
    relative=frozenset(),
)
SHOWN = {view: camera(seed) for seed, view in enumerate(("wrist", "left", "right"))}


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


# ---------------------------------------------------------------------------------------------------- decoding


@pytest.mark.parametrize("kind", ["PNG", "BMP", "WEBP"])
def test_a_picture_is_decoded_whatever_its_format(kind: str) -> None:
    picture = camera(1)
    options = {"lossless": True} if kind == "WEBP" else {}

    assert np.array_equal(
        decode_picture(encoded(Image.fromarray(picture), kind, **options), "images.a"), picture
    )


def test_a_jpeg_is_close_to_what_it_was() -> None:
    picture = camera(1)
    found = decode_picture(encoded(Image.fromarray(picture), "JPEG", quality=95), "images.a")
    assert np.abs(found.astype(int) - picture).mean() < 4


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK"])
def test_other_colours_become_rgb(mode: str) -> None:
    picture = Image.new("RGB", (20, 10), "red").convert(mode)
    assert decode_picture(picture, "images.a").shape == (10, 20, 3)


def test_arrays_and_tensors_of_bytes_are_pictures_already() -> None:
    picture = camera(2)
    for source in (picture, torch.from_numpy(picture.copy()), Image.fromarray(picture)):
        assert np.array_equal(decode_picture(source, "images.a"), picture)


@pytest.mark.parametrize(
    "source",
    [
        b"",
        b"no picture",
        png(camera(1))[:40],
        png(camera(1))[: len(png(camera(1))) // 2],
        encoded(Image.new("RGB", (8, 8)), "GIF"),
        encoded(Image.new("RGB", (8, 8)), "TIFF"),
    ],
)
def test_what_does_not_decode_is_named_and_says_nothing_of_our_libraries(source: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^images.wrist can't be decoded") as caught:
        decode_picture(source, "images.wrist")
    assert caught.value.field == "images.wrist"


@pytest.mark.parametrize("source", [None, 7, "redis:a", [1], {"a": 1}])
def test_what_is_no_picture_at_all_is_named(source: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="must be a picture") as caught:
        decode_picture(source, "images.wrist")
    assert caught.value.field == "images.wrist"


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((3, 8, 12), np.uint8),
        np.zeros((8, 12), np.uint8),
        np.zeros((8, 12, 4), np.uint8),
        np.zeros((1, 8, 12, 3), np.uint8),
        np.zeros((8, 12, 3), np.float32),
    ],
)
def test_an_array_of_a_wrong_shape_is_named(array: np.ndarray) -> None:
    with pytest.raises(InvalidArgumentError, match=r"images.wrist must be uint8") as caught:
        decode_picture(array, "images.wrist")
    assert caught.value.field == "images.wrist"


def test_a_picture_with_too_many_pixels_is_refused_before_it_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = png(camera(1))
    monkeypatch.setattr(pictures, "MAX_PIXELS", 20 * 32 - 1)
    monkeypatch.setattr(Image.Image, "convert", lambda *_: pytest.fail("it was decoded"))
    with pytest.raises(InvalidArgumentError, match=r"images.left is too large: 32 x 20") as caught:
        decode_picture(source, "images.left")
    assert caught.value.field == "images.left"


def test_a_file_with_too_many_bytes_is_refused_before_it_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "MAX_BYTES", 100)
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("it was opened"))
    with pytest.raises(InvalidArgumentError, match="too large: 101 bytes"):
        decode_picture(b"x" * 101, "images.left")


def test_a_decompression_bomb_is_too_large() -> None:
    small = encoded(Image.new("1", (8, 8)))
    head = (
        b"IHDR" + struct.pack(">II", 40_000, 30_000) + small[24:29]
    )  # what a file says of itself, before any pixel
    bomb = small[:12] + head + struct.pack(">I", zlib.crc32(head)) + small[33:]
    with pytest.raises(InvalidArgumentError, match="too large: at most"):
        decode_picture(bomb, "images.left")


@pytest.mark.parametrize(
    "source",
    [
        encoded(Image.fromarray(np.full((8, 8), 300, np.uint16))),
        Image.new("I", (8, 8)),
        Image.new("F", (8, 8)),
    ],
)
def test_a_picture_of_more_than_8_bits_a_value_is_refused_and_not_made_white(source: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"images.depth must have 8 bits") as caught:
        decode_picture(source, "images.depth")
    assert caught.value.field == "images.depth"


def test_a_picture_of_which_nothing_is_left_in_the_middle_is_too_small() -> None:
    with pytest.raises(InvalidArgumentError, match="too small: 1 x 9"):
        decode_picture(np.zeros((9, 1, 3), np.uint8), "images.left")


# ---------------------------------------------------------------------------------------------------- fitting


def triangle_resize(line: np.ndarray, size: int) -> np.ndarray:
    """The last axis at `size` places, antialiased: every place is the mean of what lies below a triangle."""
    length = line.shape[-1]
    scale = length / size
    reach = max(scale, 1.0)
    out = np.zeros((*line.shape[:-1], size))
    for place in range(size):
        centre = (place + 0.5) * scale
        weights = np.array([max(0.0, 1 - abs((i + 0.5 - centre) / reach)) for i in range(length)])
        out[..., place] = line @ (weights / weights.sum())
    return out


@pytest.mark.parametrize(
    ("height", "width", "to"),
    [(180, 320, (176, 320)), (40, 60, (8, 12)), (5, 7, (8, 12)), (21, 33, (16, 24))],
)
def test_the_middle_is_resized_smoothly(height: int, width: int, to: tuple[int, int]) -> None:
    picture = np.random.default_rng(3).integers(0, 256, (height, width, 3), np.uint8)
    rows, columns = math.floor(0.95 * height), math.floor(0.95 * width)
    top, left = round((height - rows) / 2), round((width - columns) / 2)
    middle = picture[top : top + rows, left : left + columns].astype(float).transpose(2, 0, 1)
    expected = triangle_resize(triangle_resize(middle, to[1]).transpose(0, 2, 1), to[0]).transpose(0, 2, 1)

    found = fit_view(picture, *to)

    assert found.shape == (*to, 3)
    assert found.dtype == np.uint8
    assert np.abs(found.transpose(2, 0, 1) - expected).max() <= 0.5 + 1e-2, (
        "rounding, and a little of float32"
    )


def test_a_plain_picture_stays_plain() -> None:
    assert (fit_view(np.full((30, 50, 3), 77, np.uint8), 8, 12) == 77).all()


# ---------------------------------------------------------------------------------------------------- stitching


def test_views_stand_in_their_places_and_a_stretched_one_has_every_column_twice() -> None:
    found = stitch(SHOWN, ROBOT)
    fitted = {view: fit_view(picture, 8, 12) for view, picture in SHOWN.items()}

    assert found.shape == (16, 24, 3)
    assert np.array_equal(found[:8, 0::2], fitted["wrist"])
    assert np.array_equal(found[:8, 1::2], fitted["wrist"])
    assert np.array_equal(found[8:, :12], fitted["left"])
    assert np.array_equal(found[8:, 12:], fitted["right"])


def test_a_view_that_is_named_twice_is_shown_twice() -> None:
    twice = replace(ROBOT, layout=((Place("wrist"), Place("wrist")),))
    found = stitch({"wrist": SHOWN["wrist"]}, twice)

    assert np.array_equal(found[:, :12], found[:, 12:])


def test_a_view_that_may_be_missing_is_black_then() -> None:
    shown = {view: SHOWN[view] for view in ("wrist", "left")}
    check_views(shown, ROBOT)

    found = stitch(shown, ROBOT)

    assert not found[8:, 12:].any()
    assert np.array_equal(found[:, :12], stitch(SHOWN, ROBOT)[:, :12])


@pytest.mark.parametrize(
    ("views", "field"),
    [
        (("left", "right"), "images.wrist"),
        (("wrist", "right"), "images.left"),
        ((), "images.left"),
        (("wrist", "left", "right", "above"), "images.above"),
    ],
)
def test_a_view_that_is_missing_or_unknown_is_named(views: tuple[str, ...], field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        check_views(dict.fromkeys(views, "redis:a"), ROBOT)
    assert caught.value.field == field


# ---------------------------------------------------------------------------------------------------- pixels


def test_bytes_become_values_from_minus_one_to_one_rounded_as_a_share_first() -> None:
    picture = np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(3, axis=2)

    exact = to_pixels(picture, CPU, torch.float32)
    rough = to_pixels(picture, CPU, torch.bfloat16)

    assert exact.shape == (1, 3, 16, 16)
    assert torch.equal(exact[0, 0], torch.from_numpy(picture[..., 0]).float() / 255 * 2 - 1)
    assert torch.equal(rough, (((exact + 1) / 2).bfloat16()) * 2 - 1)
