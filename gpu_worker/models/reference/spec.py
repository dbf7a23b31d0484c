"""Geometry and KV cost of the reference world. No torch: capacity is planned without loading the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from contracts.errors import ConfigurationError
from contracts.kv_spec import (
    ARDiffusionCrossAttentionKVSpec,
    ARDiffusionKVBranchSpec,
    ARDiffusionKVCacheSpec,
)

BRANCH: Final = "main"
TEXT: Final = "text"

FRAMES: Final = 3
"""Latent frames of one chunk."""
GRID: Final = 4
"""Tokens along each side of a latent frame."""
CHANNELS: Final = 16
"""Latent channels: 3 of geometry (the world point that a patch looks at), 13 of texture."""
GEOMETRY_CHANNELS: Final = 3
TOKENS_PER_FRAME: Final = GRID * GRID
LAYERS: Final = 4
HEADS: Final = 4
HEAD_SIZE: Final = 16
TEXT_TOKENS: Final = 16
PIXEL_FRAMES_PER_FRAME: Final = 4
PIXEL_SIDE: Final = 96


@dataclass(frozen=True, slots=True)
class ReferenceConfig:
    """What a deployment may choose.

    Args:
        weights_seed: seed of the weights; another seed is another kind of world.
        session_capacity: most resident sessions.
        window_frames: recent frames that attention sees, the current ones included.
        sink_frames: leading frames that attention always sees.
    """

    weights_seed: int = 7
    session_capacity: int = 64
    window_frames: int = 6
    sink_frames: int = 3

    @classmethod
    def from_mapping(cls, config: Mapping[str, Any]) -> ReferenceConfig:
        """From raw settings; ConfigurationError for one that does not exist or is no integer >= 0."""
        known = {field.name for field in fields(cls)}
        for name, value in config.items():
            if name not in known:
                raise ConfigurationError(
                    f"the reference model has no setting {name!r:.80}; known: {', '.join(sorted(known))}",
                    field=str(name)[:80],
                )
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigurationError(f"{name} must be an integer >= 0, got {value!r:.80}", field=name)
        return cls(**config)


def owned_state_bytes() -> int:
    """Bytes that the model keeps for a session: the last latent frame, which the decoder continues from."""
    return CHANNELS * TOKENS_PER_FRAME * 4


def kv_spec(config: Mapping[str, Any]) -> ARDiffusionKVCacheSpec:
    """The KV geometry for a deployment's settings (see `ReferenceConfig`)."""
    chosen = ReferenceConfig.from_mapping(config)
    return ARDiffusionKVCacheSpec(
        num_layers=LAYERS,
        num_kv_heads=HEADS,
        head_size=HEAD_SIZE,
        tokens_per_frame=TOKENS_PER_FRAME,
        frames_per_block=FRAMES,
        window_frames=chosen.window_frames,
        sink_frames=chosen.sink_frames,
        kv_branches=(ARDiffusionKVBranchSpec(BRANCH, 0),),
        cross_attention=(ARDiffusionCrossAttentionKVSpec(TEXT, TEXT_TOKENS),),
        session_capacity=chosen.session_capacity,
        model_owned_state_bytes_per_session=owned_state_bytes(),
    )
