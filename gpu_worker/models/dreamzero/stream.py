"""What the VAE makes of a robot's cameras: a stream of latent frames, and the condition of a rollout.

    begin      the first picture is one latent frame
    append     pictures wait; each four of them become one more latent frame
    newest     the last latent frames, the newest repeated in front where there are too few

    condition  [mask 4 | image latents 16] of a clip that is the picture and grey ever after

Histories and pictures are replaced, never written into, so a state that was kept stays what it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from contracts.errors import ConfigurationError, InvalidArgumentError
from gpu_worker.models.dreamzero.config import LATENT_CHANNELS
from gpu_worker.models.dreamzero.pictures import Picture, to_pixels
from gpu_worker.models.lingbot_world.spec import MASK_CHANNELS
from gpu_worker.models.lingbot_world.vae import (
    PICTURE_CHANNELS,
    LatentScale,
    Slot,
    causal_convolutions,
    check_vae,
    history_bytes,
    tiled,
)

PICTURES_PER_LATENT: Final = 4
"""Of every latent frame but the first."""


class FrameEncoder:
    """The VAE's encoder, one latent frame at a time. Histories are the caller's.

    Args:
        vae: diffusers' `AutoencoderKLWan`; its own caches are not touched.
        height, width: of every picture, in pixels.
        dtype: of the latents that it returns.

    Raises:
        InvalidTypeError: it is another VAE.
        ConfigurationError: it works on patches, or would cut such pictures into tiles.
    """

    def __init__(self, vae: Any, *, height: int, width: int, dtype: torch.dtype) -> None:
        check_vae(vae)
        if tiled(vae, height, width):
            raise ConfigurationError(
                f"a VAE that tiles pictures of {height} x {width} can't stream", field="use_tiling"
            )
        self._vae = vae
        self._dtype = dtype
        self._size = height, width
        weight = vae.quant_conv.weight
        self.device, self._vae_dtype = weight.device, weight.dtype
        self._scale = LatentScale.of(vae, weight.device)
        self.slots = causal_convolutions(vae.encoder)

    def pixels(self, picture: Picture) -> torch.Tensor:
        """A picture [1, 3, H, W] in [-1, 1]; InvalidArgumentError for one of another size."""
        if picture.shape != (*self._size, PICTURE_CHANNELS):
            expected = [*self._size, PICTURE_CHANNELS]
            raise InvalidArgumentError(
                f"a picture must have shape {expected}, got {list(picture.shape)}", field="images"
            )
        return to_pixels(picture, self.device, self._dtype)

    def encode(
        self, pictures: Sequence[Picture], history: tuple[Slot, ...] | None
    ) -> tuple[torch.Tensor, tuple[Slot, ...]]:
        """One latent frame [1, 16, 1, h, w], and the history after it.

        Args:
            pictures: one where there is no history yet, else four.
            history: what was seen before.
        """
        expected = 1 if history is None else PICTURES_PER_LATENT
        if len(pictures) != expected:
            raise InvalidArgumentError(
                f"a latent frame is made of {expected} pictures here, got {len(pictures)}", field="images"
            )
        return self._encode(torch.stack([self.pixels(picture) for picture in pictures], dim=2), history)

    def condition(self, picture: Picture, frames: int) -> torch.Tensor:
        """[1, 20, frames, h, w]: the picture, and grey after it; the mask marks the first frame."""
        latent, history = self.encode([picture], None)
        size = (1, PICTURE_CHANNELS, PICTURES_PER_LATENT, *self._size)
        grey = torch.zeros(size, dtype=self._dtype, device=self.device)
        latents = [latent]
        for _ in range(frames - 1):
            latent, history = self._encode(grey, history)
            latents.append(latent)
        clip = torch.cat(latents, dim=2)
        mask = clip.new_zeros((1, MASK_CHANNELS, *clip.shape[2:]))
        mask[:, :, 0] = 1
        return torch.cat((mask, clip), dim=1)

    @torch.no_grad()
    def _encode(
        self, pixels: torch.Tensor, history: tuple[Slot, ...] | None
    ) -> tuple[torch.Tensor, tuple[Slot, ...]]:
        slots: list[Slot] = [None] * self.slots if history is None else list(history)
        if len(slots) != self.slots:
            raise InvalidArgumentError(
                f"the history has {len(slots)} slots and does not belong to this encoder of {self.slots}",
                field="history",
            )
        moments = self._vae.encoder(pixels.to(self._vae_dtype), feat_cache=slots, feat_idx=[0])
        means = self._vae.quant_conv(moments)[:, :LATENT_CHANNELS]
        return self._scale.normalise(means).to(self._dtype), tuple(slots)


@dataclass(frozen=True, slots=True, eq=False)
class StreamState:
    """What one session's cameras have shown.

    Args:
        history: of the encoder.
        waiting: pictures that are no latent frame yet, fewer than four, on the host.
        latents: the newest latent frames [1, 16, 1, h, w], as many as a forward needs at most.
    """

    history: tuple[Slot, ...]
    waiting: tuple[Picture, ...]
    latents: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return history_bytes(self.history) + sum(latent.nbytes for latent in self.latents)


class FrameStream:
    """Streams of sessions that take turns.

    Args:
        encoder: the VAE's.
        keep: latent frames that are kept.
    """

    def __init__(self, encoder: FrameEncoder, keep: int) -> None:
        self._encoder = encoder
        self._keep = keep

    def begin(self, picture: Picture) -> StreamState:
        """A stream that has seen one picture."""
        latent, history = self._encoder.encode([picture], None)
        return StreamState(history, (), (latent,))

    def append(self, state: StreamState, *pictures: Picture) -> StreamState:
        """The stream after more pictures."""
        waiting = (*state.waiting, *pictures)
        while len(waiting) >= PICTURES_PER_LATENT:
            chunk, waiting = waiting[:PICTURES_PER_LATENT], waiting[PICTURES_PER_LATENT:]
            latent, history = self._encoder.encode(chunk, state.history)
            state = StreamState(history, (), (*state.latents, latent)[-self._keep :])
        return replace(state, waiting=waiting)

    def newest(self, state: StreamState, count: int) -> torch.Tensor:
        """The last latent frames [1, 16, count, h, w]; InvalidArgumentError for more than are kept."""
        if not 1 <= count <= self._keep:
            raise InvalidArgumentError(
                f"the stream keeps {self._keep} latent frames, {count} were asked for", field="count"
            )
        last = state.latents[-count:]
        return torch.cat([last[-1]] * (count - len(last)) + list(last), dim=2)
