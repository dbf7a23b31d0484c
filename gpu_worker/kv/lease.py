"""When a session's KV may be used: never after it was closed, and, where a runner lends it, during a call only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from contracts.errors import KVStateError


class Lease:
    """Whether the KV of one session may be used now.

    Nobody has to lend it: on its own it can be used until it is closed. Once it was lent for a call, it can be used
    during such calls only, so that a pipeline which keeps it is told so instead of changing a session behind the
    runner's back.

    Args:
        session_id: the world, for messages.
    """

    def __init__(self, session_id: str) -> None:
        self._session_id = session_id
        self._usable = True
        self.closed = False

    def check(self) -> None:
        """KVStateError unless the KV may be used now."""
        self.check_open()
        if not self._usable:
            raise KVStateError(
                f"the KV state of session {self._session_id!r} is not bound: it can be used during a call only"
            )

    def check_open(self) -> None:
        """KVStateError once the KV was closed."""
        if self.closed:
            raise KVStateError(f"the KV state of session {self._session_id!r} is closed")

    @contextmanager
    def lend(self) -> Iterator[None]:
        """The KV may be used inside, and from now on nowhere else."""
        self._usable = True
        try:
            yield
        finally:
            self._usable = False
