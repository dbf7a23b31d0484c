"""The one map that owns everything of a resident session, in order of last use."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass

import torch

from gpu_worker.kv.state import ARDiffusionKVState


@dataclass(slots=True)
class ResidentSession:
    """What the runner holds for one session.

    Args:
        session_id: the world.
        kv: its attention KV.
        generator: its random state, which continues from tick to tick.
        last_used_s: monotonic time of its last request.
    """

    session_id: str
    kv: ARDiffusionKVState
    generator: torch.Generator
    last_used_s: float


class ResidentSessions:
    """Resident sessions, least recently used first."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, ResidentSession] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, session_id: object) -> bool:
        return session_id in self._by_id

    @property
    def ids(self) -> tuple[str, ...]:
        """Session ids, least recently used first."""
        return tuple(self._by_id)

    def use(self, session_id: str) -> ResidentSession | None:
        """The session, now the most recently used, or None."""
        session = self._by_id.get(session_id)
        if session is not None:
            self._by_id.move_to_end(session_id)
            session.last_used_s = time.monotonic()
        return session

    def add(self, session: ResidentSession) -> None:
        """Adds a session as the most recently used."""
        self._by_id[session.session_id] = session

    def pop(self, session_id: str) -> ResidentSession | None:
        """Takes a session out; None when it is not there."""
        return self._by_id.pop(session_id, None)
