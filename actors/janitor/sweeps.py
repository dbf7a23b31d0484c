"""Event streams that grow although nobody ticks: their host is asked to sort out what can't be applied."""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from actors.broker_pool import Broker
from actors.janitor.commands import send_command
from actors.janitor.facts import Facts
from contracts.commands import Command, Op
from contracts.identity import new_command_id


async def sweep_long_streams(broker: Broker, facts: Iterable[Facts]) -> None:
    """Sends `sweep` where more entries wait than may be pending, so that some of them can never be applied."""
    for item in facts:
        if item.pending_entries > item.max_pending_events:
            sent = await send_command(broker, Command(Op.SWEEP, item.session_id, new_command_id()))
            structlog.get_logger("janitor").info(
                "sweep", session_id=item.session_id, entries=item.pending_entries, sent=sent
            )
