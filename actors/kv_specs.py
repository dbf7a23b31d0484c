"""KV specs of installed models, for planning: entry points that load no weights and no torch."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from contracts.errors import ConfigurationError, InvalidArgumentError, WorldlineError
from contracts.kv_spec import ARDiffusionKVCacheSpec
from contracts.kv_spec_json import DTYPE_FIELD, kv_spec_to_dict

KV_SPEC_GROUP: Final = "worldline.kv_specs"
"""Each entry is a function: the model's own settings (a mapping) in, `ARDiffusionKVCacheSpec` out. One with an attribute
`default_dtype` says by it what its worker runs in when it is told nothing, and takes the setting `dtype`."""

WORKER_DTYPE: Final = "float32"
"""What a worker runs a model in that has no say."""


def load_kv_spec(model: str, config: Mapping[str, Any]) -> ARDiffusionKVCacheSpec:
    """The KV spec of an installed model under the model's own settings.

    Raises:
        InvalidArgumentError: no model of that name offers a spec; the message lists those that do.
        ConfigurationError: the model's function can't be loaded, raises, or returns something else.
    """
    return _spec(model, _point(model), config)


def load_kv_fields(model: str, config: Mapping[str, Any], dtype: object = None) -> dict[str, Any]:
    """The same as plain fields, with the element type: the one asked for, else the model's, else the worker's.

    Args:
        model: its name.
        config: the model's own settings.
        dtype: of pages, and of what the model keeps beside them; None asks the model.
    """
    point = _point(model)
    own = getattr(_function(model, point), "default_dtype", None)
    asked = config.get(DTYPE_FIELD) if dtype is None else dtype
    if own is not None:
        asked = own if asked is None else asked
        config = {**config, DTYPE_FIELD: asked}
    spec = _spec(model, point, config)
    return kv_spec_to_dict(spec, asked if isinstance(asked, str) else WORKER_DTYPE)


def _point(model: str) -> EntryPoint:
    points: dict[str, EntryPoint] = {point.name: point for point in entry_points(group=KV_SPEC_GROUP)}
    point = points.get(model)
    if point is None:
        known = ", ".join(sorted(points)) or "none"
        raise InvalidArgumentError(
            f"no installed model {model!r:.80} offers a KV spec; those that do: {known}", field="model"
        )
    return point


def _function(model: str, point: EntryPoint) -> Any:
    try:
        return point.load()
    except Exception as error:  # another project's code: whatever it raises is told in one line
        raise _told(model, point, error) from error


def _spec(model: str, point: EntryPoint, config: Mapping[str, Any]) -> ARDiffusionKVCacheSpec:
    function = _function(model, point)
    try:
        spec = function(dict(config))
    except WorldlineError:
        raise
    except Exception as error:
        raise _told(model, point, error) from error
    if not isinstance(spec, ARDiffusionKVCacheSpec):
        raise ConfigurationError(
            f"the KV spec of {model!r} ({point.value}) is {type(spec).__name__}, not ARDiffusionKVCacheSpec",
            field="model",
        )
    return spec


def _told(model: str, point: EntryPoint, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"the KV spec of {model!r} ({point.value}): {type(error).__name__}: {error}", field="model"
    )
