"""How many partitions there are, which a worker must know to send a notice."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from contracts.worker_link import WorkerLink
from gpu_worker.backoff import Backoff

DEFAULT_PARTITIONS: Final = 8
PATIENCE_S: Final = 5.0


class PartitionCount:
    """Asked for when it is needed first, because a worker may well start before the first host has written it down."""

    def __init__(self, link: WorkerLink) -> None:
        self._link = link
        self._known: int | None = None

    async def get(self) -> int:
        """The number; where no host writes it down within seconds, the default, for this once."""
        deadline_s, backoff = time.monotonic() + PATIENCE_S, Backoff()
        while self._known is None:
            self._known = await self._link.partitions()
            if self._known is None:
                if time.monotonic() > deadline_s:
                    return DEFAULT_PARTITIONS
                await asyncio.sleep(backoff.next_s())
        return self._known
