"""What an Omni engine returned, as a pipeline's output."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from contracts.errors import InvalidArgumentError
from contracts.tick import METADATA_KEY, ARDiffusionChunkMetadata
from gpu_worker.capability import DiffusionOutput


def to_diffusion_output(output: Any, metadata: ARDiffusionChunkMetadata) -> DiffusionOutput:
    """Tensors, arrays and bytes become the payload, pictures the pixel frames.

    Raises InvalidArgumentError for an output that holds neither.
    """
    payload = dict(_payload(output))
    frames = _frames(getattr(output, "images", None))
    if not payload and frames is None:
        raise InvalidArgumentError("the engine's output holds neither tensors nor pictures", field="payload")
    return DiffusionOutput(payload=payload, frames=frames, metadata={METADATA_KEY: metadata.to_dict()})


def _payload(output: Any) -> Iterator[tuple[str, Any]]:
    envelope = output.multimodal_output
    if isinstance(envelope, Mapping):
        for name in envelope:
            if name != "metadata" and _is_data(envelope[name]):
                yield name, envelope[name]
    latents = getattr(output, "latents", None)
    if _is_data(latents):
        yield "latents", latents


def _is_data(value: object) -> bool:
    torch = sys.modules.get("torch")  # a tensor exists only where torch was imported
    return isinstance(value, bytes | np.ndarray) or (torch is not None and isinstance(value, torch.Tensor))


def _frames(images: object) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
    """uint8 [frames, height, width, 3] of pictures, in a list or in a list of lists."""
    if not isinstance(images, list | tuple) or not images:
        return None
    flat = [picture for item in images for picture in (item if isinstance(item, list | tuple) else (item,))]
    arrays = [np.asarray(_rgb(picture)) for picture in flat]
    if any(array.dtype != np.uint8 or array.shape != arrays[0].shape for array in arrays):
        raise InvalidArgumentError("the engine's pictures must be 8-bit and of one size", field="frames")
    return np.stack(arrays)


def _rgb(picture: Any) -> Any:
    return picture.convert("RGB") if hasattr(picture, "convert") else picture
