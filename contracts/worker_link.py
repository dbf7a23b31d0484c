"""A worker's connection to the broker: everything that it reads and writes there, in its own words."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from contracts.broker import blocking_client, command_client, is_cluster, map_exceptions
from contracts.errors import BrokerError, CorruptDataError, InvalidArgumentError
from contracts.index_scripts import IndexScripts
from contracts.keys import Keys
from contracts.messages import InFlight, Notice, WorkerReply
from contracts.payloads import Blob, PayloadStore
from contracts.request_stream import RequestStream
from contracts.reservation import Reservation
from contracts.worker_scripts import WorkerScripts

PARTITIONS: Final = "partitions"
PING_TIMEOUT_S: Final = 1.0


class WorkerLink:
    """One start of one worker, as the broker sees it. Every method raises BrokerError when it does not answer.

    Args:
        url: the broker.
        keys: the key builder.
        worker_id: the worker's name.
        incarnation: this start of it.
        block_ms: longest wait for a request.
        payload_url: where chunks are stored.
        payload_ttl_ms: how long those in the broker live.
    """

    def __init__(
        self,
        url: str,
        *,
        keys: Keys,
        worker_id: str,
        incarnation: str,
        block_ms: int,
        payload_url: str,
        payload_ttl_ms: int,
    ) -> None:
        self.worker_id = worker_id
        self.incarnation = incarnation
        self._keys = keys
        self._own = keys.worker(worker_id)
        self._cluster: bool | None = None
        self._client = command_client(url)
        self._blocking = blocking_client(url, block_ms=block_ms)
        self._scripts = WorkerScripts(self._client, keys)
        self._indexes = IndexScripts(self._client, keys)
        self.requests = RequestStream(self._blocking, self._own, worker_id, incarnation)
        self.payloads = PayloadStore(self._client, base=payload_url, keys=keys, ttl_ms=payload_ttl_ms)

    # ------------------------------------------------------------------------------------------------ the name

    async def claim(self, fields: Mapping[str, str | int], *, ttl_ms: int, dead: str = "") -> int | None:
        """Takes or renews the name; broker time in ms, or None while another start holds it."""
        return await self._scripts.claim(self.worker_id, self.incarnation, fields, ttl_ms=ttl_ms, dead=dead)

    async def holder(self) -> dict[str, str]:
        """The info of whoever holds the name; empty when nobody does."""
        with map_exceptions(self._own.info):
            info: dict[bytes, bytes] = await self._client.hgetall(self._own.info)  # type: ignore[assignment]
        return {name.decode(): value.decode(errors="replace") for name, value in info.items()}

    async def list_alive(self, now_ms: int) -> None:
        """Puts the worker into the index of workers, last seen at `now_ms` of the broker's clock."""
        # Another slot than info, so it can't be part of the script that renews the name.
        await self._indexes.add(self._keys.workers, self.worker_id, now_ms)

    async def mark_busy(self) -> int | None:
        """Says that a request begins; broker time in ms, or None when the name is not held."""
        return await self._scripts.mark_busy(self.worker_id, self.incarnation)

    async def leave(self) -> None:
        """Gives the name back at the orderly end."""
        await self._scripts.leave(self.worker_id, self.incarnation)

    # ------------------------------------------------------------------------------------------------ messages

    async def send_reply(self, reply_to: str, reply: WorkerReply, blobs: Sequence[Blob] = ()) -> None:
        """Adds a reply to the inbox that the request named.

        What it refers to is written in the same transaction; on a cluster, where it lies on another slot, before it.
        """
        if not blobs:
            await self._scripts.add_to_inbox(reply_to, "reply", reply.to_json())
            return
        if self._cluster is None:
            self._cluster = await is_cluster(self._client)
        if self._cluster:
            await self.payloads.write_blobs(blobs)
            await self._scripts.add_to_inbox(reply_to, "reply", reply.to_json())
            return
        with map_exceptions(reply_to):
            pipeline = self._client.pipeline(transaction=True)
            for blob in blobs:
                pipeline.set(blob.key, blob.data, px=blob.ttl_ms)
            pipeline.xadd(reply_to, {"reply": reply.to_json()})
            await pipeline.execute()

    async def send_notice(self, notice: Notice, partitions: int) -> None:
        """Adds a notice to the inbox of the session's partition."""
        await self._scripts.add_to_inbox(
            self.inbox_of(notice.session_id, partitions), "notice", notice.to_json()
        )

    def inbox_of(self, session_id: str, partitions: int) -> str:
        """Key of the inbox of the session's partition."""
        return self._keys.inbox_of(session_id, partitions)

    async def partitions(self) -> int | None:
        """How many partitions there are; None until the first host has written it down."""
        with map_exceptions(self._keys.config):
            value = await self._client.hget(self._keys.config, PARTITIONS)
        if value is None:
            return None
        if not value.isdigit() or int(value) == 0:
            raise CorruptDataError(f"{self._keys.config}: partitions is {value!r:.40}", field=PARTITIONS)
        return int(value)

    # ------------------------------------------------------------------------------------------------ sessions

    async def session_fields(self, session_id: str, names: Sequence[str]) -> list[bytes | None]:
        """Fields of a session's state hash."""
        key = self._keys.session(session_id).state
        with map_exceptions(key):
            values: list[bytes | None] = await self._client.hmget(key, list(names))  # type: ignore[assignment]
        return values

    async def inflight(self, session_id: str) -> InFlight | None:
        """What the session has in flight. Raises CorruptDataError."""
        (text,) = await self.session_fields(session_id, ["inflight"])
        try:
            return None if text is None else InFlight.from_json(text)
        except (InvalidArgumentError, ValueError, TypeError, KeyError) as error:
            raise CorruptDataError(
                f"session {session_id}: inflight is corrupt: {error}", field="inflight"
            ) from error

    async def reservations(self) -> dict[str, Reservation | CorruptDataError]:
        """Every reservation on this worker by session; an unreadable one as the error."""
        with map_exceptions(self._own.sessions):
            entries: dict[bytes, bytes] = await self._client.hgetall(self._own.sessions)  # type: ignore[assignment]
        found: dict[str, Reservation | CorruptDataError] = {}
        for name, text in entries.items():
            session_id = name.decode(errors="replace")
            try:
                found[session_id] = Reservation.from_json(text, session_id)
            except CorruptDataError as error:
                found[session_id] = error
        return found

    async def unreserve(self, session_id: str, life: str) -> bool:
        """Gives the session's room back if it is that life's."""
        return await self._scripts.unreserve(self.worker_id, session_id, life)

    # ------------------------------------------------------------------------------------------------ both clients

    async def check(self) -> None:
        """BrokerError, in about a second, when the broker can't be reached."""
        with map_exceptions("PING"):
            try:
                await asyncio.wait_for(self._client.ping(), PING_TIMEOUT_S)
            except TimeoutError as error:
                raise BrokerError("the broker does not answer (PING)", field="REDIS_URL") from error

    async def close(self) -> None:
        """Closes the connections."""
        await self._blocking.aclose()
        await self._client.aclose()
