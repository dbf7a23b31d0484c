"""The Wan VAE under the checkpoint's names, and what a robot's cameras show as latents, frame by frame.

    begin      the first picture                        one latent frame
    append     one picture; every fourth completes a chunk, which gives one more latent frame
    recent     the last latent frames

A stream is a value: what an append makes is another stream, so that whoever keeps one keeps it only once the work that it
was for has succeeded.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from contracts.errors import ConfigurationError, InvalidArgumentError
from gpu_worker.models.dreamzero.checks import check_tensor
from gpu_worker.models.lingbot_world.spec import MASK_CHANNELS, VaeGeometry
from gpu_worker.models.lingbot_world.vae import (
    PICTURE_CHANNELS,
    LatentScale,
    Slot,
    causal_convolutions,
    check_vae,
    history_bytes,
    tiled,
    wan_vae_class,
)

FRAMES_PER_CHUNK: Final = 4
"""Pictures of each latent frame but the first."""

# ---------------------------------------------------------------------------------------------------- names

_PLAIN: Final = (
    (r"quant_conv", "conv1"),
    (r"post_quant_conv", "conv2"),
    (r"(encoder|decoder)\.conv_in", r"\1.conv1"),
    (r"(encoder|decoder)\.norm_out", r"\1.head.0"),
    (r"(encoder|decoder)\.conv_out", r"\1.head.2"),
    (r"(encoder|decoder)\.mid_block\.resnets\.0", r"\1.middle.0"),
    (r"(encoder|decoder)\.mid_block\.attentions\.0", r"\1.middle.1"),
    (r"(encoder|decoder)\.mid_block\.resnets\.1", r"\1.middle.2"),
    (r"encoder\.down_blocks\.(\d+)", r"encoder.downsamples.\1"),
)
_UPWARDS: Final = re.compile(r"decoder\.up_blocks\.(\d+)\.(resnets|upsamplers)\.(\d+)\.(.+)")
_IN_RESIDUAL: Final = {
    "norm1": "residual.0",
    "conv1": "residual.2",
    "norm2": "residual.3",
    "conv2": "residual.6",
    "conv_shortcut": "shortcut",
}


def published_names(geometry: VaeGeometry) -> Callable[[str], str]:
    """What the checkpoint calls a parameter of diffusers' `AutoencoderKLWan` of that layout."""
    resnets = geometry.res_blocks + 1

    def published(name: str) -> str:
        upwards = _UPWARDS.fullmatch(name)
        if (
            upwards is not None
        ):  # the decoder's stages are one list there, each stage's upsampling behind its blocks
            stage, kind, index, rest = upwards.groups()
            place = int(stage) * (resnets + 1) + (int(index) if kind == "resnets" else resnets)
            return f"decoder.upsamples.{place}.{_renamed(rest)}"
        for pattern, replacement in _PLAIN:
            found = re.fullmatch(rf"{pattern}\.(?P<rest>.+)", name)
            if found is not None:
                return f"{found.expand(replacement)}.{_renamed(found['rest'])}"
        return name

    return published


def _renamed(rest: str) -> str:
    first, dot, last = rest.partition(".")
    return _IN_RESIDUAL.get(first, first) + dot + last


def wan_vae(geometry: VaeGeometry) -> Any:
    """diffusers' `AutoencoderKLWan` of that layout, where torch puts modules at the moment."""
    return wan_vae_class().from_config(
        {
            "base_dim": geometry.base,
            "z_dim": geometry.z,
            "dim_mult": list(geometry.mult),
            "num_res_blocks": geometry.res_blocks,
            "temperal_downsample": list(geometry.temporal_downsample),
        }
    )


# ---------------------------------------------------------------------------------------------------- pictures to latents


@dataclass(frozen=True, slots=True, eq=False)
class VideoStream:
    """What a session keeps of its pictures.

    Args:
        history: of the encoder, one slot a causal convolution.
        pending: pictures that wait for their chunk, [1, 3, H, W] each; fewer than four.
        latents: [1, 16, n, h, w], the last latent frames; never more than the encoder keeps.
        kept: latent frames that the encoder keeps.
    """

    history: tuple[Slot, ...]
    pending: tuple[torch.Tensor, ...]
    latents: torch.Tensor
    kept: int

    def recent(self, frames: int) -> torch.Tensor:
        """The last latent frames [1, 16, frames, h, w]; where there are fewer, the last one stands in front as well.

        Raises InvalidArgumentError where so many are never kept.
        """
        if frames not in range(1, self.kept + 1):
            raise InvalidArgumentError(
                f"a video stream keeps the last {self.kept} latent frames, asked for {frames!r:.80}",
                field="frames",
            )
        found = self.latents[:, :, -frames:]
        missing = frames - found.shape[2]
        return torch.cat((found[:, :, -1:].expand(-1, -1, missing, -1, -1), found), dim=2)

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return history_bytes(self.history) + sum(part.nbytes for part in (*self.pending, self.latents))


class VideoEncoder:
    """Encodes pictures of sessions that take turns. Streams are the caller's; the VAE's own caches are not touched.

    Args:
        vae: diffusers' `AutoencoderKLWan`.
        height, width: of every picture, in pixels.
        kept: latent frames that a stream keeps.
        dtype: of latents and conditions.

    Raises:
        InvalidTypeError: it is another VAE.
        ConfigurationError: it works on patches, or on tiles of such pictures.
    """

    def __init__(self, vae: Any, height: int, width: int, *, kept: int, dtype: torch.dtype) -> None:
        check_vae(vae)
        if tiled(vae, height, width):
            raise ConfigurationError(
                f"a VAE that tiles pictures of {height} x {width} can't stream", field="use_tiling"
            )
        self._vae = vae
        self._size = (height, width)
        self._kept = kept
        self._dtype = dtype
        weight = vae.quant_conv.weight
        self._vae_dtype, self._device = weight.dtype, weight.device
        self._scale = LatentScale.of(vae, self._device)
        self._slots = causal_convolutions(vae.encoder)

    @torch.no_grad()
    def begin(self, picture: torch.Tensor) -> VideoStream:
        """A stream that has seen one picture [1, 3, H, W] in [-1, 1], on any device."""
        history: list[Slot] = [None] * self._slots
        latents = self._encode(self._checked(picture).unsqueeze(2), history)
        return VideoStream(tuple(history), (), latents, self._kept)

    @torch.no_grad()
    def append(self, stream: VideoStream, picture: torch.Tensor) -> VideoStream:
        """The stream with one more picture; if it is the fourth since the last chunk, with one more latent frame."""
        if len(stream.history) != self._slots:
            raise InvalidArgumentError(
                f"the stream has {len(stream.history)} slots and does not belong to this encoder of {self._slots}",
                field="stream",
            )
        pending = (*stream.pending, self._checked(picture))
        if len(pending) < FRAMES_PER_CHUNK:
            return VideoStream(stream.history, pending, stream.latents, stream.kept)
        history = list(stream.history)
        latent = self._encode(torch.stack(pending, dim=2), history)
        latents = torch.cat((stream.latents, latent), dim=2)[:, :, -self._kept :].clone()
        return VideoStream(tuple(history), (), latents, stream.kept)

    @torch.no_grad()
    def condition(self, picture: torch.Tensor, frames: int) -> torch.Tensor:
        """What a rollout of `frames` latent frames that begins with `picture` is conditioned on.

        Args:
            picture: [1, 3, H, W] in [-1, 1], on any device.
            frames: latent frames.

        Returns:
            [1, 20, frames, h, w]: a mask that is 1 on the first frame, and the latents of the picture and grey after it.
        """
        first = self._checked(picture).unsqueeze(2)
        grey = torch.zeros_like(first).expand(-1, -1, FRAMES_PER_CHUNK, -1, -1)
        history: list[Slot] = [None] * self._slots
        latents = torch.cat(
            [self._encode(grey if index else first, history) for index in range(frames)], dim=2
        )
        mask = latents.new_zeros((1, MASK_CHANNELS, *latents.shape[2:]))
        mask[:, :, 0] = 1
        return torch.cat((mask, latents), dim=1)

    def _encode(self, pictures: torch.Tensor, history: list[Slot]) -> torch.Tensor:
        """One latent frame [1, 16, 1, h, w] of a chunk [1, 3, 1 or 4, H, W]; replaces the slots."""
        moments = self._vae.quant_conv(self._vae.encoder(pictures, feat_cache=history, feat_idx=[0]))
        return self._scale.normalise(moments[:, : self._vae.config.z_dim]).to(self._dtype)

    def _checked(self, picture: object) -> torch.Tensor:
        device = picture.device if isinstance(picture, torch.Tensor) else self._device
        found = check_tensor("picture", picture, (1, PICTURE_CHANNELS, *self._size), device=device)
        return found.to(device=self._device, dtype=self._vae_dtype)
