"""Classifier-free guidance over two ranks: each runs its own branch, on its only KV slot, and both know both flows.

    rank 0   positive     text of the task
    rank 1   negative     text of what is not wanted

A forward costs one collective. Both ranks end with the same flow bit by bit, so samplers on both stay alike, and so does
whatever they decide by it.
"""

from __future__ import annotations

import math
from typing import Final, Protocol

import torch

from contracts.errors import ConfigurationError
from gpu_worker.models.dreamzero.passes import Frames, PagedModel, Registers
from gpu_worker.models.dreamzero.spec import NEGATIVE, POSITIVE
from gpu_worker.models.dreamzero.transformer import DreamZeroTransformer, Flow

BRANCH_OF_RANK: Final = (POSITIVE, NEGATIVE)


def guided(positive: Flow, negative: Flow, scale: float) -> Flow:
    """negative + scale * (positive - negative) for the video; actions come from the positive branch alone."""
    return Flow(negative.video + scale * (positive.video - negative.video), positive.action)


class Gathering(Protocol):
    """Ranks that can show each other a tensor."""

    degree: int
    rank: int

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[1, T, C] of each rank -> [1, degree * T, C], in rank order."""
        ...


class SplitGuidedModel:
    """What a rollout runs, on one of two ranks.

    Args:
        model: the transformer bound to this rank's KV of the session.
        transformer: the same, unbound.
        scale: of the guidance; 1 is none: then both ranks run the positive branch, and nothing is exchanged.
        ranks: the two.

    Raises:
        ConfigurationError: there are not two.
    """

    def __init__(
        self, model: PagedModel, transformer: DreamZeroTransformer, *, scale: float, ranks: Gathering
    ) -> None:
        if ranks.degree != len(BRANCH_OF_RANK):
            raise ConfigurationError(
                f"two ranks share the two branches of guidance, there are {ranks.degree}",
                field="cfg_parallel",
            )
        self.transformer = transformer
        self.branches = (POSITIVE if scale == 1 else BRANCH_OF_RANK[ranks.rank],)
        self._model = model
        self._scale = scale
        self._ranks = ranks

    def prefill(self, frames: Frames) -> None:
        """Leaves clean frames in the past of this rank's branch."""
        self._model.prefill(self.branches[0], frames)

    def denoise(self, frames: Frames, registers: Registers) -> Flow:
        """The guided flow of the video, and the positive branch's flow of the actions."""
        own = self._model.denoise(self.branches[0], frames, registers)
        return own if self._scale == 1 else guided(*exchange(self._ranks, own), self._scale)


def exchange(ranks: Gathering, own: Flow) -> tuple[Flow, Flow]:
    """The flows of rank 0 and rank 1, in one collective."""
    parts = [own.video] if own.action is None else [own.video, own.action]
    shapes = [part.shape for part in parts]
    row = torch.cat([part.flatten() for part in parts])
    everything = ranks.gather(row.view(1, 1, -1))[0]  # [2, values]
    first, second = (_parted(values, shapes) for values in everything)
    return first, second


def _parted(values: torch.Tensor, shapes: list[torch.Size]) -> Flow:
    parts = values.split([math.prod(shape) for shape in shapes])
    video, *action = (part.view(shape) for part, shape in zip(parts, shapes, strict=True))
    return Flow(video, action[0] if action else None)
