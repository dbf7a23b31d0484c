"""The sizes of a checkpoint's models: the published ones, but for what a deployment's `topology` says. Torch-free.

    {"head": {"max_state_dim": 8, "transformer": {"dim": 24, ...}}, "clip": {...}, "text": {...}, "vae": {...}}

Fields have the names of `config.py`. They exist for checkpoints of another size; a checkpoint's own `config.json` must
agree with them, and so must every weight. Sizes that no model here could run with are refused before any weight is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, Final, TypeVar

from contracts.errors import ConfigurationError
from gpu_worker.models.dreamzero.config import (
    CONDITION_CHANNELS,
    LATENT_CHANNELS,
    ClipGeometry,
    DreamZeroConfig,
    DreamZeroTopology,
    DreamZeroTransformerConfig,
    TextGeometry,
)
from gpu_worker.models.lingbot_world.spec import VaeGeometry

Geometry = TypeVar(
    "Geometry", ClipGeometry, TextGeometry, VaeGeometry, DreamZeroConfig, DreamZeroTransformerConfig
)

_GEOMETRIES: Final = ("head", "clip", "text", "vae")


def read_topology(config: object, raw: Mapping[str, Any], *, height: int, width: int) -> DreamZeroTopology:
    """What the checkpoint must be.

    Args:
        config: the content of its `config.json`.
        raw: the deployment's `topology`.
        height, width: of the stitched picture, in pixels.

    Raises:
        ConfigurationError: a field does not exist or does not fit; it is named.
    """
    for name in raw:
        if name not in _GEOMETRIES:
            raise ConfigurationError(
                f"topology has no field {name!r:.80}; known: {', '.join(_GEOMETRIES)}", field=str(name)[:80]
            )
    head = dict(_mapping(raw, "head"))
    transformer = _changed(DreamZeroTransformerConfig(), _mapping(head, "transformer"), "head.transformer")
    head.pop("transformer", None)
    pinned = _changed(replace(DreamZeroConfig(), transformer=transformer), head, "head")
    topology = DreamZeroTopology(
        head=DreamZeroConfig.from_checkpoint(config, pinned),
        clip=_changed(ClipGeometry(), _mapping(raw, "clip"), "clip"),
        text=_changed(TextGeometry(), _mapping(raw, "text"), "text"),
        vae=_changed(VaeGeometry(), _mapping(raw, "vae"), "vae"),
        height=height,
        width=width,
    )
    for fits, field, must in _rules(topology):
        if not fits:
            raise ConfigurationError(f"topology: {field} must {must}", field=field)
    return topology


def _rules(topology: DreamZeroTopology) -> Iterator[tuple[bool, str, str]]:
    """(whether it is so, the field at fault, what it must), of all that sizes have to do with each other."""
    head, model, clip, vae = topology.head, topology.head.transformer, topology.clip, topology.vae
    actions, states = model.num_action_per_block, model.num_state_per_block
    # Fields that are given for completeness: whatever else they said, the code would not follow.
    yield model.model_type == "i2v", "model_type", "be i2v"
    yield model.in_dim == LATENT_CHANNELS + CONDITION_CHANNELS, "in_dim", "be 36"
    yield model.out_dim == LATENT_CHANNELS, "out_dim", "be 16"
    yield head.action_horizon == actions, "action_horizon", f"be num_action_per_block, {actions}"
    yield vae.z == LATENT_CHANNELS, "z", "be 16"
    yield len(vae.mult) == 4, "mult", "have 4 stages"
    yield len(vae.temporal_downsample) == 3, "temporal_downsample", "have 3 stages"
    yield sum(vae.temporal_downsample) == 2, "temporal_downsample", "halve time twice"
    # Shares that must come out even.
    yield (
        model.dim % (2 * model.num_heads) == 0,
        "num_heads",
        f"cut dim, {model.dim}, into heads of even width",
    )
    yield model.freq_dim % 2 == 0, "freq_dim", "be even"
    yield actions % states == 0, "num_state_per_block", f"divide num_action_per_block, {actions}"
    yield clip.width % clip.heads == 0, "heads", f"divide the width of clip, {clip.width}"
    yield head.num_frames % 4 == 1, "num_frames", "be one more than a multiple of 4"
    # Limits.
    yield head.action_dim <= head.max_action_dim, "action_dim", f"be at most {head.max_action_dim}"
    frames = head.latent_frames - 1
    yield head.num_frame_per_block <= frames, "num_frame_per_block", f"be at most {frames}"


def _mapping(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = raw.get(name, {})
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"topology: {name} must be an object", field=name)
    return value


def _changed(published: Geometry, raw: Mapping[str, Any], what: str) -> Geometry:
    """`published` with the fields of `raw`, each of the type that it has there."""
    defaults = {entry.name: getattr(published, entry.name) for entry in fields(published)}
    changes = {}
    for name, value in raw.items():
        if name not in defaults or name == "transformer":
            raise ConfigurationError(f"topology: {what} has no field {name!r:.80}", field=str(name)[:80])
        changes[name] = _alike(defaults[name], value, f"{what}.{name}")
    return replace(published, **changes)


def _alike(default: Any, value: Any, field: str) -> Any:
    if isinstance(default, tuple):
        if isinstance(value, list) and value:
            return tuple(_alike(default[0], item, field) for item in value)
    elif isinstance(default, float):
        if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
            return float(value)
    elif isinstance(default, int) and not isinstance(default, bool):
        unlimited = field.endswith("max_chunk_size") and value == -1
        if type(value) is int and (value >= 1 or value == default or unlimited):
            return value
    elif type(value) is type(default):
        return value
    raise ConfigurationError(f"topology: {field} can't be {value!r:.80}", field=field)
