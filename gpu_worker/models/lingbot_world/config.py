"""The transformer's topology, as its checkpoint fixes it. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from contracts.errors import ConfigurationError, InvalidArgumentError, InvalidTypeError

CLASS_NAME: Final = "CausalLingBotWorldTransformer3DModel"


@dataclass(frozen=True, slots=True)
class LingBotTransformerConfig:
    """The fields of `transformer/config.json`; the defaults are the published checkpoint's.

    Args:
        patch_size: latent frames, rows and columns of a token.
        num_attention_heads: heads of every attention.
        attention_head_dim: width of one.
        in_channels: 16 noisy, 4 mask, 16 image latent.
        out_channels: of the predicted flow.
        text_dim: width of the text encoder's embeddings.
        freq_dim: width of the timestep's sinusoid.
        ffn_dim: hidden width of the feed-forward.
        num_layers: blocks.
        cross_attn_norm: whether norm3 has weights.
        eps: of every norm.
        image_dim, added_kv_proj_dim, pos_embed_seq_len: parts that this model does not have.
        rope_max_seq_len: positions that others keep tables for; here all are computed, so it bounds nothing.
        qk_norm: kind of norm of queries and keys.
        sink_size: latent frames at the beginning that are always seen.
        num_frames_per_block: latent frames of one forward.
        sliding_window_num_frames: latent frames seen in all, the sink and the current ones included.
        local_attn_size: -1, no further limit.
    """

    patch_size: tuple[int, int, int] = (1, 2, 2)
    num_attention_heads: int = 40
    attention_head_dim: int = 128
    in_channels: int = 36
    out_channels: int = 16
    text_dim: int = 4096
    freq_dim: int = 256
    ffn_dim: int = 13824
    num_layers: int = 40
    cross_attn_norm: bool = True
    eps: float = 1e-6
    image_dim: int | None = None
    added_kv_proj_dim: int | None = None
    pos_embed_seq_len: int | None = None
    rope_max_seq_len: int = 1024
    qk_norm: str = "rms_norm_across_heads"
    sink_size: int = 9
    num_frames_per_block: int = 3
    sliding_window_num_frames: int = 18
    local_attn_size: int = -1

    @property
    def dim(self) -> int:
        """Width of the hidden state."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def window_frames(self) -> int:
        """Recent latent frames seen, without the sink: what a KV spec calls its window."""
        return self.sliding_window_num_frames - self.sink_size

    @property
    def camera_channels(self) -> int:
        """Channels of a latent pixel of folded rays."""
        return 6 * 8 * 8

    @classmethod
    def from_checkpoint(
        cls, config: Mapping[str, Any], pinned: LingBotTransformerConfig | None = None
    ) -> LingBotTransformerConfig:
        """`pinned`, once it is sure that the checkpoint is of that topology.

        Args:
            config: the content of `config.json`. A field that is absent has the pinned value; fields that this class
                does not have are somebody else's.
            pinned: what the checkpoint must be; None is the published one.

        Raises:
            ConfigurationError: a field has another value; it is named.
        """
        if not isinstance(config, Mapping):
            raise InvalidTypeError(
                f"the transformer's config must be a mapping, got {type(config).__name__}", field="config"
            )
        expected = cls() if pinned is None else pinned
        if config.get("_class_name", CLASS_NAME) != CLASS_NAME:
            raise _drift("_class_name", config["_class_name"], CLASS_NAME)
        for field in fields(cls):
            value = getattr(expected, field.name)
            if field.name in config and not _same(config[field.name], value):
                raise _drift(field.name, config[field.name], value)
        return expected


def _same(found: object, expected: object) -> bool:
    if isinstance(expected, tuple):  # JSON has lists only
        return isinstance(found, list | tuple) and tuple(found) == expected
    if isinstance(found, bool) or isinstance(expected, bool):  # True is no 1 here
        return found is expected
    return found == expected


def _drift(name: str, found: object, expected: object) -> ConfigurationError:
    return ConfigurationError(
        f"the transformer's {name} must be {expected!r}, the checkpoint says {found!r:.80}", field=name
    )


def check_degree(degree: int, config: LingBotTransformerConfig, block_tokens: int) -> None:
    """InvalidArgumentError unless `degree` workers can share the heads and the tokens of a block equally."""
    for name, count in (("heads", config.num_attention_heads), ("tokens of a block", block_tokens)):
        if count % degree:
            raise InvalidArgumentError(
                f"the {count} {name} must be divisible by ulysses_degree {degree}", field="ulysses_degree"
            )
