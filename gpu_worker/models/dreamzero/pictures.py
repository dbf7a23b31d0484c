"""Camera pictures: from what a request brings to the one picture that the model sees.

decode    bytes of a file to uint8 [h, w, 3], refused before anything is decoded if it is too large
view      95 % of the middle, resized to the view's place
stitch    rows of views; one that is missing is black
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from PIL import Image

from contracts.errors import InvalidArgumentError, WorldlineError
from gpu_worker.models.dreamzero.embodiment import Embodiment, Place

MAX_PIXELS: Final = 4096**2
MAX_BYTES: Final = 64 << 20
MIN_SIDE: Final = 2
"""Pixels of the shorter side, so that something is left of the middle."""

FORMATS: Final = ("BMP", "JPEG", "PNG", "WEBP")
CROP: Final = 0.95
_DEEP: Final = ("I", "F")
"""First letters of Pillow's modes of more than 8 bits a value: 16 bit grey, and what PIL images may be."""

Picture = npt.NDArray[np.uint8]
"""uint8 [height, width, 3]."""


def decode_picture(source: object, field: str) -> Picture:
    """A camera's picture; grey and transparent ones become RGB.

    Args:
        source: bytes of a BMP, JPEG, PNG or WebP file, a PIL image, or an array uint8 [h, w, 3].
        field: its name, in messages.

    Raises:
        InvalidArgumentError: it is nothing of that, can't be decoded, is too large or too small, or has grey of 16 bits.
    """
    if isinstance(source, np.ndarray | torch.Tensor):
        return _checked_array(np.asarray(source), field)
    if not isinstance(source, bytes | bytearray | memoryview | Image.Image):
        raise InvalidArgumentError(f"{field} must be a picture, got {type(source).__name__}", field=field)
    if not isinstance(source, Image.Image) and len(source) > MAX_BYTES:
        raise InvalidArgumentError(
            f"{field} is too large: {len(source)} bytes, the limit is {MAX_BYTES}", field=field
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = (
                source if isinstance(source, Image.Image) else Image.open(io.BytesIO(source), formats=FORMATS)
            )
        _check_size(image.height, image.width, field)
        if image.mode.startswith(_DEEP):  # it would become white wherever a value is above 255
            raise InvalidArgumentError(f"{field} must have 8 bits a value, not more", field=field)
        return np.array(image.convert("RGB"))
    except WorldlineError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise InvalidArgumentError(
            f"{field} is too large: at most {MAX_PIXELS} pixels are decoded", field=field
        ) from None
    except Exception:  # noqa: BLE001 - a decoder raises whatever it likes, and what it says is about our libraries
        raise InvalidArgumentError(
            f"{field} can't be decoded: it must be a BMP, JPEG, PNG or WebP picture", field=field
        ) from None


def _checked_array(array: npt.NDArray[np.generic], field: str) -> Picture:
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
        raise InvalidArgumentError(
            f"{field} must be uint8 [height, width, 3], got {array.dtype} {list(array.shape)}", field=field
        )
    _check_size(array.shape[0], array.shape[1], field)
    return array.astype(np.uint8, copy=False)


def _check_size(height: int, width: int, field: str) -> None:
    if height * width > MAX_PIXELS:
        raise InvalidArgumentError(
            f"{field} is too large: {width} x {height}, at most {MAX_PIXELS} pixels are decoded", field=field
        )
    if min(height, width) < MIN_SIDE:
        raise InvalidArgumentError(f"{field} is too small: {width} x {height} pixels", field=field)


def fit_view(picture: Picture, height: int, width: int) -> Picture:
    """The middle of a picture, resized without regard to its shape: bilinear, antialiased, rounded to uint8."""
    rows, columns = (int(CROP * side) for side in picture.shape[:2])
    top, left = round((picture.shape[0] - rows) / 2), round((picture.shape[1] - columns) / 2)
    middle = torch.tensor(picture[top : top + rows, left : left + columns])
    values = middle.permute(2, 0, 1).unsqueeze(0).float()
    resized = F.interpolate(values, (height, width), mode="bilinear", align_corners=False, antialias=True)
    return resized[0].permute(1, 2, 0).round().clamp(0, 255).to(torch.uint8).contiguous().numpy()


def check_views(views: object, embodiment: Embodiment) -> None:
    """InvalidArgumentError naming the view that is missing, or that the robot does not have."""
    given = set(views) if isinstance(views, Mapping) else set()
    for view in sorted(given - embodiment.views):
        raise InvalidArgumentError(
            f"images.{view}: there is no such view; known are: {', '.join(sorted(embodiment.views))}",
            field=f"images.{view}",
        )
    for view in sorted(embodiment.views - embodiment.optional_views - given):
        raise InvalidArgumentError(f"images.{view} is missing", field=f"images.{view}")


def stitch(views: Mapping[str, Picture], embodiment: Embodiment) -> Picture:
    """The picture that the model sees, uint8 [height, width, 3].

    Args:
        views: decoded pictures by view, checked by `check_views`.
        embodiment: where they stand.
    """
    height, width = embodiment.view_height, embodiment.view_width
    fitted = {view: fit_view(picture, height, width) for view, picture in views.items()}
    black = np.zeros((height, width, 3), np.uint8)

    def placed(place: Place) -> Picture:
        return fitted.get(place.view, black).repeat(place.stretch, axis=1)

    rows = [np.concatenate([placed(place) for place in row], axis=1) for row in embodiment.layout]
    return np.concatenate(rows, axis=0)


def to_pixels(picture: Picture, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """uint8 [h, w, 3] as [1, 3, h, w] in [-1, 1]: a share of 255 first in `dtype`, then doubled and shifted."""
    values = torch.tensor(picture, device=device)
    unit = (values.float() / 255).to(dtype)
    return (unit * 2 - 1).permute(2, 0, 1).unsqueeze(0).contiguous()
