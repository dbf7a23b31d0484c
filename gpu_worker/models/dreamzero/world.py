"""What DreamZero keeps of a session between observations, and when it lets go of it.

    session reset     another task: all is forgotten
    inference reset   the rollout is as long as attention reaches: it begins anew, under the same language, and what the
                      cameras have shown stays

A state is replaced as a whole once an observation was answered, so one that fails leaves it as it was.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from contracts.errors import InvalidArgumentError
from gpu_worker.models.dreamzero.pictures import Picture
from gpu_worker.models.dreamzero.stream import StreamState

RING: Final = 4
"""Pictures that a request after the first one is seen as."""


class Reset(StrEnum):
    """How much is let go of."""

    SESSION = "session"
    INFERENCE = "inference"


@dataclass(frozen=True, slots=True, eq=False)
class PolicyState:
    """One session.

    Args:
        next_chunk: index of the chunk that must come next.
        language: token ids of what the robot is asked to do; None before the first observation.
        ring: the last pictures, oldest first, four at most.
        calls: observations since the last reset.
        start: latent frames of the rollout so far; the next ones are imagined behind them.
        condition: [1, 20, F, h, w] of the rollout; None before it begins.
        stream: what the cameras have shown; None before the first observation.
        video: latent frames of the last rollout as they were returned, float32 [16, n, h, w], on the host.
    """

    next_chunk: int = 0
    language: tuple[int, ...] | None = None
    ring: tuple[Picture, ...] = ()
    calls: int = 0
    start: int = 0
    condition: torch.Tensor | None = None
    stream: StreamState | None = None
    video: npt.NDArray[np.float32] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        stream = 0 if self.stream is None else self.stream.nbytes
        return stream + (0 if self.condition is None else self.condition.nbytes)

    def after(self, reset: Reset | None) -> PolicyState:
        """The state that a reset leaves; None leaves it whole."""
        if reset is None:
            return self
        if reset is Reset.SESSION:
            return PolicyState(next_chunk=self.next_chunk)
        return replace(self, ring=(), calls=0, start=0, condition=None)


def reset_reason(
    state: PolicyState, *, language: tuple[int, ...], num_frames: int, local_attention_frames: int
) -> Reset | None:
    """What an observation makes the session let go of.

    Args:
        state: before it; its call is counted already.
        language: token ids of the observation.
        num_frames: pictures that the observation is seen as.
        local_attention_frames: latent frames that attention reaches; -1 is no limit.
    """
    if state.language is None or state.language != language:
        return Reset.SESSION
    if num_frames == 1 and state.calls > 1:
        return Reset.SESSION
    if local_attention_frames != -1 and state.start >= local_attention_frames:
        return Reset.INFERENCE
    return None


def accumulate_frames(
    ring: tuple[Picture, ...], frames: Any
) -> tuple[tuple[Picture, ...], npt.NDArray[np.uint8]]:
    """The pictures that an observation is seen as: one the first time, four ever after.

    Args:
        ring: the pictures of observations before, oldest first.
        frames: uint8 [h, w, 3], or [n, h, w, 3], oldest first.

    Returns:
        The new ring, and uint8 [1 or 4, h, w, 3]: the last four, the oldest repeated in front where there are fewer.
    """
    if not isinstance(frames, np.ndarray) or frames.ndim not in {3, 4} or 0 in frames.shape:
        raise InvalidArgumentError(
            "frames must be one picture [h, w, 3] or several [n, h, w, 3]", field="frames"
        )
    new = list(frames) if frames.ndim == 4 else [frames]
    known = [*ring, *new][-RING:]
    seen = [known[0]] * (RING - len(known)) + known if ring else known[-1:]
    return tuple(known), np.stack(seen)
