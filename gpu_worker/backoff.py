"""How long to wait after an error, and how writes get through an outage of the broker."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable

from contracts.broker import BrokerFullError
from contracts.errors import BrokerError


class Backoff:
    """Delays of one retried activity: twice as long each time, up to a limit, with jitter.

    Args:
        first_s: the first delay.
        limit_s: no delay is longer, jitter apart.
    """

    def __init__(self, first_s: float = 0.05, limit_s: float = 2.0) -> None:
        self._first_s = first_s
        self._limit_s = limit_s
        self._next_s = first_s

    def next_s(self) -> float:
        """The delay before the next try, in seconds: between half and one and a half times its nominal length."""
        delay_s = self._next_s
        self._next_s = min(self._limit_s, 2 * delay_s)
        return delay_s * random.uniform(0.5, 1.5)

    def reset(self) -> None:
        """The activity succeeded."""
        self._next_s = self._first_s


class Outage:
    """Repeats writes through an outage of the broker, until the process is told to end and has waited enough.

    Only for writes that may be repeated: their readers recognise a second copy.

    Args:
        patience_s: how long writes are repeated after `end_soon`.
    """

    def __init__(self, patience_s: float = 5.0) -> None:
        self._patience_s = patience_s
        self._deadline_s: float | None = None

    def end_soon(self) -> None:
        """From now on writes are repeated for `patience_s` only."""
        if self._deadline_s is None:
            self._deadline_s = time.monotonic() + self._patience_s

    async def persist(self, write: Callable[[], Awaitable[None]], *, full_s: float = math.inf) -> None:
        """Runs `write` until it succeeds; raises its BrokerError once patience is over, any other error at once.

        Args:
            write: what is to be written.
            full_s: how long a broker that is out of memory is waited for; then its BrokerFullError is raised.
        """
        backoff, full_until_s = Backoff(), time.monotonic() + full_s
        while True:
            try:
                return await write()
            except BrokerFullError:
                if time.monotonic() > min(full_until_s, self._deadline_s or math.inf):
                    raise
            except BrokerError:
                if self._deadline_s is not None and time.monotonic() > self._deadline_s:
                    raise
            await asyncio.sleep(backoff.next_s())
