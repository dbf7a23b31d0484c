"""What streaming encoder and decoder share of the Wan VAE: its histories, and what both ask of it.

A history has one slot a causal convolution, in the order in which they run: the last frames that it has seen. Slots
are replaced, never written into, so a copy of the list is a copy of the history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from contracts.errors import ConfigurationError, InvalidTypeError
from gpu_worker.models.lingbot_world.spec import VaeGeometry

Slot = torch.Tensor | str | None
"""Frames [1, C, frames, h, w]; None before the first call; a string marks an upsampling that has seen one frame."""

LATENT_PIXEL: Final = 8
PICTURE_CHANNELS: Final = 3

_FIXED: Final[tuple[tuple[str, object], ...]] = (
    ("_class_name", "AutoencoderKLWan"),
    ("attn_scales", []),
    ("dropout", 0.0),
    ("is_residual", False),
    ("in_channels", PICTURE_CHANNELS),
    ("out_channels", PICTURE_CHANNELS),
    ("patch_size", None),
    ("scale_factor_temporal", 4),
    ("scale_factor_spatial", LATENT_PIXEL),
)


def wan_vae_class() -> Any:
    """diffusers' `AutoencoderKLWan`; ConfigurationError where it is not installed."""
    try:
        from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
    except ImportError as error:
        raise ConfigurationError(
            f"the Wan VAE needs diffusers, of the extra worldline[lingbot] or [dreamzero]: {error}",
            field="model",
        ) from error
    return AutoencoderKLWan


def check_vae(vae: object) -> None:
    """InvalidTypeError unless `vae` is a Wan VAE; ConfigurationError for one that works on patches."""
    if not isinstance(vae, wan_vae_class()):
        raise InvalidTypeError(f"the VAE must be AutoencoderKLWan, got {type(vae).__name__}", field="vae")
    config: Any = vae.config
    if config.patch_size is not None:
        raise ConfigurationError(
            f"a VAE with patches can't stream: patch_size is {config.patch_size!r:.80}", field="patch_size"
        )


def check_vae_config(config: Mapping[str, Any], geometry: VaeGeometry) -> None:
    """ConfigurationError, naming the field, unless `vae/config.json` has that layout. Absent fields have its values."""
    expected = (
        ("base_dim", geometry.base),
        ("decoder_base_dim", geometry.base),
        ("z_dim", geometry.z),
        ("dim_mult", list(geometry.mult)),
        ("num_res_blocks", geometry.res_blocks),
        ("temperal_downsample", list(geometry.temporal_downsample)),
        *_FIXED,
    )
    for name, value in expected:
        found = config.get(name, value)
        if found != value and not (name == "decoder_base_dim" and found is None):
            raise ConfigurationError(
                f"the VAE's {name} must be {value!r}, the checkpoint says {found!r:.80}", field=name
            )


@dataclass(frozen=True, slots=True)
class LatentScale:
    """Between the VAE's latents and the transformer's: (z - mean) / std, and back. Both [1, 16, 1, 1, 1] float32."""

    mean: torch.Tensor
    std: torch.Tensor

    @classmethod
    def of(cls, vae: Any, device: torch.device) -> LatentScale:
        """The checkpoint's; ConfigurationError unless there is one positive deviation and one mean a channel."""
        parts = []
        for name in ("latents_mean", "latents_std"):
            numbers, count = getattr(vae.config, name), vae.config.z_dim
            kind = ConfigurationError(f"the VAE's {name} must be {count} finite numbers", field=name)
            try:
                values = torch.tensor(list(numbers), dtype=torch.float32, device=device)
            except (TypeError, ValueError, RuntimeError, OverflowError):
                raise kind from None
            if values.shape != (count,) or not bool(values.isfinite().all()):
                raise kind
            parts.append(values.view(1, -1, 1, 1, 1))
        if not bool((parts[1] > 0).all()):
            raise ConfigurationError("the VAE's latents_std must be positive", field="latents_std")
        return cls(*parts)

    def normalise(self, latents: torch.Tensor) -> torch.Tensor:
        """The VAE's latents [1, 16, F, h, w], of any type, as the transformer sees them; float32."""
        return (latents.float() - self.mean) / self.std

    def restore(self, latents: torch.Tensor) -> torch.Tensor:
        """The way back; float32."""
        return latents.float() * self.std + self.mean


def causal_convolutions(part: torch.nn.Module) -> int:
    """Slots of a history of `part`; shortcuts count, although theirs stay empty."""
    from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d

    return sum(isinstance(module, WanCausalConv3d) for module in part.modules())


def tiled(vae: Any, height: int, width: int) -> bool:
    """Whether the VAE would cut pictures of that size, in pixels, into tiles."""
    return bool(vae.use_tiling and (width > vae.tile_sample_min_width or height > vae.tile_sample_min_height))


def history_bytes(history: Sequence[Slot]) -> int:
    """Bytes that a history holds."""
    return sum(slot.nbytes for slot in history if isinstance(slot, torch.Tensor))
