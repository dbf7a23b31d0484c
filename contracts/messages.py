"""Messages between host and worker: requests and replies, notices, the in-flight record.

Each has one plain form (JSON, or the flat fields of a stream entry) and a strict reader that names the field at fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from contracts.creation import only_fields
from contracts.errors import InvalidArgumentError, WorldlineError, error_from_dict
from contracts.events import check_prompt, loads, thaw
from contracts.fields import dumps, flat_text, mapping, named, optional_id, optional_index
from contracts.identity import check_index, check_session_id, check_text_id, parse_index
from contracts.tick import ARDiffusionTickRequest, check_event_ids


class Kind(StrEnum):
    """What a worker is asked to do."""

    TICK = "tick"
    RESET = "reset"
    RELEASE = "release"


@dataclass(frozen=True, slots=True)
class WorkerRequest:
    """One entry of a worker's request stream.

    Args:
        kind: tick, reset or release.
        session_id: the session.
        request_id: this execution.
        life: the life that the request belongs to; a release names the life that it releases.
        parent_request_id: for a tick the request id of the last committed chunk, or the life at chunk 0.
        fence: grows with each delivery; a lower one is dropped.
        reply_to: inbox key of the session's partition.
        model, params, seed: from the creation.
        tick: the snapshot, for a tick.
        expires_at_ms: broker time after which a tick is answered `expired`; None where it never does.
    """

    kind: Kind
    session_id: str
    request_id: str
    life: str
    parent_request_id: str
    fence: int
    reply_to: str
    model: str
    params: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    tick: ARDiffusionTickRequest | None = None
    expires_at_ms: int | None = None

    def to_entry(self) -> dict[str, str]:
        """Flat fields; `tick` and `params` are JSON. `expires_at_ms` is added by the script that sends it."""
        entry = {
            "kind": str(self.kind),
            "request_id": self.request_id,
            "life": self.life,
            "parent_request_id": self.parent_request_id,
            "fence": str(self.fence),
            "reply_to": self.reply_to,
            "model": self.model,
            "params": dumps(thaw(self.params)),
        }
        if self.seed is not None:
            entry["seed"] = str(self.seed)
        if self.tick is not None:
            entry["tick"] = dumps(self.tick.to_dict())
        else:
            entry["session_id"] = self.session_id
        return entry

    @classmethod
    def from_entry(cls, fields: Mapping[bytes, bytes]) -> WorkerRequest:
        """Strict reader; an InvalidArgumentError names the field."""
        text = flat_text(fields, "worker request")
        only_fields(text, REQUEST_FIELDS, "worker request")
        try:
            kind = named(Kind, text["kind"], "kind")
            tick = (
                ARDiffusionTickRequest.from_dict(loads(text["tick"], "tick")) if kind is Kind.TICK else None
            )
            return cls(
                kind=kind,
                session_id=check_session_id(tick.session_id if tick else text["session_id"]),
                request_id=check_text_id(text["request_id"], "request_id"),
                life=check_text_id(text["life"], "life"),
                parent_request_id=check_text_id(text["parent_request_id"], "parent_request_id"),
                fence=parse_index(text["fence"], "fence"),
                reply_to=check_text_id(text["reply_to"], "reply_to"),
                model=check_text_id(text["model"], "model"),
                params=mapping(loads(text["params"], "params"), "params"),
                seed=parse_index(text["seed"], "seed") if "seed" in text else None,
                tick=tick,
                expires_at_ms=parse_index(text["expires_at_ms"], "expires_at_ms")
                if "expires_at_ms" in text
                else None,
            )
        except KeyError as error:
            raise InvalidArgumentError(
                f"worker request lacks {error.args[0]}", field=str(error.args[0])
            ) from None


REQUEST_FIELDS: Final = frozenset(WorkerRequest.__dataclass_fields__)
"""Fields that an entry of a request stream may have."""


@dataclass(frozen=True, slots=True)
class ChunkOutput:
    """What a worker made of a tick: the metadata envelope and where the bytes lie.

    Args:
        metadata: the pipeline's metadata, not yet checked.
        payload: URL of the payload.
        content_type: of the payload.
        sha256: of the payload, hex.
        bytes: length of the payload.
        frames: URL of the pixel frames, or None.
    """

    metadata: Mapping[str, Any]
    payload: str
    content_type: str
    sha256: str
    bytes: int
    frames: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {name: thaw(getattr(self, name)) for name in self.__dataclass_fields__}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> ChunkOutput:
        try:
            return cls(
                metadata=mapping(value.get("metadata"), "metadata"),
                payload=check_text_id(value.get("payload"), "payload"),
                content_type=check_text_id(value.get("content_type"), "content_type"),
                sha256=check_text_id(value.get("sha256"), "sha256"),
                bytes=check_index(value.get("bytes"), "bytes"),
                frames=optional_id(value, "frames"),
            )
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"output: {error}", field=error.field) from None


@dataclass(frozen=True, slots=True)
class WorkerReply:
    """A worker's answer to one request; it counts only if request id and fence equal those in flight.

    `output` is set for a tick that ran, `error` for anything that failed; both None for a reset or release that
    succeeded.
    """

    session_id: str
    request_id: str
    fence: int
    life: str
    incarnation: str
    output: ChunkOutput | None = None
    error: WorldlineError | None = None
    queued_ms: int = 0
    executed_ms: int = 0

    def to_json(self) -> str:
        """The inbox entry's `reply` field."""
        body: dict[str, Any] = {
            "session_id": self.session_id,
            "request_id": self.request_id,
            "fence": self.fence,
            "life": self.life,
            "incarnation": self.incarnation,
            "queued_ms": self.queued_ms,
            "executed_ms": self.executed_ms,
        }
        if self.output is not None:
            body["output"] = self.output.to_dict()
        if self.error is not None:
            body["error"] = self.error.to_dict()
        return dumps(body)

    @classmethod
    def from_json(cls, text: bytes | str) -> WorkerReply:
        value = mapping(loads(text, "reply"), "reply")
        return cls(
            session_id=check_session_id(value.get("session_id")),
            request_id=check_text_id(value.get("request_id"), "request_id"),
            fence=check_index(value.get("fence"), "fence"),
            life=check_text_id(value.get("life"), "life"),
            incarnation=check_text_id(value.get("incarnation"), "incarnation"),
            output=ChunkOutput.from_dict(mapping(value["output"], "output")) if "output" in value else None,
            error=error_from_dict(mapping(value["error"], "error")) if "error" in value else None,
            queued_ms=check_index(value.get("queued_ms", 0), "queued_ms"),
            executed_ms=check_index(value.get("executed_ms", 0), "executed_ms"),
        )


class NoticeKind(StrEnum):
    """What a worker, or whoever declares it lost, tells a session unasked."""

    EVICTED = "evicted"
    WORKER_LOST = "worker_lost"


NO_INCARNATION: Final = "none"
"""In a notice: the worker is gone, and no new start of it has taken its place."""


@dataclass(frozen=True, slots=True)
class Notice:
    """News about a session's memory on a worker; one about another life or incarnation is ignored.

    `incarnation` is the start of the worker that the news is about (for a restart: the new one).
    """

    kind: NoticeKind
    session_id: str
    worker: str
    life: str
    incarnation: str
    message: str = ""

    def to_json(self) -> str:
        """The inbox entry's `notice` field."""
        return dumps({name: getattr(self, name) for name in self.__dataclass_fields__})

    @classmethod
    def from_json(cls, text: bytes | str) -> Notice:
        value = mapping(loads(text, "notice"), "notice")
        only_fields(value, frozenset(cls.__dataclass_fields__), "notice")
        return cls(
            named(NoticeKind, value.get("kind"), "kind"),
            check_session_id(value.get("session_id")),
            check_text_id(value.get("worker"), "worker"),
            check_text_id(value.get("life"), "life"),
            check_text_id(value.get("incarnation"), "incarnation"),
            str(value.get("message", "")),
        )


@dataclass(frozen=True, slots=True)
class InFlight:
    """The one request that a session has at a worker, as the state hash holds it.

    `controls` and `reducer_state` are JSON text, not nested JSON, so that the commit script moves them into place
    byte for byte.

    Args:
        request_id, kind, fence: of the request.
        life: the life that the request belongs to (for a reset: the new one is `request_id`).
        command_id: the command that waits for it, or None.
        chunk_index: of a tick.
        event_ids: ids that the tick applies.
        entries: stream entry ids of those events; the commit deletes exactly these.
        prompt, controls, reducer_state: what the commit puts in place.
    """

    request_id: str
    kind: Kind
    fence: int
    life: str
    command_id: str | None = None
    chunk_index: int | None = None
    event_ids: tuple[int, ...] = ()
    entries: tuple[str, ...] = ()
    prompt: str | None = None
    controls: str = "[]"
    reducer_state: str | None = None

    def to_json(self) -> str:
        return dumps({name: getattr(self, name) for name in self.__dataclass_fields__})

    @classmethod
    def from_json(cls, text: bytes | str) -> InFlight:
        value = mapping(loads(text, "inflight"), "inflight")
        only_fields(value, frozenset(cls.__dataclass_fields__), "inflight")
        entries = value.get("entries", [])
        if not isinstance(entries, list):
            raise InvalidArgumentError("entries must be a list", field="entries")
        return cls(
            request_id=check_text_id(value.get("request_id"), "request_id"),
            kind=named(Kind, value.get("kind"), "kind"),
            fence=check_index(value.get("fence"), "fence"),
            life=check_text_id(value.get("life"), "life"),
            command_id=optional_id(value, "command_id"),
            chunk_index=optional_index(value, "chunk_index"),
            event_ids=check_event_ids(value.get("event_ids", []), "event_ids"),
            entries=tuple(check_text_id(entry, "entries") for entry in entries),
            prompt=check_prompt(value.get("prompt")),
            controls=check_text_id(value.get("controls", "[]"), "controls"),
            reducer_state=optional_id(value, "reducer_state"),
        )
