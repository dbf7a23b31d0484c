"""Steps without a forward: where two flows in a row point almost the same way, the last one serves the next steps too.

    cosine similarity of the last two flows of the video      above 0.95: the next 4 steps
                                                              above 0.93: the next 2 steps

An approximation: it changes results, and is off unless a deployment asks for it.
"""

from __future__ import annotations

from typing import Final

import torch.nn.functional as F

from gpu_worker.models.dreamzero.transformer import Flow

RULES: Final = ((0.95, 4), (0.93, 2))
"""(similarity that must be exceeded, steps that are then skipped), the strictest first."""


class StepCache:
    """The steps of one observation.

    Args:
        rules: as `RULES`.
    """

    def __init__(self, rules: tuple[tuple[float, int], ...] = RULES) -> None:
        self._rules = rules
        self._last: Flow | None = None
        self._left = 0
        self.hits = 0
        """Steps that went without a forward."""
        self.forwards = 0
        """Steps that had one."""

    def reuse(self) -> Flow | None:
        """The flow of this step if it needs no forward, else None."""
        if self._left == 0:
            return None
        self._left -= 1
        self.hits += 1
        return self._last

    def keep(self, flow: Flow) -> None:
        """Takes the flow of a forward, and decides how many steps it serves. Waits for the device."""
        last, self._last = self._last, flow
        self.forwards += 1
        if last is not None:
            similarity = _cosine(last, flow)
            self._left = next((steps for least, steps in self._rules if similarity > least), 0)


def _cosine(one: Flow, other: Flow) -> float:
    """Of the video's flows, in float32; one that is no number skips nothing."""
    return float(F.cosine_similarity(one.video.float().flatten(), other.video.float().flatten(), dim=0))
