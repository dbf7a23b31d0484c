"""Latents to pictures, chunk after chunk: one latent frame at a time through the causal decoder.

The first latent frame of a session becomes one picture, each further one four. However a clip is cut into chunks,
the decoder sees the same calls, so the pictures are the same bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from contracts.errors import InvalidArgumentError
from gpu_worker.models.lingbot_world.vae import (
    LATENT_PIXEL,
    LatentScale,
    Slot,
    causal_convolutions,
    check_vae,
    history_bytes,
    tiled,
)


class DecoderState:
    """What one session's decoder has seen. A decoder replaces its slots as it goes.

    Args:
        session_id: the world.
        slots: one a causal convolution.
    """

    def __init__(self, session_id: object, slots: int) -> None:
        if not isinstance(session_id, str) or not session_id.strip():
            raise InvalidArgumentError("session_id must be a non-empty string", field="session_id")
        self.session_id = session_id
        self.history: list[Slot] = [None] * slots
        self.frames = 0
        """Latent frames decoded so far."""

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return history_bytes(self.history)


@dataclass(frozen=True, slots=True, eq=False)
class Pictures:
    """The pictures of one chunk.

    Args:
        frames: uint8 [F, H, W, 3].
        finite: whether what they come from is; a scalar on the device, so that nobody has to wait for it.
        state: the decoder's behind them.
    """

    frames: torch.Tensor
    finite: torch.Tensor
    state: DecoderState


class StreamingDecoder:
    """Decodes latents of sessions that take turns.

    Args:
        vae: diffusers' `AutoencoderKLWan`; its own caches are not touched, unless it tiles.

    Raises:
        InvalidTypeError: it is another VAE.
        ConfigurationError: it works on patches.
    """

    def __init__(self, vae: Any) -> None:
        check_vae(vae)
        self._vae = vae
        weight = vae.post_quant_conv.weight
        self._dtype, self._device = weight.dtype, weight.device
        self._scale = LatentScale.of(vae, self._device)
        self.slots = causal_convolutions(vae.decoder)

    def begin(self, session_id: str) -> DecoderState:
        """The state of a session that has seen nothing."""
        return DecoderState(session_id, self.slots)

    @torch.no_grad()
    def decode(self, state: DecoderState, latents: torch.Tensor) -> torch.Tensor:
        """The pictures of a session's next latents.

        Args:
            state: the session's. If this fails it is good for nothing any more.
            latents: [1, 16, F, h, w], as the transformer makes them, at least one frame.

        Returns:
            [1, 3, pictures, 8 h, 8 w] in [-1, 1], of the VAE's type: 4 F pictures, the first time 3 fewer.

        Raises:
            InvalidArgumentError: the latents are not of one sample or have no frame; the state is of another decoder.
        """
        if len(state.history) != self.slots:
            raise InvalidArgumentError(
                f"the state has {len(state.history)} slots and does not belong to this decoder of {self.slots}",
                field="state",
            )
        if latents.dim() != 5 or latents.shape[2] == 0:
            raise InvalidArgumentError(
                f"latents must have frames: [1, 16, F, h, w], got {list(latents.shape)}", field="latents"
            )
        if latents.shape[0] != 1:
            raise InvalidArgumentError(
                f"there is one sample per session state, got {latents.shape[0]}", field="latents"
            )
        z = self._scale.restore(latents.to(self._device)).to(self._dtype)
        if tiled(self._vae, z.shape[3] * LATENT_PIXEL, z.shape[4] * LATENT_PIXEL):
            state.frames += z.shape[2]
            whole: torch.Tensor = self._vae.decode(z, return_dict=False)[0]
            return whole
        pictures = [self._frame(state, frame) for frame in z.split(1, dim=2)]
        return torch.cat(pictures, dim=2).clamp(-1, 1)

    def pictures(self, state: DecoderState, latents: torch.Tensor) -> Pictures:
        """The same as frames to show; what `decode` says of arguments and errors holds here."""
        decoded = self.decode(state, latents)
        return Pictures(to_uint8(decoded), decoded.isfinite().all(), state)

    def _frame(self, state: DecoderState, z: torch.Tensor) -> torch.Tensor:
        """One latent frame [1, 16, 1, h, w]; a projection a frame, so that no clip gets another kernel than its parts."""
        pictures: torch.Tensor = self._vae.decoder(
            self._vae.post_quant_conv(z),
            feat_cache=state.history,
            feat_idx=[0],
            first_chunk=state.frames == 0,
        )
        state.frames += 1
        return pictures


def to_uint8(pictures: torch.Tensor) -> torch.Tensor:
    """Pictures [1, 3, F, H, W] in [-1, 1] as uint8 [F, H, W, 3]; the bytes of an image processor's PIL images."""
    unit = (pictures[0] * 0.5 + 0.5).clamp(0, 1).float()
    return (unit * 255).round().to(torch.uint8).permute(1, 2, 3, 0).contiguous()
