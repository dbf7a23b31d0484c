"""How long the broker has been there without a break: what expired while it was away says nothing."""

from __future__ import annotations

import time
from typing import Any

from contracts.broker import Client, map_exceptions


class Connection:
    """Notices breaks: an error, or a broker that was started anew between two looks."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._run_id: object = None
        self._since = time.monotonic()

    @property
    def age_ms(self) -> float:
        """Milliseconds since the broker was first reached after the last break."""
        return (time.monotonic() - self._since) * 1000

    def broken(self) -> None:
        """The broker did not answer."""
        self._run_id = None

    async def look(self) -> None:
        """Asks the broker which start of it this is. Raises BrokerError."""
        with map_exceptions("INFO"):
            info: dict[str, Any] = await self._client.info("server")
        if info.get("run_id") != self._run_id:
            self._run_id = info.get("run_id")
            self._since = time.monotonic()
