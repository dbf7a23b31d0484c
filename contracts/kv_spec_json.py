"""A KV spec as JSON: the spec's own field names, plus `dtype`, the element type of the KV.

{"num_layers": 40, ..., "kv_branches": [{"name": "main", "local_index": 0}],
 "cross_attention": [{"name": "text", "num_tokens": 512}], "dtype": "bfloat16"}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any, Final, TypeVar

from contracts.errors import InvalidArgumentError
from contracts.events import loads
from contracts.kv_spec import (
    ARDiffusionCrossAttentionKVSpec,
    ARDiffusionKVBranchSpec,
    ARDiffusionKVCacheSpec,
)

DTYPE_FIELD: Final = "dtype"
DTYPE_BYTES: Final[Mapping[str, int]] = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Element types that KV can have, and the bytes of one element."""

T = TypeVar("T", ARDiffusionKVBranchSpec, ARDiffusionCrossAttentionKVSpec, ARDiffusionKVCacheSpec)


def loads_kv_spec(text: str | bytes) -> Any:
    """The value that a file of a spec holds; InvalidArgumentError for no JSON, or an object that names a field twice."""
    value = loads(text, "spec")  # by its errors; of two values for one field it would silently take the last
    json.loads(text, object_pairs_hook=_unique)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise InvalidArgumentError(f"spec: field {name!r:.80} is given twice", field=name[:80])
    return dict(pairs)


def kv_spec_to_dict(spec: ARDiffusionKVCacheSpec, dtype: str) -> dict[str, Any]:
    """The plain form, every field written out."""
    return {**asdict(spec), DTYPE_FIELD: dtype}


def kv_spec_from_dict(value: object) -> tuple[ARDiffusionKVCacheSpec, str]:
    """The spec and its element type; strict.

    Raises InvalidArgumentError naming the field that is missing, unknown or out of range.
    """
    raw = dict(_mapping(value, "spec"))
    if DTYPE_FIELD not in raw:
        raise InvalidArgumentError(
            f"KV spec: {DTYPE_FIELD} is missing; it is one of {', '.join(DTYPE_BYTES)}", field=DTYPE_FIELD
        )
    dtype = raw.pop(DTYPE_FIELD)
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise InvalidArgumentError(
            f"KV spec: {DTYPE_FIELD} is one of {', '.join(DTYPE_BYTES)}, got {dtype!r:.80}", field=DTYPE_FIELD
        )
    if "kv_branches" in raw:
        raw["kv_branches"] = _items(ARDiffusionKVBranchSpec, raw["kv_branches"], "kv_branches")
    if "cross_attention" in raw:
        caches = _items(ARDiffusionCrossAttentionKVSpec, raw["cross_attention"], "cross_attention")
        raw["cross_attention"] = caches
    return _build(ARDiffusionKVCacheSpec, raw, "spec"), dtype


def _build(cls: type[T], value: object, where: str) -> T:
    raw = _mapping(value, where)
    known = {field.name: field for field in fields(cls)}
    for name in raw:
        if name not in known:
            raise InvalidArgumentError(f"{where}: unknown field {name!r:.80}", field=str(name)[:80])
    for name, field in known.items():
        if name not in raw and field.default is MISSING:
            raise InvalidArgumentError(f"{where}: {name} is missing", field=name)
    return cls(**raw)


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidArgumentError(f"{where} must be an object, got {type(value).__name__}", field=where)
    return value


def _items(cls: type[T], value: object, where: str) -> tuple[T, ...]:
    if not isinstance(value, list | tuple):
        raise InvalidArgumentError(
            f"{where} must be an array of objects, got {type(value).__name__}", field=where
        )
    return tuple(_build(cls, entry, where) for entry in value)
