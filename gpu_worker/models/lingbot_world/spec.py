"""What a session of LingBot World costs: KV geometry, and every byte the model keeps beside it. Torch-free.

    owned = condition + camera modulation + 2 * encoder history + decoder history

The encoder's history counts twice: what is committed, and what the chunk in flight would make of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from contracts.errors import ConfigurationError, InvalidArgumentError
from contracts.kv_spec import (
    ARDiffusionCrossAttentionKVSpec,
    ARDiffusionKVBranchSpec,
    ARDiffusionKVCacheSpec,
)
from gpu_worker.models.lingbot_world.config import LingBotTransformerConfig, check_degree
from gpu_worker.models.lingbot_world.resolution import check_resolution

BRANCH: Final = "main"
TEXT: Final = "text"
TEXT_TOKENS: Final = 512

MASK_CHANNELS: Final = 4
_LATENT_PIXEL: Final = 8
_MID_CONVS: Final = 4
_HISTORY_FRAMES: Final = 2
DEFAULT_DTYPE: Final = "bfloat16"
"""What the published weights are run in: in float32 neither they nor a session fit on a card."""

_ITEM_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class VaeGeometry:
    """The VAE's layout, as far as its caches depend on it; the defaults are the published one's.

    Args:
        base: channels at full size.
        mult: channels of each stage, in bases.
        z: latent channels.
        res_blocks: residual blocks of an encoder stage; the decoder has one more.
        temporal_downsample: which of the encoder's downsamplings also halve time.
    """

    base: int = 96
    mult: tuple[int, ...] = (1, 2, 4, 4)
    z: int = 16
    res_blocks: int = 2
    temporal_downsample: tuple[bool, ...] = (False, True, True)

    def encoder_elements(self, height: int, width: int) -> int:
        """Elements of one streaming encoder history: the last frames that each convolution saw."""
        area, channels = height * width, self.base
        total = _HISTORY_FRAMES * 3 * area  # conv_in
        for stage, mult in enumerate(self.mult):
            out = self.base * mult
            for _ in range(self.res_blocks):
                total += _HISTORY_FRAMES * (channels + out) * area
                channels = out
            if stage < len(self.temporal_downsample):
                area //= 4
                total += channels * area if self.temporal_downsample[stage] else 0
        return total + (_MID_CONVS + 1) * _HISTORY_FRAMES * channels * area  # the middle, and conv_out

    def decoder_elements(self, height: int, width: int) -> int:
        """Elements of one streaming decoder history."""
        area = (height // _LATENT_PIXEL) * (width // _LATENT_PIXEL)
        channels = self.base * self.mult[-1]
        total = _HISTORY_FRAMES * (self.z + _MID_CONVS * channels) * area  # conv_in, and the middle
        temporal_upsample = self.temporal_downsample[::-1]
        for stage, mult in enumerate(reversed(self.mult)):
            out = self.base * mult
            for _ in range(self.res_blocks + 1):
                total += _HISTORY_FRAMES * (channels + out) * area
                channels = out
            if stage < len(temporal_upsample):
                total += _HISTORY_FRAMES * channels * area if temporal_upsample[stage] else 0
                area, channels = area * 4, channels // 2  # an upsampling halves the channels, too
        return total + _HISTORY_FRAMES * channels * area  # conv_out


@dataclass(frozen=True, slots=True)
class OwnedBytes:
    """What the model keeps for one session on one worker, in bytes."""

    condition: int
    camera_modulation: int
    encoder_histories: int
    decoder_history: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.condition + self.camera_modulation + self.encoder_histories + self.decoder_history


def owned_bytes(
    height: int,
    width: int,
    *,
    transformer: LingBotTransformerConfig | None = None,
    vae: VaeGeometry | None = None,
    itemsize: int = 2,
    vae_itemsize: int | None = None,
    degree: int = 1,
    decoder_width: int | None = None,
) -> OwnedBytes:
    """The model-owned state of a session.

    Args:
        height, width: of the pictures, in pixels.
        transformer, vae: None is the published one.
        itemsize: bytes of a transformer's element.
        vae_itemsize: bytes of a VAE's; None is the same.
        degree: workers that share a sequence; each keeps the camera modulation of its own tokens.
        decoder_width: columns of the picture that this worker decodes; None is all.
    """
    model = LingBotTransformerConfig() if transformer is None else transformer
    layout = VaeGeometry() if vae is None else vae
    vae_bytes = itemsize if vae_itemsize is None else vae_itemsize
    frames, latents = model.num_frames_per_block, (height // _LATENT_PIXEL) * (width // _LATENT_PIXEL)
    block_tokens = frames * tokens_per_frame(height, width, model)
    return OwnedBytes(
        condition=(MASK_CHANNELS + model.out_channels) * frames * latents * itemsize,
        camera_modulation=2 * model.num_layers * -(-block_tokens // degree) * model.dim * itemsize,
        encoder_histories=2 * layout.encoder_elements(height, width) * vae_bytes,
        decoder_history=layout.decoder_elements(height, width if decoder_width is None else decoder_width)
        * vae_bytes,
    )


def tokens_per_frame(height: int, width: int, transformer: LingBotTransformerConfig) -> int:
    """Tokens of one latent frame."""
    _, rows, columns = transformer.patch_size
    return (height // _LATENT_PIXEL // rows) * (width // _LATENT_PIXEL // columns)


def lingbot_kv_spec(
    height: int,
    width: int,
    *,
    owned: OwnedBytes,
    transformer: LingBotTransformerConfig | None = None,
    text_tokens: int = TEXT_TOKENS,
    session_capacity: int = 2,
    degree: int = 1,
) -> ARDiffusionKVCacheSpec:
    """The KV spec of one worker: one branch, one text cache, both with this worker's heads.

    Raises:
        InvalidArgumentError: heads or tokens of a chunk can't be shared by `degree` workers.
    """
    model = LingBotTransformerConfig() if transformer is None else transformer
    frame_tokens = tokens_per_frame(height, width, model)
    check_degree(degree, model, model.num_frames_per_block * frame_tokens)
    return ARDiffusionKVCacheSpec(
        num_layers=model.num_layers,
        num_kv_heads=model.num_attention_heads // degree,
        head_size=model.attention_head_dim,
        tokens_per_frame=frame_tokens,
        frames_per_block=model.num_frames_per_block,
        window_frames=model.window_frames,
        sink_frames=model.sink_size,
        kv_branches=(ARDiffusionKVBranchSpec(BRANCH, 0),),
        cross_attention=(ARDiffusionCrossAttentionKVSpec(TEXT, text_tokens),),
        session_capacity=session_capacity,
        model_owned_state_bytes_per_session=owned.total,
    )


@dataclass(frozen=True, slots=True)
class LingBotSpecSettings:
    """Settings of a deployment that change what a session costs.

    Args:
        ar_diffusion_height, ar_diffusion_width: of every session's pictures, in pixels.
        session_capacity: most resident sessions.
        ulysses_degree: workers that share a sequence.
        dtype: element type of the model's own state.
    """

    ar_diffusion_height: int = 480
    ar_diffusion_width: int = 832
    session_capacity: int = 2
    ulysses_degree: int = 1
    dtype: str = DEFAULT_DTYPE

    @classmethod
    def from_mapping(cls, config: Mapping[str, Any]) -> LingBotSpecSettings:
        """From raw settings; ConfigurationError naming one that does not exist or is out of range."""
        known = [entry.name for entry in fields(cls)]
        for name in config:
            if name not in known:
                raise ConfigurationError(
                    f"lingbot-world has no setting {name!r:.80} that changes its KV; known: {', '.join(known)}",
                    field=str(name)[:80],
                )
        return cls(**config)

    def __post_init__(self) -> None:
        for name in ("session_capacity", "ulysses_degree"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError(f"{name} must be an integer >= 1, got {value!r:.80}", field=name)
        if self.dtype not in tuple(_ITEM_BYTES):
            raise ConfigurationError(
                f"dtype is one of {', '.join(_ITEM_BYTES)}, got {self.dtype!r:.80}", field="dtype"
            )
        try:
            check_resolution(self.ar_diffusion_height, self.ar_diffusion_width)
        except InvalidArgumentError as error:
            raise ConfigurationError(
                f"ar_diffusion_{error.message}", field=f"ar_diffusion_{error.field}"
            ) from None


class PublishedSpec:
    """What `worldline plan` calls: a deployment's settings in, the KV spec of the published checkpoint out."""

    default_dtype: Final = DEFAULT_DTYPE

    def __call__(self, config: Mapping[str, Any]) -> ARDiffusionKVCacheSpec:
        """The spec; for the settings see `LingBotSpecSettings`."""
        chosen = LingBotSpecSettings.from_mapping(config)
        height, width = chosen.ar_diffusion_height, chosen.ar_diffusion_width
        owned = owned_bytes(height, width, itemsize=_ITEM_BYTES[chosen.dtype], degree=chosen.ulysses_degree)
        return lingbot_kv_spec(
            height,
            width,
            owned=owned,
            session_capacity=chosen.session_capacity,
            degree=chosen.ulysses_degree,
        )


kv_spec: Final = PublishedSpec()
