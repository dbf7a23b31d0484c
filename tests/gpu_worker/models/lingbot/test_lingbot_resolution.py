"""Which size pictures have."""

from typing import Any

import pytest

from contracts.errors import InvalidArgumentError
from gpu_worker.models.lingbot_world.resolution import latent_frames, target_resolution


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ((832, 480), (464, 832)),  # the square root falls just short of 480
        ((480, 832), (832, 480)),
        ((512, 512), (624, 624)),
        ((1280, 720), (464, 832)),
        ((640, 480), (544, 720)),
    ],
)
def test_the_source_s_shape_is_kept_at_about_the_largest_area(
    source: tuple[int, int], expected: tuple[int, int]
) -> None:
    width, height = source

    assert target_resolution(height, width) == expected


def test_a_size_that_is_asked_for_wins() -> None:
    assert target_resolution(1, 1, 480, 832) == (480, 832)
    assert target_resolution(1, 1, 16, 16) == (16, 16)


@pytest.mark.parametrize(
    ("height", "width", "field"),
    [
        (480, None, "width"),
        (None, 832, "height"),
        (0, 832, "height"),
        (480, -16, "width"),
        (True, 832, "height"),
        (480.0, 832, "height"),
        (480, "832", "width"),
        (488, 832, "height"),
        (480, 840, "width"),
        (496, 832, "height"),
    ],
)
def test_a_size_is_refused_by_the_name_of_the_side(height: Any, width: Any, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        target_resolution(480, 832, height, width)
    assert caught.value.field == field


@pytest.mark.parametrize(("source", "field"), [((0, 5), "source_height"), ((5, True), "source_width")])
def test_a_source_has_a_size(source: tuple[int, int], field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        target_resolution(*source)
    assert caught.value.field == field


def test_a_source_may_be_too_narrow() -> None:
    with pytest.raises(InvalidArgumentError, match="narrow") as caught:
        target_resolution(1, 100_000)
    assert caught.value.field == "image"


def test_pixel_frames_are_whole_blocks_of_latent_frames() -> None:
    assert (latent_frames(9), latent_frames(129)) == (3, 33)


@pytest.mark.parametrize("num_frames", [0, -3, 1, 5, 10, 13, True, 9.0, None])
def test_other_numbers_of_pixel_frames_are_refused(num_frames: Any) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        latent_frames(num_frames)
    assert caught.value.field == "num_frames"
