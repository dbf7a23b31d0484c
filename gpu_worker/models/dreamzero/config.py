"""What a DreamZero checkpoint is: the fields of its `config.json` that matter here, and the sizes that follow. Torch-free.

    action_head_cfg.config                          the action head: frames of a block, actions, states, noise
    action_head_cfg.config.diffusion_model_cfg      the transformer

The defaults are the published checkpoint's. A field that is absent has them; one that is there must agree, except the
two noise settings, which a checkpoint may choose.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from contracts.errors import ConfigurationError
from gpu_worker.models.lingbot_world.spec import VaeGeometry

LATENT_CHANNELS: Final = 16
CONDITION_CHANNELS: Final = 20
"""4 of the mask, 16 of the image latents."""

PATCH: Final = (1, 2, 2)
"""Latent frames, rows and columns of a token."""

_LATENT_PIXEL: Final = 8
_UNLIMITED_FRAMES: Final = 21
"""Latent frames that attention is sized for where the checkpoint does not limit it."""

_MOST_FINAL_NOISE: Final = 0.999
"""The noisiest level that a sampler begins at: a video can't end with more."""

_CHOICES: Final = ("decouple_inference_noise", "video_inference_final_noise")


@dataclass(frozen=True, slots=True)
class DreamZeroTransformerConfig:
    """The fields of `diffusion_model_cfg`.

    Args:
        model_type: "i2v": text and an image are attended to.
        dim: width of the hidden state.
        num_heads: heads of every attention.
        num_layers: blocks.
        ffn_dim: hidden width of the feed-forward.
        in_dim: 16 noisy, 4 mask, 16 image latent.
        out_dim: channels of the predicted flow.
        freq_dim: width of the timestep's sinusoid.
        text_dim: width of the text encoder's embeddings.
        text_len: tokens of a text.
        eps: of the norms.
        frame_seqlen: tokens of a latent frame.
        num_action_per_block: actions beside a block of frames.
        num_state_per_block: states beside a block of frames.
        max_chunk_size: blocks that are remembered beside the first frame; -1 is no limit.
        hidden_size: width inside the state encoder and the action decoder.
        sink_size: leading frames that are never forgotten.
    """

    model_type: str = "i2v"
    dim: int = 5120
    num_heads: int = 40
    num_layers: int = 40
    ffn_dim: int = 13824
    in_dim: int = LATENT_CHANNELS + CONDITION_CHANNELS
    out_dim: int = LATENT_CHANNELS
    freq_dim: int = 256
    text_dim: int = 4096
    text_len: int = 512
    eps: float = 1e-6
    frame_seqlen: int = 880
    num_action_per_block: int = 24
    num_state_per_block: int = 1
    max_chunk_size: int = 4
    hidden_size: int = 1024
    sink_size: int = 0

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.num_heads

    @property
    def registers(self) -> int:
        """Action and state tokens beside a block of frames."""
        return self.num_action_per_block + self.num_state_per_block


@dataclass(frozen=True, slots=True)
class DreamZeroConfig:
    """The fields of `action_head_cfg.config`.

    Args:
        num_frames: pixel frames of a rollout, the first one included.
        num_frame_per_block: latent frames of one observation's forward.
        action_horizon: actions that one observation is answered with.
        action_dim: their dimensions.
        max_action_dim: width of an action as the transformer sees it.
        max_state_dim: width of a state as the transformer sees it.
        video_inference_final_noise: where the video's noise ends if it is decoupled, 0 to 1.
        decouple_inference_noise: whether the video stays noisy while the actions become clean.
        transformer: `diffusion_model_cfg`.
    """

    num_frames: int = 33
    num_frame_per_block: int = 2
    action_horizon: int = 24
    action_dim: int = 32
    max_action_dim: int = 32
    max_state_dim: int = 64
    video_inference_final_noise: float = 0.8
    decouple_inference_noise: bool = False
    transformer: DreamZeroTransformerConfig = field(default_factory=DreamZeroTransformerConfig)

    @property
    def latent_frames(self) -> int:
        """Latent frames of a rollout: the first pixel frame gives one, four further ones each one more."""
        return (self.num_frames - 1) // 4 + 1

    @property
    def local_attention_frames(self) -> int:
        """Latent frames after which a rollout begins anew; -1 is never."""
        blocks = self.transformer.max_chunk_size
        return -1 if blocks == -1 else blocks * self.num_frame_per_block + 1

    @property
    def window_frames(self) -> int:
        """Latent frames that attention sees in all."""
        limit = self.local_attention_frames
        return _UNLIMITED_FRAMES if limit == -1 else limit

    @property
    def max_attention_tokens(self) -> int:
        """Video tokens that attention sees in all."""
        return self.window_frames * self.transformer.frame_seqlen

    @classmethod
    def from_checkpoint(cls, config: object, pinned: DreamZeroConfig | None = None) -> DreamZeroConfig:
        """`pinned`, with the checkpoint's noise settings, once it is sure that the rest agrees.

        Args:
            config: the content of `config.json`.
            pinned: what the checkpoint must be; None is the published one.

        Raises:
            ConfigurationError: a field has another value, or a noise setting is none; it is named.
        """
        expected = cls() if pinned is None else pinned
        head = _object(_object(config, "config.json").get("action_head_cfg"), "action_head_cfg")
        head = _object(head.get("config"), "action_head_cfg.config")
        model = _object(head.get("diffusion_model_cfg"), "diffusion_model_cfg")
        _check_fields("the transformer", model, expected.transformer)
        _check_fields("the action head", head, expected)
        chosen: dict[str, Any] = {name: _choice(name, head, getattr(expected, name)) for name in _CHOICES}
        noise = chosen["video_inference_final_noise"]
        if chosen["decouple_inference_noise"] and noise >= _MOST_FINAL_NOISE:
            raise ConfigurationError(
                f"a video whose noise is decoupled must end below {_MOST_FINAL_NOISE}, the checkpoint says {noise}",
                field="video_inference_final_noise",
            )
        return replace(expected, **chosen)


def _object(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{name} must be an object, got {type(value).__name__}", field=name)
    return value


def _check_fields(
    what: str, found: Mapping[str, Any], expected: DreamZeroConfig | DreamZeroTransformerConfig
) -> None:
    for entry in fields(expected):
        name, value = entry.name, getattr(expected, entry.name)
        if name in _CHOICES or name == "transformer" or name not in found:
            continue
        if isinstance(found[name], bool) or found[name] != value:  # no field here is a bool, and True is no 1
            raise ConfigurationError(
                f"{what}'s {name} must be {value!r}, the checkpoint says {found[name]!r:.80}", field=name
            )


def _choice(name: str, found: Mapping[str, Any], default: float) -> float:
    value = found.get(name, default)
    if isinstance(default, bool):
        good = isinstance(value, bool)
    else:
        good = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
    if not good:
        kind = "a bool" if isinstance(default, bool) else "a number from 0 to 1"
        raise ConfigurationError(
            f"the action head's {name} must be {kind}, the checkpoint says {value!r:.80}", field=name
        )
    return value


# ---------------------------------------------------------------------------------------------------- the other parts


@dataclass(frozen=True, slots=True)
class ClipGeometry:
    """The image tower's layout: CLIP's ViT-H.

    Args:
        image_size: side of the picture, in pixels.
        patch_size: side of a patch, in pixels.
        width: of the hidden state.
        heads: of every attention.
        layers: blocks of the checkpoint; the last one does not run.
        eps: of the norms.
    """

    image_size: int = 224
    patch_size: int = 14
    width: int = 1280
    heads: int = 16
    layers: int = 32
    eps: float = 1e-5

    @property
    def tokens(self) -> int:
        """One a patch, and the class token in front."""
        return (self.image_size // self.patch_size) ** 2 + 1

    @property
    def layers_run(self) -> int:
        """Blocks that run."""
        return self.layers - 1


@dataclass(frozen=True, slots=True)
class TextGeometry:
    """The text encoder's layout: UMT5-XXL's.

    Args:
        vocabulary: tokens.
        heads: of every attention.
        head_dim: width of one.
        ffn_dim: hidden width of the gated feed-forward.
        layers: blocks.
        buckets: of relative distances.
        max_distance: beyond which they are all alike.
    """

    vocabulary: int = 256_384
    heads: int = 64
    head_dim: int = 64
    ffn_dim: int = 10_240
    layers: int = 24
    buckets: int = 32
    max_distance: int = 128


@dataclass(frozen=True, slots=True)
class DreamZeroTopology:
    """What the checkpoint must be; the defaults are the published one.

    Args:
        head: action head and transformer.
        clip, text, vae: the encoders.
        height, width: of the stitched picture, in pixels.
    """

    head: DreamZeroConfig = field(default_factory=DreamZeroConfig)
    clip: ClipGeometry = field(default_factory=ClipGeometry)
    text: TextGeometry = field(default_factory=TextGeometry)
    vae: VaeGeometry = field(default_factory=VaeGeometry)
    height: int = 352
    width: int = 640

    def __post_init__(self) -> None:
        for name, side, tokens in (("height", self.height, PATCH[1]), ("width", self.width, PATCH[2])):
            if side % (_LATENT_PIXEL * tokens):
                raise ConfigurationError(
                    f"the stitched picture's {name} must be a multiple of {_LATENT_PIXEL * tokens}, got {side}",
                    field="view_size",
                )
        tokens = math.prod(self.latent_size) // math.prod(PATCH)
        if tokens != self.head.transformer.frame_seqlen:
            raise ConfigurationError(
                f"frame_seqlen is {self.head.transformer.frame_seqlen}, pictures of {self.height} x {self.width} "
                f"have {tokens} tokens a latent frame",
                field="frame_seqlen",
            )

    @property
    def latent_size(self) -> tuple[int, int]:
        """Rows and columns of a latent frame: 44 x 80."""
        return self.height // _LATENT_PIXEL, self.width // _LATENT_PIXEL
