"""What each block is conditioned on: a mask, and the latents of a clip that is the first image and grey ever after.

    block 0        image (1 pixel frame), grey (4), grey (4)
    later          grey (4), grey (4), grey (4)               grey is 0 in [-1, 1]

Each of the three encoder calls gives one latent frame. What the encoder has seen is its history; grey frames do not
encode to a constant while the image is still in it. After some blocks the image has passed through: the history that
comes out is, bit by bit, the one that went in. From then on every block is the same, and the encoder rests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from contracts.errors import ConfigurationError, InvalidArgumentError
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

CALLS: Final = 3
"""Latent frames of a block."""

PIXEL_FRAMES_PER_LATENT: Final = 4

_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class EncoderState:
    """What a session keeps of the encoder between two blocks.

    Args:
        history: one slot a causal convolution.
        condition: [1, 20, 3, h, w] of every further block, once the history has come to rest; None before.
    """

    history: tuple[Slot, ...]
    condition: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the history."""
        return history_bytes(self.history)


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    """One block's condition, and what the encoder has seen then; nothing of it is kept yet.

    Args:
        condition: [1, 20, 3, h, w] of the model's type: mask, image latents.
        history: after the block.
        at_rest: whether the history is the one from before; a scalar on the device, so that nobody has to wait for it.
    """

    condition: torch.Tensor
    history: tuple[Slot, ...]
    at_rest: torch.Tensor | bool

    def settle(self, at_rest: bool | None = None) -> EncoderState:
        """What to keep once the block has succeeded.

        Args:
            at_rest: the answer, where it was read already; None reads it from the device.
        """
        resting = bool(self.at_rest) if at_rest is None else at_rest
        return EncoderState(self.history, self.condition if resting else None)


class StreamingConditionEncoder:
    """Encodes block after block. Histories are the caller's; the VAE's own caches are not touched.

    Args:
        vae: diffusers' `AutoencoderKLWan`.
        dtype: of conditions.

    Raises:
        InvalidTypeError: it is another VAE.
        ConfigurationError: it works on patches.
    """

    def __init__(self, vae: Any, *, dtype: torch.dtype) -> None:
        check_vae(vae)
        self._vae = vae
        self._dtype = dtype
        weight = vae.quant_conv.weight
        self._vae_dtype, self._device = weight.dtype, weight.device
        self._scale = LatentScale.of(vae, self._device)
        self.slots = causal_convolutions(vae.encoder)

    @torch.no_grad()
    def encode(
        self,
        start_frame: int,
        height: int,
        width: int,
        *,
        image: torch.Tensor | None = None,
        state: EncoderState | None = None,
    ) -> EncodedBlock:
        """The condition of the block at `start_frame`.

        Args:
            start_frame: absolute index of its first latent frame.
            height, width: of the pictures, in pixels.
            image: [1, 3, height, width] in [-1, 1]; for the first block only.
            state: of the block before; for all but the first.

        Raises:
            InvalidArgumentError: image or state are missing or do not belong there; the state is of another VAE.
            ConfigurationError: the VAE would cut such pictures into tiles.
        """
        history = self._checked_history(start_frame, state)
        if tiled(self._vae, height, width):
            raise ConfigurationError(
                f"a VAE that tiles pictures of {height} x {width} can't stream", field="use_tiling"
            )
        if state is not None and state.condition is not None:
            return EncodedBlock(state.condition, state.history, at_rest=True)
        given = tuple(history)
        moments = [self._call(frames, history) for frames in self._block(start_frame, height, width, image)]
        channels = self._vae.config.z_dim
        means = self._vae.quant_conv(torch.cat(moments, dim=2))[:, :channels]  # [1, 16, 3, h, w]
        latents = self._scale.normalise(means).to(self._dtype)
        mask = latents.new_zeros((1, MASK_CHANNELS, *latents.shape[2:]))
        if start_frame == 0:
            mask[:, :, 0] = 1
        return EncodedBlock(
            torch.cat((mask, latents), dim=1),
            tuple(history),
            at_rest=start_frame > 0 and _same_bits(given, history),
        )

    def _checked_history(self, start_frame: int, state: EncoderState | None) -> list[Slot]:
        if (state is None) != (start_frame == 0):
            missing = "has none yet" if start_frame == 0 else "needs one"
            raise InvalidArgumentError(
                f"the block at frame {start_frame} {missing}: encoder history", field="history"
            )
        if state is None:
            return [None] * self.slots
        if len(state.history) != self.slots:
            raise InvalidArgumentError(
                f"the encoder's history must have {self.slots} slots, got {len(state.history)}",
                field="history",
            )
        return list(state.history)

    def _block(
        self, start_frame: int, height: int, width: int, image: torch.Tensor | None
    ) -> list[torch.Tensor]:
        """The pixel frames of a block, one tensor [1, 3, frames, height, width] an encoder call."""

        def grey() -> torch.Tensor:
            size = (1, PICTURE_CHANNELS, PIXEL_FRAMES_PER_LATENT, height, width)
            return torch.zeros(size, dtype=self._vae_dtype, device=self._device)

        if start_frame > 0:
            return [grey()] * CALLS
        if image is None or tuple(image.shape) != (1, PICTURE_CHANNELS, height, width):
            found = "none" if image is None else list(image.shape)
            raise InvalidArgumentError(
                f"the first block needs an image of shape [1, {PICTURE_CHANNELS}, {height}, {width}], got {found}",
                field="image",
            )
        first = image.to(device=self._device, dtype=self._vae_dtype, non_blocking=True).unsqueeze(2)
        return [first, *[grey()] * (CALLS - 1)]

    def _call(self, frames: torch.Tensor, history: list[Slot]) -> torch.Tensor:
        """One latent frame [1, 32, 1, h, w]; replaces the slots."""
        moments: torch.Tensor = self._vae.encoder(frames, feat_cache=history, feat_idx=[0])
        return moments


def _same_bits(before: Sequence[Slot], after: Sequence[Slot]) -> torch.Tensor | bool:
    differs = []
    for old, new in zip(before, after, strict=True):
        if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
            if old is not new:
                return False
        elif old.shape != new.shape:
            return False
        else:
            bits = _BITS[old.element_size()]  # so that -0 is not 0, and what is no number equals itself
            differs.append((old.view(bits) != new.view(bits)).any())
    return ~torch.stack(differs).any()
