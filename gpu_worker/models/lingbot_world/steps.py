"""What the pipeline's step functions pass along: what a session keeps, and the chunk in the making."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from contracts.tick import ARDiffusionTickRequest
from gpu_worker.models.lingbot_world.camera import CameraTail
from gpu_worker.models.lingbot_world.conditioning import EncodedBlock, EncoderState
from gpu_worker.models.lingbot_world.request import LingBotRequest
from gpu_worker.models.lingbot_world.sampler import DMDBlock
from gpu_worker.models.lingbot_world.schedule import NUM_STEPS
from gpu_worker.models.lingbot_world.transformer import ChunkInputs


@dataclass(frozen=True, slots=True)
class WorldState:
    """What the model keeps of a session between chunks; replaced as a whole once a chunk has succeeded.

    Args:
        next_chunk: index of the chunk that must come next.
        encoder: what the condition encoder has seen; None before the first chunk.
        camera: where the last chunk left the camera.
    """

    next_chunk: int = 0
    encoder: EncoderState | None = None
    camera: CameraTail = field(default_factory=CameraTail)


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk in the making.

    Args:
        tick: what it is made from.
        block: its latents, and how they become clean.
        inputs: what its forwards share.
        encoded: its condition, and the encoder's history behind it.
        camera: where it leaves the camera.
    """

    tick: ARDiffusionTickRequest
    block: DMDBlock
    inputs: ChunkInputs
    encoded: EncodedBlock
    camera: CameraTail


class LingBotSteps:
    """A `StepState`: the chunks of one request.

    Args:
        request: what is asked for.
        ticks: one a chunk; those of a request without a tick are made up.
        image: the first image [1, 3, H, W], where the first chunk begins a world.
        clip_camera: [1, 384, frames, h, w] of a request without a tick; None where ticks carry their camera.
    """

    def __init__(
        self,
        request: LingBotRequest,
        ticks: list[ARDiffusionTickRequest],
        image: torch.Tensor | None,
        clip_camera: torch.Tensor | None,
    ) -> None:
        self.request = request
        self.ticks = ticks
        self.image = image
        self.clip_camera = clip_camera
        self.chunk: Chunk | None = None
        self._random_before = request.generator.get_state()

    def next_tick(self) -> ARDiffusionTickRequest:
        """What the next chunk is made from. The random state of this moment is the one that a failure goes back to."""
        self.chunk = None
        self._random_before = self.request.generator.get_state()
        return self.ticks.pop(0)

    @contextmanager
    def undone_on_failure(self) -> Iterator[None]:
        """Gives back the random numbers of the chunk if the block raises, so that they can be drawn again."""
        try:
            yield
        except BaseException:
            self.request.generator.set_state(self._random_before)
            raise

    @property
    def num_steps(self) -> int:
        """Denoise steps of a chunk."""
        return NUM_STEPS

    @property
    def chunk_complete(self) -> bool:
        """Whether the latents are clean."""
        return self.chunk is not None and self.chunk.block.complete

    @property
    def finished(self) -> bool:
        """Whether every tick has become a chunk."""
        return not self.ticks

    @property
    def current(self) -> Chunk:
        """The chunk in the making."""
        assert self.chunk is not None, "prepare_next_chunk comes first"
        return self.chunk


def read_together(*answers: torch.Tensor | bool) -> list[bool]:
    """Truth values, those that are scalars on the device read in one go: a host that reads waits for all that runs."""
    waiting = [answer for answer in answers if isinstance(answer, torch.Tensor)]
    read = iter(torch.stack(waiting).tolist() if waiting else [])
    return [bool(next(read)) if isinstance(answer, torch.Tensor) else answer for answer in answers]
