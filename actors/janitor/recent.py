"""What was done a moment ago and need not be done again before a period has passed."""

from __future__ import annotations

import time
from collections.abc import Hashable


class Recent:
    """Remembers things for `period_ms`."""

    def __init__(self, period_ms: int) -> None:
        self._period_s = period_ms / 1000
        self._until: dict[Hashable, float] = {}

    def __contains__(self, thing: Hashable) -> bool:
        return self._until.get(thing, 0.0) > time.monotonic()

    def add(self, thing: Hashable) -> None:
        self._until[thing] = time.monotonic() + self._period_s

    def discard(self, thing: Hashable) -> None:
        self._until.pop(thing, None)

    def prune(self) -> None:
        """Forgets what is over."""
        now = time.monotonic()
        self._until = {thing: until for thing, until in self._until.items() if until > now}
