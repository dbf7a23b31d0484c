"""Who takes up room in an engine whose memory can't be seen from here."""

from __future__ import annotations

from collections import OrderedDict


class OmniRooms:
    """Sessions that have, or may have, memory in the engine, least recently used first. Pure book-keeping.

    A session is *usable*, or *stuck*: its release failed, so nothing may follow it, and its room is still taken.

    Args:
        capacity: rooms.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._usable: OrderedDict[str, bool] = OrderedDict()

    def __len__(self) -> int:
        return len(self._usable)

    def __contains__(self, session_id: object) -> bool:
        return session_id in self._usable

    @property
    def ids(self) -> tuple[str, ...]:
        """Sessions with a room, least recently used first."""
        return tuple(self._usable)

    @property
    def stuck(self) -> tuple[str, ...]:
        """Sessions whose release failed."""
        return tuple(session_id for session_id, usable in self._usable.items() if not usable)

    @property
    def full(self) -> bool:
        """Whether a new session finds no room."""
        return len(self) >= self.capacity

    def is_usable(self, session_id: str) -> bool:
        """Whether a tick may continue the session."""
        return self._usable.get(session_id, False)

    def use(self, session_id: str) -> None:
        """Gives the session a room unless it has one; it is the most recently used now."""
        self._usable[session_id] = True
        self._usable.move_to_end(session_id)

    def mark_stuck(self, session_id: str) -> None:
        """The session's release failed; one without a room stays without."""
        if session_id in self._usable:
            self._usable[session_id] = False

    def free(self, session_id: str) -> None:
        """The session's memory is gone."""
        self._usable.pop(session_id, None)
