"""The first image: from what a request may bring to [1, 3, H, W] in [-1, 1], or refused without saying much."""

from __future__ import annotations

import io
import warnings
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps

from contracts.errors import ConfigurationError, InvalidArgumentError, WorldlineError
from gpu_worker.models.lingbot_world.trusted_root import TrustedRoot

MAX_PIXELS: Final = 4096**2
MAX_BYTES: Final = 64 << 20
FORMATS: Final = ("BMP", "JPEG", "PNG", "WEBP")

FIELD: Final = "images"
_UNREADABLE: Final = (
    "the image can't be read: it must be a BMP, JPEG, PNG or WebP picture of at most 4096 * 4096 pixels"
)


def one_image(images: object) -> object:
    """The only one of a request's images; InvalidArgumentError for none, or several."""
    if not isinstance(images, list | tuple) or len(images) != 1:
        count = len(images) if isinstance(images, list | tuple) else type(images).__name__
        raise InvalidArgumentError(f"images must hold exactly one image, got {count}", field=FIELD)
    image: object = images[0]
    if isinstance(image, list | tuple):
        raise InvalidArgumentError("an image must not be a list", field=FIELD)
    return image


def first_image(source: object, height: int, width: int, *, root: TrustedRoot | None = None) -> torch.Tensor:
    """The image at the size of the pictures, resized without regard to its shape.

    Args:
        source: a PIL image; bytes of a file, which is turned upright as its EXIF data say; a tensor [3, H, W] or
            [1, 3, H, W] with values in [0, 1], [0, 255] or [-1, 1]; or a path beneath the root.
        height, width: of the result, in pixels.
        root: None where the deployment trusts no folder.

    Returns:
        [1, 3, height, width] float32, on the source's device.

    Raises:
        InvalidArgumentError: it is nothing of that.
        ConfigurationError: it is a path, and there is no root.
    """
    if isinstance(source, str):
        source = _read(source, root)
    if isinstance(source, torch.Tensor):
        pixels = _scaled(source)
    elif isinstance(source, Image.Image | bytes | bytearray | memoryview):
        pixels = torch.from_numpy(_decoded(source)).permute(2, 0, 1).unsqueeze(0).float() / 127.5 - 1
    else:
        raise InvalidArgumentError(
            f"an image must be a picture, a tensor or a path, got {type(source).__name__}", field=FIELD
        )
    if pixels.shape[2:] == (height, width):
        return pixels
    return F.interpolate(pixels, (height, width), mode="bicubic", align_corners=False)


def _read(path: str, root: TrustedRoot | None) -> bytes:
    if root is None:
        raise ConfigurationError(
            "an image's path needs lingbot_action_root (or WORLDLINE_LINGBOT_ACTION_ROOT), which is not set",
            field="lingbot_action_root",
        )
    return root.read_file(root.resolve(path, FIELD), FIELD, max_bytes=MAX_BYTES)


def _decoded(
    source: Image.Image | bytes | bytearray | memoryview,
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """uint8 [H, W, 3]. The size is known before anything is decoded."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = (
                source if isinstance(source, Image.Image) else Image.open(io.BytesIO(source), formats=FORMATS)
            )
        if not 0 < image.width * image.height <= MAX_PIXELS:
            raise InvalidArgumentError(_UNREADABLE, field=FIELD)
        return _rgb(image if isinstance(source, Image.Image) else _upright(image))
    except WorldlineError:
        raise
    except Exception:  # noqa: BLE001 - a decoder raises whatever it likes, and what it says is about our libraries
        raise InvalidArgumentError(_UNREADABLE, field=FIELD) from None


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # noqa: BLE001 - odd EXIF data are no reason; what can't be decoded fails again right after
        return image


def _rgb(image: Image.Image) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """uint8 [H, W, 3]; 16 bits of grey are scaled, since Pillow would cut them off at 255."""
    if image.mode in ("I", "F"):  # nobody knows where their white is
        raise InvalidArgumentError(_UNREADABLE, field=FIELD)
    if image.mode.startswith("I;16"):
        grey = (np.asarray(image).astype(np.uint32) + 128) // 257
        return np.repeat(grey.astype(np.uint8)[:, :, None], 3, axis=2)
    return np.array(image.convert("RGB"))


def _scaled(image: torch.Tensor) -> torch.Tensor:
    """A tensor image as [1, 3, H, W] float32 in [-1, 1]."""
    values = image.unsqueeze(0) if image.dim() == 3 else image
    if values.dim() != 4 or values.shape[:2] != (1, 3) or 0 in values.shape:
        raise InvalidArgumentError(
            f"a tensor image must have shape [3, H, W] or [1, 3, H, W], got {list(image.shape)}", field=FIELD
        )
    if values.shape[2] * values.shape[3] > MAX_PIXELS:
        raise InvalidArgumentError(_UNREADABLE, field=FIELD)
    if values.dtype == torch.uint8:
        return values.float() / 127.5 - 1
    values = values.float()
    if not bool(values.isfinite().all()):
        raise InvalidArgumentError("a tensor image must be finite", field=FIELD)
    low, high = float(values.min()), float(values.max())
    if low >= 0 and high <= 1:
        return values * 2 - 1
    if low >= 0 and high <= 255:
        return values / 127.5 - 1
    if low >= -1 and high <= 1:
        return values
    raise InvalidArgumentError("a tensor image must have values in [0, 1], [0, 255] or [-1, 1]", field=FIELD)
