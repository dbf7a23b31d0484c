"""One partition that this host owns: its inbox, and the actors of its sessions.

The inbox has no cursor that outlives a reader: what is in it is unfinished. A claim reads it from the start to its tail
before anything is sent again, timed out or failed; an entry is deleted once its outcome is durable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

import structlog

from actors.inbox import read_entry, sender_of
from actors.session import SessionActor
from actors.session_core import Finish, Services, SessionCore
from contracts import failpoints
from contracts.broker import Client, map_exceptions
from contracts.commands import Answer
from contracts.errors import BrokerError, InvalidArgumentError, OwnershipLostError, WorldlineError
from contracts.identity import partition_of
from contracts.keys import Keys
from contracts.session_scripts import Entry, parse_entries

_COUNT: Final = 256
_BACKOFF_S: Final = 0.3
_DONE_DELAY_S: Final = 0.01
"""One deletion for what many ticks leave; a new owner that finds an entry meanwhile finds its outcome too."""


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

    # -- life --------------------------------------------------------------------------------------------------

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

    # -- reading -----------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        broken = False
        while not self._stopped:
            try:
                if not self.caught_up:
                    await self._catch_up()
                elif broken:
                    await self._catch_up_again()
                broken = False
                await self._dispatch(await self._entries(self._cursor, self.block_ms), found=False)
                await asyncio.sleep(0)  # what came goes first: its actors send before the next read does
            except BrokerError as error:
                self.log.warning("broker does not answer", error=str(error))
                broken = True
                await asyncio.sleep(_BACKOFF_S)
            except Exception:
                self.log.exception("reading the inbox failed")
                await asyncio.sleep(_BACKOFF_S)

    async def _catch_up(self) -> None:
        """Reads the inbox to its tail, then adopts the live sessions, then lets actors act on what was in flight."""
        found: list[Entry] = []
        while entries := await self._entries(found[-1][0] if found else self._cursor, None):
            found += entries
        await self._dispatch(found, found=True)
        with map_exceptions(self.keys.partition(self.index).live):
            live: Any = await self.services.store.client.smembers(self.keys.partition(self.index).live)
        self.caught_up = True
        for session_id in sorted(name.decode() for name in live):
            self.actor(session_id).listed_live = True
        for actor in list(self.actors.values()):
            actor.kick()

    async def _catch_up_again(self) -> None:
        """After a break of the connection: first what came, then what is in flight is sent again."""
        while entries := await self._entries(self._cursor, None):
            await self._dispatch(entries, found=False)
        self.log.info("broker answers again")
        for actor in list(self.actors.values()):
            actor.reconnected()

    async def _entries(self, after: str, block_ms: int | None) -> tuple[Entry, ...]:
        with map_exceptions(self._inbox):
            # Not the library's own method: its telemetry costs as much as the rest of the call.
            block = () if block_ms is None else ("BLOCK", block_ms)
            reply: Any = await self.blocking.execute_command(
                "XREAD", "COUNT", _COUNT, *block, "STREAMS", self._inbox, after
            )
        return parse_entries(reply[0][1]) if reply else ()

    async def _dispatch(self, entries: Sequence[Entry], *, found: bool) -> None:
        """Hands entries to their actors; the cursor moves past each only then, so that an error skips none."""
        for entry_id, fields in entries:
            try:
                item = read_entry(entry_id, fields, found=found)
                if partition_of(item.session_id, self.partitions) != self.index:
                    text = f"session {item.session_id} belongs to another partition"
                    raise InvalidArgumentError(text, field="session_id")
            except InvalidArgumentError as error:
                self.log.warning("inbox entry refused", entry_id=entry_id, error=str(error))
                await self._refuse(fields, error)
                self.done(entry_id)
            else:
                self.actor(item.session_id).deliver(item)
            self._cursor = entry_id

    async def _refuse(self, fields: dict[bytes, bytes], error: InvalidArgumentError) -> None:
        """Answers a malformed command, where it says who sent it."""
        if (sender := sender_of(fields)) is None:
            return
        session_id, command_id = sender
        text = Answer(command_id, error=error).to_json()
        try:
            await self.services.scripts.answer(session_id, self.epoch, command_id, text)
        except BrokerError:
            raise
        except WorldlineError as refusal:  # for instance a session of another owner: not ours to answer for
            self.log.warning("command can't be answered", command_id=command_id, error=str(refusal))

    def actor(self, session_id: str) -> SessionActor:
        """The actor of a session; made, and set to adopt it, where there is none yet."""
        actor = self.actors.get(session_id)
        if actor is None:
            actor = self.actors[session_id] = SessionActor(
                lambda finish: self._core(session_id, finish), self
            )
        return actor

    def _core(self, session_id: str, finish: Finish) -> SessionCore:
        return SessionCore(
            session_id,
            self.services,
            partition=self.index,
            epoch=self.epoch,
            inbox=self._inbox,
            finish=finish,
        )

    # -- what actors ask ---------------------------------------------------------------------------------------

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
            await asyncio.sleep(_DONE_DELAY_S)
            while self._done:
                batch, self._done = self._done[:_COUNT], self._done[_COUNT:]
                try:
                    failpoints.hit("host.entry.before")
                    await self.services.partitions.inbox_done(self.index, self.epoch, batch)
                    failpoints.hit("host.entry.after")
                except BrokerError:
                    await self._delete_later(batch)
                except OwnershipLostError:
                    self.lost()
                    return
                except WorldlineError:
                    self.log.exception("inbox entries can't be deleted")
                except Exception:
                    self.log.exception("inbox entries were not deleted")
                    await self._delete_later(batch)
        finally:
            self._flusher = None

    async def _delete_later(self, batch: list[str]) -> None:
        """Puts entries back; after the end the next owner finds them, and that they are done."""
        if not self._stopped:
            self._done = batch + self._done
            await asyncio.sleep(_BACKOFF_S)
