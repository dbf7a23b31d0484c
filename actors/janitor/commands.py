"""How the janitor acts: by a command in the inbox of the session's partition, never by a write of its own."""

from __future__ import annotations

from actors.broker_pool import Broker
from contracts.commands import Command
from contracts.worker_scripts import WorkerScripts


async def send_command(broker: Broker, command: Command) -> bool:
    """Sends a command without waiting for its answer.

    False, and nothing is sent, while no host owns the partition: commands that are repeated each period would pile up.
    """
    if not await broker.is_owned(command.session_id):
        return False
    inbox = await broker.inbox(command.session_id)
    scripts = WorkerScripts(broker.commands, broker.keys)
    await scripts.add_to_inbox(inbox, "command", command.to_json())
    return True
