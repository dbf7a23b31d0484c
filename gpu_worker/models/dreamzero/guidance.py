"""The transformer over a session's branches: with guidance both, without it the positive one alone."""

from __future__ import annotations

from typing import Protocol

from gpu_worker.models.dreamzero.cfg import guided
from gpu_worker.models.dreamzero.passes import Frames, PagedModel, Registers
from gpu_worker.models.dreamzero.spec import NEGATIVE, POSITIVE
from gpu_worker.models.dreamzero.transformer import DreamZeroTransformer, Flow


class BranchedModel(Protocol):
    """What a rollout runs."""

    @property
    def transformer(self) -> DreamZeroTransformer:
        """Projects text and image."""
        ...

    @property
    def branches(self) -> tuple[str, ...]:
        """Those that run here."""
        ...

    def prefill(self, frames: Frames) -> None:
        """Leaves clean frames in the past of every branch."""
        ...

    def denoise(self, frames: Frames, registers: Registers) -> Flow:
        """The guided flow of the video, and the positive branch's flow of the actions."""
        ...


class GuidedModel:
    """Both branches on one worker.

    Args:
        model: the transformer bound to the session's KV.
        transformer: the same, unbound.
        scale: of the guidance; 1 is none, and the negative branch is left alone.
    """

    def __init__(self, model: PagedModel, transformer: DreamZeroTransformer, *, scale: float) -> None:
        self.transformer = transformer
        self.branches: tuple[str, ...] = (POSITIVE,) if scale == 1 else (POSITIVE, NEGATIVE)
        self._model = model
        self._scale = scale

    def prefill(self, frames: Frames) -> None:
        """Leaves clean frames in the past of every branch."""
        for branch in self.branches:
            self._model.prefill(branch, frames)

    def denoise(self, frames: Frames, registers: Registers) -> Flow:
        """The guided flow of the video, and the positive branch's flow of the actions."""
        positive = self._model.denoise(POSITIVE, frames, registers)
        if NEGATIVE not in self.branches:
            return positive
        return guided(positive, self._model.denoise(NEGATIVE, frames, registers), self._scale)
