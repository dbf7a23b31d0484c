"""Creation: room on a worker is reserved, then the state is written, then the command is answered."""

from __future__ import annotations

import hashlib

from actors.intake import EventQueue
from actors.reducers.registry import make_reducer
from actors.session_core import SessionCore, answer_text
from contracts.commands import Command
from contracts.creation import CreateArgs
from contracts.errors import SessionExistsError
from contracts.events import thaw
from contracts.fields import dumps
from contracts.keys import SCHEMA_VERSION
from contracts.lifecycle import Status, Trigger
from contracts.session_scripts import Outcome


class Creation:
    """Creates one session."""

    def __init__(self, core: SessionCore) -> None:
        self.core = core

    async def run(self, command: Command, entry_id: str) -> None:
        """Raises SessionExistsError, NoCapacityError or InvalidArgumentError; otherwise the session is ACTIVE."""
        core, placement = self.core, self.core.services.placement
        if core.state is not None and core.state.status is not Status.CLOSED:
            raise _exists(core.session_id, core.state.status)
        args = CreateArgs.from_dict(command.args)
        make_reducer(args.reducer)
        life = _life(core.session_id, command.command_id, entry_id)
        worker = await placement.place(args.model, core.session_id, life)
        outcome = await self._write(command, args, life, worker)
        if outcome is Outcome.CREATED:
            core.finish(command.command_id)
            return
        if core.state is None or core.state.life != life:
            await placement.unreserve(worker, core.session_id, life)
        if outcome is Outcome.EXISTS:
            raise _exists(core.session_id, core.held.status)
        core.finish(command.command_id)

    async def _write(self, command: Command, args: CreateArgs, life: str, worker: str) -> Outcome:
        core = self.core
        answer = answer_text(command.command_id, {"life": life, "chunk_index": 0, "event_floor": -1})

        async def script() -> Outcome:
            return await core.services.scripts.create(
                core.session_id, core.epoch, command.command_id, answer, _fields(args, life, worker)
            )

        if args.pace_ms is not None or args.presence_ms or args.idle_ms:
            # Before the answer: from then on the next owner must find it.
            await core.services.partitions.set_live(core.partition, core.epoch, core.session_id, True)
        outcome = await core.move(Trigger.CREATED, script, Outcome.CREATED)
        core.queue = EventQueue(limit=args.max_pending_events)
        return outcome


def _exists(session_id: str, status: Status) -> SessionExistsError:
    return SessionExistsError(
        f"session {session_id} already exists and is {status.lower()}", field="session_id"
    )


def _life(session_id: str, command_id: str, entry_id: str) -> str:
    """The request id of a creation. It is a function of the inbox entry, so that running the entry again after a lost
    reply reserves and writes the same life."""
    digest = hashlib.sha256(f"{session_id} {command_id} {entry_id}".encode()).hexdigest()[:32]
    return f"ar-{session_id}-create-{digest}"


def _fields(args: CreateArgs, life: str, worker: str) -> dict[str, str]:
    """The state hash of a new session; what is None is left out."""
    values = {
        "life": life,
        "chunk_index": 0,
        "event_floor": -1,
        "prompt": args.prompt,
        "controls": "[]",
        "reducer": args.reducer,
        "model": args.model,
        "params": dumps(thaw(args.params)),
        "seed": args.seed,
        "worker": worker,
        "recording": args.recording,
        "max_pending_events": args.max_pending_events,
        "pace_ms": args.pace_ms,
        "presence_ms": args.presence_ms,
        "idle_ms": args.idle_ms,
        "rejected_total": "{}",
        "close_attempts": 0,
        "schema_version": SCHEMA_VERSION,
    }
    return {name: str(value) for name, value in values.items() if value is not None}
