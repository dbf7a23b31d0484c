"""One session as the scripts see it: calls in, every key before and after out."""

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import redis.asyncio

from contracts.commands import Answer
from contracts.errors import SessionError
from contracts.events import ARDiffusionSessionEvent
from contracts.keys import Keys
from contracts.lifecycle import Status, Trigger
from contracts.messages import InFlight, Kind, WorkerRequest
from contracts.partition_scripts import PartitionScripts
from contracts.scripts import Argument, Scripts
from contracts.session_scripts import Committed, Entry, Failure, Limits, Outcome, SessionScripts
from contracts.state import SessionState
from contracts.tick import ARDiffusionTickRequest

SESSION = "world-1"
WORKER = "gpu-0"
EPOCH = 7
INBOX = "inbox-of-the-session"

Snapshot = dict[str, tuple[str, Any, bool]]
"""Key -> type, contents, whether it expires."""

OUTPUT = {
    "payload": "memory://payload",
    "content_type": "application/octet-stream",
    "sha256": "0" * 64,
    "bytes": 12,
    "frames": "memory://frames",
    "queued_ms": 3,
    "executed_ms": 40,
}


async def snapshot(client: redis.asyncio.Redis) -> Snapshot:
    """Every key with all that is in it; of a stream also the ids and the last id it ever gave."""
    return {key.decode(): await _contents(client, key) for key in sorted(await client.keys("*"))}


async def _contents(client: redis.asyncio.Redis, key: bytes) -> tuple[str, Any, bool]:
    kind = (await client.type(key)).decode()
    contents: Any
    match kind:
        case "hash":
            contents = _text(await client.hgetall(key))
        case "stream":
            last = (await client.xinfo_stream(key))["last-generated-id"]
            contents = ([(i.decode(), _text(f)) for i, f in await client.xrange(key)], last)
        case "zset":
            contents = [(m.decode(), score) for m, score in await client.zrange(key, 0, -1, withscores=True)]
        case "set":
            contents = sorted(member.decode() for member in await client.smembers(key))
        case _:
            contents = await client.get(key)
    return kind, contents, await client.pttl(key) > 0


def _text(pairs: dict[bytes, bytes]) -> dict[str, str]:
    return {
        k.decode(errors="backslashreplace"): v.decode(errors="backslashreplace") for k, v in pairs.items()
    }


def changes(before: Snapshot, after: Snapshot) -> dict[str, Any]:
    """What is different, by the last part of each key.

    A hash: field -> new value, None for one that is gone. A stream: the fields of each entry that was added, then
    `-1` for each one that is gone. A sorted set: member -> score or None. A key that is gone: None. A key that now
    expires: also `<key>.expires`.
    """
    found: dict[str, Any] = {}
    for key in sorted(before.keys() | after.keys()):
        name = key.rpartition(":")[2]
        if before.get(key) == after.get(key):
            continue
        if key not in after:
            found[name] = None
            continue
        kind, new, expires = after[key]
        old = (
            before[key][1]
            if key in before
            else ([], b"")
            if kind == "stream"
            else {}
            if kind == "hash"
            else []
        )
        if old != new:
            found[name] = _difference(kind, old, new)
        if expires != (before[key][2] if key in before else False):
            found[f"{name}.expires"] = expires
    return found


def _difference(kind: str, old: Any, new: Any) -> Any:
    match kind:
        case "hash":
            return {name: new.get(name) for name in old.keys() | new.keys() if old.get(name) != new.get(name)}
        case "stream":
            added = [fields for entry_id, fields in new[0] if entry_id not in dict(old[0])]
            return added + [-1 for entry_id, _ in old[0] if entry_id not in dict(new[0])]
        case "zset":
            old, new = dict(old), dict(new)
            return {name: new.get(name) for name in old.keys() | new.keys() if old.get(name) != new.get(name)}
        case _:
            return new


@dataclass
class Call:
    """One run of a script."""

    name: str
    keys: tuple[str, ...]
    args: tuple[Argument, ...]


class _Noting:
    """Notes what a group of scripts runs."""

    noted: list[Call]

    async def run(self, name: str, keys: Sequence[str], args: Sequence[Argument]) -> list[Any]:
        self.noted.append(Call(name, tuple(keys), tuple(args)))
        return await super().run(name, keys, args)  # type: ignore[misc]


class NotingSession(_Noting, SessionScripts):
    pass


class NotingPartition(_Noting, PartitionScripts):
    pass


class NotingClient(_Noting, Scripts):
    pass


@dataclass
class World:
    """A session, and the scripts of everybody who touches it.

    Args:
        epoch: of the owner whose scripts are called.
    """

    client: redis.asyncio.Redis
    session_id: str = SESSION
    epoch: int = EPOCH
    cluster: bool = False
    limits: Limits = field(default_factory=Limits)
    calls: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.keys = Keys()
        self.k = self.keys.session(self.session_id)
        self.requests = self.keys.worker(WORKER).requests
        self.scripts = NotingSession(self.client, self.keys, self.limits, by="host-1", cluster=self.cluster)
        self.partitions = NotingPartition(self.client, self.keys)
        self.producer = NotingClient(self.client, self.keys)
        self.scripts.noted = self.partitions.noted = self.producer.noted = self.calls
        self.before: Snapshot = {}

    # -- looking ------------------------------------------------------------------------------------------------------

    async def mark(self) -> None:
        """From here on `changes` counts."""
        self.before = await snapshot(self.client)

    async def changes(self) -> dict[str, Any]:
        """What is different since `mark`."""
        return changes(self.before, await snapshot(self.client))

    async def state(self) -> SessionState:
        """The state as its present owner mirrors it."""
        state = SessionState.from_hash(self.session_id, await self.client.hgetall(self.k.state))
        assert state is not None
        return replace(state, epoch=self.epoch)

    async def stored(self) -> SessionState:
        """The state as it stands in the broker."""
        state = SessionState.from_hash(self.session_id, await self.client.hgetall(self.k.state))
        assert state is not None
        return state

    async def entries(self) -> dict[int, str]:
        """Event id -> entry id; of equal ids the first, without those that are no whole number."""
        found: dict[int, str] = {}
        for entry_id, fields in await self.client.xrange(self.k.events):
            if (text := fields.get(b"event_id", b"")).isdigit():
                found.setdefault(int(text), entry_id.decode())
        return found

    async def ids(self) -> list[int]:
        """The remembered event ids in order of acceptance."""
        return [int(member) for member in await self.client.zrange(self.k.ids, 0, -1)]

    async def answers(self) -> list[dict[str, Any]]:
        return [json.loads(fields[b"answer"]) for _, fields in await self.client.xrange(self.k.answers)]

    async def answered(self) -> dict[str, Any]:
        return {k.decode(): json.loads(v) for k, v in (await self.client.hgetall(self.k.answered)).items()}

    async def cursor(self) -> str:
        """Id of the last entry of the events stream, as a host has it that read all."""
        last = await self.client.xrevrange(self.k.events, count=1)
        return last[0][0].decode() if last else "0-0"

    # -- events -------------------------------------------------------------------------------------------------------

    async def accept(self, event_id: int, prompt: str = "p") -> str:
        """Sends an event the guarded way; returns the receipt's status."""
        receipt = await self.producer.accept_event(self.session_id, ARDiffusionSessionEvent(event_id, prompt))
        return str(receipt.status)

    async def bare(self, event_id: object = None, **fields: object) -> str:
        """Adds an event as any producer would; returns its entry id."""
        body = ({} if event_id is None else {"event_id": event_id}) | (fields or {"prompt": "p"})
        entry_id = await self.client.xadd(self.k.events, body, nomkstream=True)
        return entry_id.decode() if entry_id else ""

    # -- lifecycle ----------------------------------------------------------------------------------------------------

    def ok(self, command_id: str, **result: Any) -> str:
        return Answer(command_id, result=result).to_json()

    async def create(
        self, command_id: str = "create-1", epoch: int | None = None, **fields: object
    ) -> Outcome:
        """Creates the session with usual fields; `fields` replace some."""
        life = f"ar-{self.session_id}-create-{secrets.token_hex(16)}"
        values: dict[str, object] = {
            "life": life,
            "chunk_index": 0,
            "event_floor": -1,
            "controls": "[]",
            "reducer": "latest",
            "model": "m",
            "params": "{}",
            "worker": WORKER,
            "recording": "all",
            "max_pending_events": 4,
            "rejected_total": "{}",
            "close_attempts": 0,
            "schema_version": 1,
        } | fields
        text = {name: str(value) for name, value in values.items()}
        answer = self.ok(command_id, life=values["life"], chunk_index=0, event_floor=-1)
        return await self.scripts.create(self.session_id, epoch or self.epoch, command_id, answer, text)

    def refused(self, command_id: str) -> str:
        return Answer(command_id, error=SessionError("boom")).to_json()

    def request(self, state: SessionState, record: InFlight, **extra: Any) -> WorkerRequest:
        return WorkerRequest(
            kind=record.kind, session_id=self.session_id, request_id=record.request_id, life=record.life,
            parent_request_id=state.parent_request_id, fence=record.fence, reply_to=INBOX, model=state.model, **extra,
        )  # fmt: skip

    def record(self, state: SessionState, kind: Kind, command_id: str | None, **values: Any) -> InFlight:
        """An in-flight record of the next fence, with a fresh request id unless one is given."""
        request_id = values.pop("request_id", None) or f"ar-{self.session_id}-{kind}-{secrets.token_hex(16)}"
        life = request_id if kind is Kind.RESET else state.life
        return InFlight(request_id, kind, state.fence + 1, life, command_id, **values)

    async def tick(
        self,
        ids: Sequence[int] = (),
        command_id: str | None = None,
        state: SessionState | None = None,
        **values: Any,
    ) -> tuple[InFlight, WorkerRequest]:
        """A tick over those pending events, ready to begin."""
        state = state or await self.state()
        entries = await self.entries()
        record = self.record(
            state, Kind.TICK, command_id, chunk_index=state.chunk_index, event_ids=tuple(sorted(ids)),
            entries=tuple(entries[i] for i in sorted(ids)), **values,
        )  # fmt: skip
        tick = ARDiffusionTickRequest(
            self.session_id, record.request_id, state.chunk_index, record.event_ids, record.prompt
        )
        return record, self.request(state, record, tick=tick)

    async def begin(
        self, ids: Sequence[int] = (), command_id: str | None = None, *, cursor: str | None = None, strict: bool = True,
        **values: Any,
    ) -> tuple[Outcome, tuple[Entry, ...]]:  # fmt: skip
        """Begins a tick over those pending events; everything in the stream has been read unless `cursor` says less."""
        state = await self.state()
        record, request = await self.tick(ids, command_id, state, **values)
        at = await self.cursor() if cursor is None else cursor
        return await self.scripts.begin_tick(state, record, request, WORKER, cursor=at, strict=strict)

    async def in_flight(self) -> InFlight:
        record = (await self.stored()).inflight
        assert record is not None
        return record

    def chunk(self, state: SessionState, record: InFlight, **changed: Any) -> tuple[dict[str, str], str]:
        """Fields of the `chunks` entry, and the answer's head, for the tick in flight."""
        result = {
            "life": state.life,
            "chunk_index": record.chunk_index,
            "request_id": record.request_id,
            "applied_event_ids": list(record.event_ids),
            **OUTPUT,
            **changed,
        }
        fields = {
            name: json.dumps(value) if isinstance(value, list) else str(value)
            for name, value in result.items()
            if value is not None
        }
        head = Answer(record.command_id or "", result=result).to_json().removesuffix("}}") + ","
        return fields, head

    async def commit(
        self,
        *,
        cursor: str | None = None,
        accepted_ms: int | None = None,
        ticks_kept: int | None = None,
        **changed: Any,
    ) -> Committed:
        """Commits the tick in flight."""
        state, record = await self.state(), await self.in_flight()
        fields, head = self.chunk(state, record, **changed)
        at = await self.cursor() if cursor is None else cursor
        return await self.scripts.commit(
            state,
            fields,
            head,
            incarnation="inc-1",
            accepted_ms=accepted_ms,
            cursor=at,
            ticks_kept=ticks_kept,
        )

    async def chunks(self, *groups: Sequence[int]) -> None:
        """Accepts and commits one group of events a chunk."""
        for ids in groups:
            for event_id in ids:
                assert await self.accept(event_id) == "ACCEPTED"
            assert (await self.begin(ids))[0] is Outcome.BEGUN
            assert (await self.commit()).outcome is Outcome.COMMITTED

    async def fail(
        self, trigger: Trigger = Trigger.TICK_FAILED, *, code: str = "model_error", release: bool = True,
        command_id: str = "", allowed: Sequence[Status] = (Status.ACTIVE,),
    ) -> Outcome:  # fmt: skip
        """Makes the session FAILED."""
        state = await self.state()
        answer = self.refused(command_id)
        sent = None
        if release:
            record = self.record(state, Kind.RELEASE, None)
            sent = (record, self.request(state, record), WORKER)
        return await self.scripts.fail(
            state,
            Failure(trigger, code, "boom"),
            allowed=allowed,
            command_id=command_id,
            answer=answer,
            release=sent,
        )

    async def begin_reset(self, command_id: str | None = "reset-1") -> Outcome:
        state = await self.state()
        record = self.record(state, Kind.RESET, command_id)
        return await self.scripts.begin_reset(state, record, self.request(state, record), WORKER)

    async def finish_reset(self) -> Outcome:
        state, record = await self.state(), await self.in_flight()
        head = self.ok(record.command_id or "", life=record.request_id, chunk_index=0).removesuffix("}}")
        return await self.scripts.finish_reset(state, record.request_id, "inc-2", head + ',"event_floor":')

    async def begin_close(self, command_id: str | None = "close-1", *, gone: bool = False) -> Outcome:
        state = await self.state()
        record = self.record(state, Kind.RELEASE, command_id)
        request = None if gone else self.request(state, record)
        return await self.scripts.begin_close(state, record, request, WORKER, "asked")

    async def finish_close(self, command_id: str = "close-1") -> Outcome:
        record = await self.in_flight()
        return await self.scripts.finish_close(
            await self.state(), record.request_id, self.ok(record.command_id or command_id, status="CLOSED")
        )

    async def fail_close(self) -> Outcome:
        record = await self.in_flight()
        answer = self.refused(record.command_id or "")
        outcome, *_ = await self.scripts.fail_close(
            await self.state(), record.request_id, "no release", answer
        )
        return outcome

    async def resend(self) -> Outcome:
        state = await self.state()
        record = replace(await self.in_flight(), fence=state.fence + 1)
        tick = None
        if record.kind is Kind.TICK:
            tick = ARDiffusionTickRequest(
                self.session_id, record.request_id, state.chunk_index, record.event_ids
            )
        return await self.scripts.resend(state, record, self.request(state, record, tick=tick), WORKER)

    # -- whole ways ---------------------------------------------------------------------------------------------------

    async def bring_to(self, status: Status) -> None:
        """A session of that status with nothing half done but what the status means."""
        assert await self.create() is Outcome.CREATED
        if status is Status.FAILED:
            assert await self.fail(release=False) is Outcome.FAILED
        if status in (Status.CLOSING, Status.CLOSED, Status.CLEANUP_FAILED):
            assert await self.begin_close() is Outcome.BEGUN
        if status is Status.CLOSED:
            assert await self.finish_close() is Outcome.CLOSED
        if status is Status.CLEANUP_FAILED:
            assert await self.fail_close() is Outcome.CLEANUP_FAILED
