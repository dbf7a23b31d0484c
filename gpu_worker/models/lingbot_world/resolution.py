"""Which size pictures have: what a request asks for, or what fits the source image. Torch-free."""

from __future__ import annotations

import math
from typing import Final

from contracts.errors import InvalidArgumentError

MAX_AREA: Final = 480 * 832
SIDE_MULTIPLE: Final = 16
"""Pixels along each side of a token."""

_LATENT_PIXEL: Final = 8
_PATCH: Final = 2


def target_resolution(
    source_height: int, source_width: int, height: object = None, width: object = None
) -> tuple[int, int]:
    """(height, width) in pixels.

    Args:
        source_height, source_width: of the first image.
        height, width: what is asked for; both, or None twice: then the source's shape at about the largest area.

    Raises:
        InvalidArgumentError: only one is given, or one is no positive multiple of 16, or the area is too large.
    """
    if height is None and width is None:
        check_positive("source_height", source_height)
        check_positive("source_width", source_width)
        aspect = source_height / source_width
        return _side(MAX_AREA * aspect), _side(MAX_AREA / aspect)
    return check_resolution(height, width)


def check_resolution(height: object, width: object) -> tuple[int, int]:
    """A size that was asked for, if there can be pictures of it."""
    for name, value in (("height", height), ("width", width)):
        if value is None:
            raise InvalidArgumentError(
                f"height and width come both or not at all: {name} is missing", field=name
            )
        check_positive(name, value)
    assert isinstance(height, int)
    assert isinstance(width, int)
    for name, side in (("height", height), ("width", width)):
        if side % SIDE_MULTIPLE:
            raise InvalidArgumentError(
                f"{name} must be a multiple of {SIDE_MULTIPLE}, got {side}", field=name
            )
    if height * width > MAX_AREA:
        raise InvalidArgumentError(
            f"height * width must be at most {MAX_AREA} pixels, got {height * width}", field="height"
        )
    return height, width


def latent_frames(num_frames: object, frames_per_block: int = 3) -> int:
    """Latent frames of `num_frames` pixel frames: whole blocks only (9 -> 3, 129 -> 33)."""
    check_positive("num_frames", num_frames)
    assert isinstance(num_frames, int)
    latents, left = divmod(num_frames - 1, 4)
    if left or (latents + 1) % frames_per_block:
        raise InvalidArgumentError(
            f"num_frames must be 4 * n + 1 with n + 1 a multiple of {frames_per_block}, got {num_frames}",
            field="num_frames",
        )
    return latents + 1


def _side(squared: float) -> int:
    # Rounded down to whole tokens. 480 x 832 falls just short of itself here, and gives 464: that is the rule.
    tokens = math.floor(math.floor(math.sqrt(squared) / _LATENT_PIXEL) / _PATCH)
    if tokens == 0:
        raise InvalidArgumentError("the source image is too narrow for a picture", field="image")
    return tokens * _PATCH * _LATENT_PIXEL


def check_positive(name: str, value: object) -> None:
    """InvalidArgumentError unless `value` is an integer > 0, and a bool is none."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidArgumentError(f"{name} must be a positive integer, got {value!r:.80}", field=name)
