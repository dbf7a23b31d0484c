"""What a pipeline returned, as bytes: payload tensors to safetensors, pixel frames to `.npy`, metadata to JSON values.

torch is never imported here: a value is a torch tensor only if its producer has imported torch already.
"""

from __future__ import annotations

import hashlib
import io
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeGuard

import numpy as np
import numpy.typing as npt
import orjson

from contracts.errors import ChunkMetadataError, InvalidArgumentError, ModelError
from contracts.events import freeze, thaw
from contracts.tick import METADATA_KEY
from gpu_worker.capability import DiffusionOutput

if TYPE_CHECKING:
    import torch

_ALIGNMENT: Final = 8
_NUMPY_NAMES: Final = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
}
_TORCH_ONLY_NAMES: Final = {"bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """One chunk ready to be stored.

    Args:
        payload: safetensors bytes.
        sha256: of the payload, hex.
        frames: `.npy` bytes of uint8 [F, H, W, 3], or None.
        metadata: `{"ar_diffusion": ...}` as JSON values; not compared with the tick yet.
    """

    payload: bytes
    sha256: str
    frames: bytes | None
    metadata: Mapping[str, Any]


def encode_output(output: DiffusionOutput) -> EncodedChunk:
    """Encodes an output; copies from the device.

    Raises:
        ModelError: the output carries an error.
        ChunkMetadataError: JSON would not carry the metadata unchanged.
        InvalidArgumentError: a payload value is no tensor, or the frames are no pixel frames; names it.
    """
    if output.error is not None:
        raise ModelError(str(output.error))
    payload = encode_payload(output.payload)
    return EncodedChunk(
        payload=payload,
        sha256=hashlib.sha256(payload).hexdigest(),
        frames=None if output.frames is None else encode_frames(output.frames),
        metadata=_encode_metadata(output.metadata),
    )


def _encode_metadata(metadata: object) -> dict[str, Any]:
    """The envelope alone; what else a pipeline puts there is its own."""
    if not isinstance(metadata, Mapping) or METADATA_KEY not in metadata:
        return {}
    try:
        return {METADATA_KEY: thaw(freeze(metadata[METADATA_KEY], METADATA_KEY))}
    except InvalidArgumentError as error:
        raise ChunkMetadataError(f"malformed chunk metadata: {error}", field=error.field) from error


def encode_payload(payload: object) -> bytes:
    """Safetensors bytes of a mapping name -> torch tensor, numpy array or bytes (which become uint8 [N]).

    Raises InvalidArgumentError naming the value at fault.
    """
    if not isinstance(payload, Mapping):
        raise InvalidArgumentError(
            f"payload must be a mapping, got {type(payload).__name__}", field="payload"
        )
    header: dict[str, Any] = {}
    parts: list[bytes] = []
    offset = 0
    for name, value in payload.items():
        if not isinstance(name, str) or name == "__metadata__":
            raise InvalidArgumentError(f"payload: {name!r:.80} is no name of a tensor", field="payload")
        dtype, shape, data = _tensor(value, f"payload.{name}")
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        parts.append(data)
        offset += len(data)
    text = _header_text(header)
    text += b" " * (-len(text) % _ALIGNMENT)
    return b"".join((len(text).to_bytes(8, "little"), text, *parts))


def _header_text(header: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(header)
    except TypeError as error:  # a name that is no Unicode text
        raise InvalidArgumentError(f"payload: the names of its tensors: {error}", field="payload") from None


def encode_frames(frames: object) -> bytes:
    """`.npy` bytes of pixel frames, a torch tensor or numpy array uint8 [F, H, W, 3]."""
    array = _torch_to_numpy(frames) if _is_torch(frames) else frames
    if not isinstance(array, np.ndarray):
        raise InvalidArgumentError(f"frames must be an array, got {type(frames).__name__}", field="frames")
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[-1] != 3:
        raise InvalidArgumentError(
            f"frames must be uint8 [F, H, W, 3], got {array.dtype} {list(array.shape)}", field="frames"
        )
    buffer = io.BytesIO()
    np.save(buffer, np.ascontiguousarray(array), allow_pickle=False)
    return buffer.getvalue()


def _tensor(value: object, field: str) -> tuple[str, list[int], bytes]:
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
        return "U8", [len(data)], data
    if _is_torch(value):
        return _torch_tensor(value, field)
    if not isinstance(value, np.ndarray):
        raise InvalidArgumentError(
            f"{field} must be a tensor, an array or bytes, got {type(value).__name__}", field=field
        )
    name = _NUMPY_NAMES.get(value.dtype.name)
    if name is None:
        raise InvalidArgumentError(
            f"{field} has element type {value.dtype}, which a payload can't hold", field=field
        )
    return name, list(value.shape), value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes()


def _torch_tensor(tensor: torch.Tensor, field: str) -> tuple[str, list[int], bytes]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    name = _NUMPY_NAMES.get(dtype) or _TORCH_ONLY_NAMES.get(dtype)
    if name is None:
        raise InvalidArgumentError(
            f"{field} has element type {dtype}, which a payload can't hold", field=field
        )
    return name, list(tensor.shape), _torch_bytes(tensor)


def _torch_bytes(tensor: torch.Tensor) -> bytes:
    import torch  # loaded already: there is a tensor

    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def _torch_to_numpy(tensor: torch.Tensor) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = tensor.detach().to("cpu").numpy()
    return array


def _is_torch(value: object) -> TypeGuard[torch.Tensor]:
    loaded = sys.modules.get("torch")
    return loaded is not None and isinstance(value, loaded.Tensor)
