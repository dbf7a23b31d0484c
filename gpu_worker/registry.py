"""Finds pipelines by entry point, so that a model is added without touching this project."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from contracts.errors import ConfigurationError

PIPELINE_GROUP: Final = "worldline.pipelines"

PipelineFactory = Callable[..., Any]
"""Called as `factory(device=torch.device, dtype=torch.dtype, config=mapping)`; returns a pipeline."""


def _pipelines() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=PIPELINE_GROUP)}


def pipeline_names() -> tuple[str, ...]:
    """Names of the installed pipelines, sorted."""
    return tuple(sorted(_pipelines()))


def load_pipeline_factory(name: str) -> PipelineFactory:
    """The class or function that builds the pipeline `name`.

    Raises ConfigurationError for an unknown name (it lists the known ones), or one that can't be imported.
    """
    point = _pipelines().get(name)
    if point is None:
        known = ", ".join(pipeline_names()) or "none"
        raise ConfigurationError(f"unknown model {name!r:.80}; installed pipelines: {known}", field="model")
    try:
        factory = point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"model {name!r} can't be loaded from {point.value}: {error}", field="model"
        ) from error
    if not callable(factory):
        raise ConfigurationError(f"model {name!r}: {point.value} is not callable", field="model")
    return factory
