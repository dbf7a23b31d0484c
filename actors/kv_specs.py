"""KV specs of installed models, for planning: entry points that load no weights and no torch."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from contracts.errors import ConfigurationError, InvalidArgumentError, WorldlineError
from contracts.kv_spec import ARDiffusionKVCacheSpec

KV_SPEC_GROUP: Final = "worldline.kv_specs"
"""Each entry is a function: the model's own settings (a mapping) in, `ARDiffusionKVCacheSpec` out."""


def load_kv_spec(model: str, config: Mapping[str, Any]) -> ARDiffusionKVCacheSpec:
    """The KV spec of an installed model under the model's own settings.

    Raises:
        InvalidArgumentError: no model of that name offers a spec; the message lists those that do.
        ConfigurationError: the model's function can't be loaded, raises, or returns something else.
    """
    points: dict[str, EntryPoint] = {point.name: point for point in entry_points(group=KV_SPEC_GROUP)}
    point = points.get(model)
    if point is None:
        known = ", ".join(sorted(points)) or "none"
        raise InvalidArgumentError(
            f"no installed model {model!r:.80} offers a KV spec; those that do: {known}", field="model"
        )
    try:
        spec = point.load()(dict(config))
    except WorldlineError:
        raise
    except Exception as error:  # another project's code: whatever it raises is told in one line
        raise ConfigurationError(
            f"the KV spec of {model!r} ({point.value}): {type(error).__name__}: {error}", field="model"
        ) from error
    if not isinstance(spec, ARDiffusionKVCacheSpec):
        raise ConfigurationError(
            f"the KV spec of {model!r} ({point.value}) is {type(spec).__name__}, not ARDiffusionKVCacheSpec",
            field="model",
        )
    return spec
