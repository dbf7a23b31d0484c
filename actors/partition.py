"""One partition that this host owns: its inbox, and the actors of its sessions.

The inbox has no cursor that outlives a reader: what is in it is unfinished. A claim reads it from the start to its tail
before anything is sent again, timed out or failed; an entry is deleted once its outcome is durable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import structlog

from actors.session import CommandItem, NewsItem, SessionActor
from actors.session_core import Finish, Services, SessionCore
from contracts.broker import Client, map_exceptions
from contracts.errors import BrokerError, InvalidArgumentError, OwnershipLostError, WorldlineError
from contracts.events import loads
from contracts.identity import check_session_id, partition_of
from contracts.keys import Keys
from contracts.messages import Answer, Command, Notice, WorkerReply
from contracts.session_scripts import Entry, parse_entries

_COUNT: Final = 256
_BACKOFF_S: Final = 0.3


class Partition:
    """Reads the inbox of one partition and hands each entry to its session's actor.

    Args:
        index: of the partition.
        epoch: of the claim.
        blocking: a client for reads that block.
        block_ms: how long one read blocks.
        partitions: how many there are.
        on_lost: called when a write was refused because somebody else owns the partition.
    """

    def __init__(
        self, index: int, epoch: int, services: Services, keys: Keys, blocking: Client, *, block_ms: int, partitions: int,
        on_lost: Callable[[int], None],
    ) -> None:  # fmt: skip
        self.index = index
        self.epoch = epoch
        self.services = services
        self.keys = keys
        self.blocking = blocking
        self.block_ms = block_ms
        self.partitions = partitions
        self.on_lost = on_lost
        self.caught_up = False
        self.recovery = asyncio.Lock()
        self.actors: dict[str, SessionActor] = {}
        self.log = structlog.get_logger("partition").bind(partition=index, epoch=epoch)
        self._inbox = keys.partition(index).inbox
        self._cursor = "0-0"
        self._done: list[str] = []
        self._flusher: asyncio.Task[None] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._stopped = False

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to read."""
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def stop(self) -> None:
        """Stops reading; each actor ends after the step in hand."""
        self._stopped = True
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait([self._reader])
        await asyncio.gather(*(actor.stop() for actor in list(self.actors.values())))
        if self._flusher is not None:
            await asyncio.wait([self._flusher], timeout=1)

    def lost(self) -> None:
        """A write was refused: somebody else owns the partition."""
        if not self._stopped:
            self._stopped = True
            self.log.warning("partition lost")
            self.on_lost(self.index)

    # -- reading ------------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        while not self._stopped:
            try:
                if not self.caught_up:
                    await self._catch_up()
                for entry in await self._next_entries(self.block_ms):
                    await self._dispatch(entry, found=False)
            except BrokerError as error:
                self.log.warning("broker does not answer", error=str(error))
                await asyncio.sleep(_BACKOFF_S)
            except OwnershipLostError:
                self.lost()
            except Exception:
                self.log.exception("reading the inbox failed")
                await asyncio.sleep(_BACKOFF_S)

    async def _catch_up(self) -> None:
        """Reads the inbox to its tail, then adopts the live sessions, then lets actors act on what was in flight."""
        found: list[Entry] = []
        while entries := await self._next_entries(None):
            found += entries
        for entry in found:
            await self._dispatch(entry, found=True)
        with map_exceptions(self.keys.partition(self.index).live):
            live: Any = await self.services.store.client.smembers(self.keys.partition(self.index).live)
        self.caught_up = True
        for session_id in sorted(name.decode() for name in live):
            self.actor(session_id)
        for actor in list(self.actors.values()):
            actor.kick()

    async def _next_entries(self, block_ms: int | None) -> tuple[Entry, ...]:
        with map_exceptions(self._inbox):
            reply: Any = await self.blocking.xread({self._inbox: self._cursor}, count=_COUNT, block=block_ms)
        if not reply:
            return ()
        entries = parse_entries(reply[0][1])
        self._cursor = entries[-1][0]
        return entries

    async def _dispatch(self, entry: Entry, *, found: bool) -> None:
        entry_id, fields = entry
        try:
            item, session_id = _read_entry(entry_id, fields, found)
            if partition_of(session_id, self.partitions) != self.index:
                raise InvalidArgumentError(f"session {session_id} belongs to another partition", field="session_id")
        except InvalidArgumentError as error:
            self.log.warning("inbox entry refused", entry_id=entry_id, error=str(error))
            await self._refuse(fields, error)
            self.done(entry_id)
            return
        self.actor(session_id).deliver(item)

    async def _refuse(self, fields: dict[bytes, bytes], error: InvalidArgumentError) -> None:
        """Answers a malformed command, where it says who sent it."""
        try:
            value = loads(fields[b"command"], "command")
            session_id, command_id = check_session_id(value["session_id"]), str(value["command_id"])
        except (WorldlineError, KeyError, TypeError):
            return
        text = Answer(command_id, error=error).to_json()
        await self.services.scripts.answer(session_id, self.epoch, command_id, text)

    def actor(self, session_id: str) -> SessionActor:
        """The actor of a session; made, and set to adopt it, where there is none yet."""
        actor = self.actors.get(session_id)
        if actor is None:
            actor = self.actors[session_id] = SessionActor(lambda finish: self._core(session_id, finish), self)
        return actor

    def _core(self, session_id: str, finish: Finish) -> SessionCore:
        return SessionCore(
            session_id, self.services, partition=self.index, epoch=self.epoch, inbox=self._inbox, finish=finish
        )

    # -- what actors ask ----------------------------------------------------------------------------------------------

    def idle(self, session_id: str) -> None:
        """Forgets an actor that has nothing left to do or to remember."""
        self.actors.pop(session_id, None)

    async def attempt(self, entry_id: str) -> int:
        """Counts that a claim found this entry unfinished."""
        return await self.services.partitions.inbox_attempt(self.index, self.epoch, entry_id)

    def done(self, entry_id: str) -> None:
        """Deletes the entry soon, together with others that are done by then."""
        self._done.append(entry_id)
        if self._flusher is None:
            self._flusher = asyncio.get_running_loop().create_task(self._flush())

    async def _flush(self) -> None:
        try:
            while self._done:
                batch, self._done = self._done[:_COUNT], self._done[_COUNT:]
                try:
                    await self.services.partitions.inbox_done(self.index, self.epoch, batch)
                except BrokerError:
                    self._done = batch + self._done
                    if self._stopped:
                        return  # the next owner finds them, and that they are done
                    await asyncio.sleep(_BACKOFF_S)
                except OwnershipLostError:
                    self.lost()
                    return
        finally:
            self._flusher = None


def _read_entry(entry_id: str, fields: dict[bytes, bytes], found: bool) -> tuple[CommandItem | NewsItem, str]:
    if b"command" in fields:
        command = Command.from_json(fields[b"command"])
        return CommandItem(entry_id, command, found), command.session_id
    if b"reply" in fields:
        reply = WorkerReply.from_json(fields[b"reply"])
        return NewsItem(entry_id, reply), reply.session_id
    if b"notice" in fields:
        notice = Notice.from_json(fields[b"notice"])
        return NewsItem(entry_id, notice), notice.session_id
    raise InvalidArgumentError("an inbox entry has one field: command, reply or notice", field="entry")
