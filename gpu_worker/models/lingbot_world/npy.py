"""Arrays in NPY format 1.0 and 2.0, from bytes, without pickle and within limits."""

from __future__ import annotations

import ast
import math
import re
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from contracts.errors import InvalidArgumentError

MAX_HEADER_BYTES: Final = 10_000
PREFIX_BYTES: Final = 12
"""Most bytes before the header: magic, version, header length."""

_MAGIC: Final = b"\x93NUMPY"
_LENGTH_BYTES: Final = {(1, 0): 2, (2, 0): 4}
_NUMBER: Final = re.compile(r"[<>|=]?[fiu][1248]")


def parse_npy(data: bytes, field: str) -> NDArray[Any]:
    """The array in `data`, which must be the whole of it and nothing else.

    Raises InvalidArgumentError naming `field`: another format or version, a header that is too long or malformed, an
    element type that is no number of at most 8 bytes, or a size that is not what the header says.
    """
    version = (data[6], data[7]) if len(data) >= 8 else (0, 0)
    if data[:6] != _MAGIC or version not in _LENGTH_BYTES:
        raise _refused(field, "is not in NPY format 1.0 or 2.0")
    start = 8 + _LENGTH_BYTES[version]
    length = int.from_bytes(data[8:start], "little")
    if length > MAX_HEADER_BYTES:
        raise _refused(field, f"has a header of more than {MAX_HEADER_BYTES} bytes")
    dtype, fortran_order, shape = _parse_header(data[start : start + length], field)
    payload = memoryview(data)[start + length :]
    if len(data) < start + length or len(payload) != math.prod(shape) * dtype.itemsize:
        raise _refused(field, "does not have the size that its header says")
    try:
        return np.frombuffer(payload, dtype=dtype).reshape(shape, order="F" if fortran_order else "C")
    except (
        ValueError,
        OverflowError,
    ):  # more dimensions than arrays have, or beside a zero one that no array has
        raise _refused(field, "has an impossible shape") from None


def _parse_header(raw: bytes, field: str) -> tuple[np.dtype[Any], bool, tuple[int, ...]]:
    malformed = _refused(field, "has a malformed header")
    text = raw.decode("latin-1")
    # A header needs no escapes, and without them the parser has nothing to warn of. Nor does it need depth.
    if "\\" in text or text.count("(") + text.count("[") + text.count("{") > 8:
        raise malformed
    try:
        header = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise malformed from None
    if not isinstance(header, dict) or set(header) != {"descr", "fortran_order", "shape"}:
        raise malformed
    descr, fortran_order, shape = header["descr"], header["fortran_order"], header["shape"]
    if not isinstance(fortran_order, bool) or not _is_shape(shape):
        raise malformed
    if not isinstance(descr, str) or _NUMBER.fullmatch(descr) is None:
        raise _refused(field, "must hold plain numbers of at most 8 bytes")
    try:
        return np.dtype(descr), fortran_order, shape
    except TypeError:  # f1 does not exist
        raise _refused(field, "must hold plain numbers of at most 8 bytes") from None


def _is_shape(value: object) -> bool:
    return isinstance(value, tuple) and all(type(size) is int and size >= 0 for size in value)


def _refused(field: str, why: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{field} {why}", field=field)
