"""What a forward accepts: shapes, types and places, checked before anything is computed or written."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from contracts.errors import InvalidArgumentError, InvalidTypeError
from gpu_worker.models.lingbot_world.config import LingBotTransformerConfig


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Batch and latent size of one block: frames, and rows and columns of latent pixels."""

    batch: int
    frames: int
    height: int
    width: int

    def grid(self, patch: tuple[int, int, int]) -> tuple[int, int, int]:
        """Tokens in time, height and width."""
        return self.frames // patch[0], self.height // patch[1], self.width // patch[2]


def check_block(
    name: str,
    value: object,
    channels: int,
    config: LingBotTransformerConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> BlockShape:
    """The shape of `value` if it is [B, channels, 3, h, w] of the model's type and on its device.

    Raises InvalidArgumentError naming it.
    """
    if not isinstance(value, torch.Tensor):
        raise InvalidTypeError(f"{name} must be a tensor, got {type(value).__name__}", field=name)
    frames, patch = config.num_frames_per_block, config.patch_size
    shape = tuple(value.shape)
    if len(shape) != 5 or shape[1] != channels or shape[2] != frames or 0 in shape:
        raise InvalidArgumentError(
            f"{name} must have shape [B, {channels}, {frames}, h, w]: a forward is exactly {frames} latent frames, "
            f"got {list(shape)}",
            field=name,
        )
    if shape[3] % patch[1] or shape[4] % patch[2]:
        raise InvalidArgumentError(
            f"{name} must be whole patches of {patch[1]} x {patch[2]}, got {shape[3]} x {shape[4]}",
            field=name,
        )
    if value.dtype != dtype or value.device != device:
        raise InvalidArgumentError(
            f"{name} must be {dtype} on {device}, got {value.dtype} on {value.device}", field=name
        )
    return BlockShape(shape[0], shape[2], shape[3], shape[4])


def check_start_frame(value: object) -> int:
    """An absolute frame index: an integer >= 0, and a bool is none."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidArgumentError(
            f"start_frame must be an integer >= 0, got {value!r:.80}", field="start_frame"
        )
    return value


def expand_timestep(value: object, shape: BlockShape, device: torch.device) -> torch.Tensor:
    """A timestep, one a sample [B], or one a frame [B, F], as float64 [B, F]."""
    if isinstance(value, bool) or not isinstance(value, int | float | torch.Tensor):
        raise InvalidTypeError(
            f"timestep must be a number or a tensor, got {type(value).__name__}", field="timestep"
        )
    if not isinstance(value, torch.Tensor):
        return torch.full((shape.batch, shape.frames), float(value), dtype=torch.float64, device=device)
    expected: tuple[tuple[int, ...], ...] = ((), (shape.batch,), (shape.batch, shape.frames))
    if tuple(value.shape) not in expected:
        raise InvalidArgumentError(
            f"timestep must be a scalar, [{shape.batch}] or [{shape.batch}, {shape.frames}], got {list(value.shape)}",
            field="timestep",
        )
    steps = value.to(device=device, dtype=torch.float64)
    return (steps.unsqueeze(-1) if steps.dim() == 1 else steps).expand(shape.batch, shape.frames)
