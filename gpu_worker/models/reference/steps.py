"""What the reference world's step functions pass along: the world so far, and the chunk in the making."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from contracts.errors import InvalidArgumentError
from contracts.tick import ARDiffusionTickRequest
from gpu_worker.capability import ARDiffusionRequest
from gpu_worker.models.reference.camera import CameraPose
from gpu_worker.models.reference.sampler import SIGMAS

_MOST_CHUNKS: Final = 10_000


@dataclass(frozen=True, slots=True)
class WorldState:
    """What the model keeps of a session between chunks; replaced as a whole once a chunk has succeeded.

    Args:
        next_chunk: index of the chunk that must come next.
        prompt: the prompt that the cross-attention cache was built from.
        pose: where the camera stands.
        last_frame: the last latent frame [C, GRID, GRID], which the decoder continues from.
    """

    next_chunk: int = 0
    prompt: str | None = None
    pose: CameraPose = field(default_factory=CameraPose)
    last_frame: torch.Tensor | None = None


@dataclass(slots=True)
class Chunk:
    """One chunk in the making.

    Args:
        tick: what it is made from.
        pose: where the camera stands at its end.
        points: [3, F, GRID, GRID], world points that its patches look at.
        motion: [F, MOTION_SIZE], camera motion of each frame.
        latents: [1, C, F, GRID, GRID], noisy before the last step and clean after it.
        step: denoise steps done.
    """

    tick: ARDiffusionTickRequest
    pose: CameraPose
    points: torch.Tensor
    motion: torch.Tensor
    latents: torch.Tensor
    step: int = 0


class ReferenceSteps:
    """A `StepState`: the chunks of one request.

    Args:
        ticks: one a chunk.
        generator: the session's random state.
    """

    def __init__(self, ticks: list[ARDiffusionTickRequest], generator: torch.Generator) -> None:
        self.ticks = ticks
        self.generator = generator
        self.chunk: Chunk | None = None

    @property
    def num_steps(self) -> int:
        """Denoise steps of a chunk."""
        return len(SIGMAS)

    @property
    def chunk_complete(self) -> bool:
        """Whether the latents are clean."""
        return self.chunk is not None and self.chunk.step == self.num_steps

    @property
    def finished(self) -> bool:
        """Whether every tick has become a chunk."""
        return not self.ticks

    @property
    def current(self) -> Chunk:
        """The chunk in the making."""
        assert self.chunk is not None, "prepare_next_chunk comes first"
        return self.chunk


def ticks_of(request: ARDiffusionRequest, session_id: str) -> list[ARDiffusionTickRequest]:
    """The request's tick, or for a request without one the ticks of `params["chunks"]` chunks of its prompt."""
    if request.tick is not None:
        return [request.tick]
    return [
        ARDiffusionTickRequest(session_id, session_id, index, (), request.prompt)
        for index in range(_number_of_chunks(request.params))
    ]


def _number_of_chunks(params: Mapping[str, Any]) -> int:
    count = params.get("chunks", 1)
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= _MOST_CHUNKS:
        raise InvalidArgumentError(
            f"params.chunks must be an integer from 1 to {_MOST_CHUNKS}, got {count!r:.80}",
            field="params.chunks",
        )
    return count
