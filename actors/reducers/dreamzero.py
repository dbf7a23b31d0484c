"""Observations of DreamZero worlds: the latest one counts.

A robot that observes faster than it is answered is not made to wait for its past: of several observations between two
ticks the newest is acted upon, the others are applied and over. A tick without a new one acts on the latest again, as a
camera that shows the same picture once more; such a chunk says so by applying no event. Before the first observation
there is nothing to act on, and a tick fails.
"""

from __future__ import annotations

from actors.reducers.latest import LatestValueReducer
from contracts.dreamzero import OBSERVATION_TRACK, check_observation, same_text
from contracts.errors import InvalidArgumentError
from contracts.events import ARDiffusionSessionEvent


class DreamZeroObservationReducer(LatestValueReducer):
    """Keeps the latest observation, and of every other track the latest value."""

    def check(self, event: ARDiffusionSessionEvent) -> None:
        """InvalidArgumentError for an observation that is not understood, and for a prompt that is not its language."""
        language = None
        for control in event.controls:
            if control.track == OBSERVATION_TRACK:
                language = check_observation(control).language
        if event.prompt is not None and (language is None or not same_text(event.prompt, language)):
            raise InvalidArgumentError(
                "a DreamZero world follows the language of its observations, so an event's prompt must be the same",
                field="prompt",
            )
