"""What a DreamZero session costs: KV geometry, and the bytes that the model itself keeps. Torch-free.

KV                two branches of 9 frames in pages, and text and image of each
encoder history   what the VAE has seen of the robot's cameras
condition         mask and image latents of the whole rollout
latents           the newest of what the cameras showed
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from contracts.errors import ConfigurationError
from contracts.kv_spec import (
    ARDiffusionCrossAttentionKVSpec,
    ARDiffusionKVBranchSpec,
    ARDiffusionKVCacheSpec,
)
from gpu_worker.models.dreamzero.config import CONDITION_CHANNELS, LATENT_CHANNELS, DreamZeroTopology
from gpu_worker.models.dreamzero.deployment import Deployment

POSITIVE: Final = "positive"
NEGATIVE: Final = "negative"
TEXT: Final = "text"
IMAGE: Final = "image"

DEFAULT_CAPACITY: Final = 64

DEFAULT_DTYPE: Final = "bfloat16"
"""What the published weights are run in."""

_ITEM_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class OwnedBytes:
    """What the model keeps for one session on one worker, in bytes."""

    encoder_history: int
    condition: int
    latents: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.encoder_history + self.condition + self.latents


def owned_bytes(topology: DreamZeroTopology | None = None, *, itemsize: int = 2) -> OwnedBytes:
    """The model-owned state of a session.

    Args:
        topology: None is the published one.
        itemsize: bytes of an element.
    """
    shape = DreamZeroTopology() if topology is None else topology
    rows, columns = shape.latent_size
    frame = rows * columns * itemsize
    return OwnedBytes(
        encoder_history=shape.vae.encoder_elements(shape.height, shape.width) * itemsize,
        condition=CONDITION_CHANNELS * shape.head.latent_frames * frame,
        latents=LATENT_CHANNELS * shape.head.num_frame_per_block * frame,
    )


def dreamzero_kv_spec(
    topology: DreamZeroTopology | None = None,
    *,
    owned: OwnedBytes,
    session_capacity: int = DEFAULT_CAPACITY,
    cfg_parallel: int = 1,
) -> ARDiffusionKVCacheSpec:
    """The KV spec of one worker.

    Args:
        topology: None is the published one.
        owned: see `owned_bytes`.
        session_capacity: most resident sessions.
        cfg_parallel: workers that share the branches; with two, each runs one, on its only slot.
    """
    shape = DreamZeroTopology() if topology is None else topology
    head, model = shape.head, shape.head.transformer
    return ARDiffusionKVCacheSpec(
        num_layers=model.num_layers,
        num_kv_heads=model.num_heads,
        head_size=model.head_dim,
        tokens_per_frame=model.frame_seqlen,
        frames_per_block=head.num_frame_per_block,
        window_frames=head.max_attention_tokens // model.frame_seqlen,
        sink_frames=model.sink_size,
        kv_branches=(
            ARDiffusionKVBranchSpec(POSITIVE, 0),
            ARDiffusionKVBranchSpec(NEGATIVE, 0 if cfg_parallel >= 2 else 1),
        ),
        cross_attention=(
            ARDiffusionCrossAttentionKVSpec(TEXT, model.text_len),
            *(
                (ARDiffusionCrossAttentionKVSpec(IMAGE, shape.clip.tokens),)
                if model.model_type == "i2v"
                else ()
            ),
        ),
        max_scratch_tokens_per_branch=model.registers,
        session_capacity=session_capacity,
        model_owned_state_bytes_per_session=owned.total,
    )


@dataclass(frozen=True, slots=True)
class DreamZeroSpecSettings:
    """Settings of a deployment that change what a session costs.

    Args:
        checkpoint: its directory, of which the configurations are read; None is the published one.
        session_capacity: most resident sessions.
        cfg_parallel: workers that share the branches: 1 or 2.
        dtype: element type of the model's own state.
    """

    checkpoint: object = None
    session_capacity: int = DEFAULT_CAPACITY
    cfg_parallel: int = 1
    dtype: str = DEFAULT_DTYPE

    @classmethod
    def from_mapping(cls, config: Mapping[str, Any]) -> DreamZeroSpecSettings:
        """From raw settings; ConfigurationError naming one that does not exist or is out of range."""
        known = [entry.name for entry in fields(cls)]
        for name in config:
            if name not in known:
                raise ConfigurationError(
                    f"dreamzero has no setting {name!r:.80} that changes its KV; known: {', '.join(known)}",
                    field=str(name)[:80],
                )
        return cls(**config)

    def __post_init__(self) -> None:
        for name, most in (("session_capacity", None), ("cfg_parallel", 2)):
            value = getattr(self, name)
            if type(value) is not int or value < 1 or (most is not None and value > most):
                limit = ">= 1" if most is None else f"1 to {most}"
                raise ConfigurationError(f"{name} must be an integer {limit}, got {value!r:.80}", field=name)
        if self.dtype not in tuple(_ITEM_BYTES):
            raise ConfigurationError(
                f"dtype is one of {', '.join(_ITEM_BYTES)}, got {self.dtype!r:.80}", field="dtype"
            )

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return _ITEM_BYTES[self.dtype]


def checkpoint_folder(value: object) -> Path:
    """The checkpoint's directory; ConfigurationError unless there is one."""
    if not isinstance(value, str | Path) or not str(value):
        raise ConfigurationError("dreamzero needs a checkpoint directory", field="checkpoint")
    if not Path(value).is_dir():
        raise ConfigurationError("the checkpoint directory does not exist", field="checkpoint")
    return Path(value)


class PlannedSpec:
    """What `worldline plan` calls: a deployment's settings in, the KV spec out."""

    default_dtype: Final = DEFAULT_DTYPE

    def __call__(self, config: Mapping[str, Any]) -> ARDiffusionKVCacheSpec:
        """The spec of the published checkpoint, or of the one that the settings name; see `DreamZeroSpecSettings`."""
        chosen = DreamZeroSpecSettings.from_mapping(config)
        topology = DreamZeroTopology()
        if chosen.checkpoint is not None:
            topology = Deployment.load(checkpoint_folder(chosen.checkpoint)).topology
        return dreamzero_kv_spec(
            topology,
            owned=owned_bytes(topology, itemsize=chosen.itemsize),
            session_capacity=chosen.session_capacity,
            cfg_parallel=chosen.cfg_parallel,
        )


kv_spec: Final = PlannedSpec()
