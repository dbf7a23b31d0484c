"""What stands in a partition's inbox, read: commands, and news from workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from contracts.commands import MAX_COMMAND_ID, Command
from contracts.errors import ChunkMetadataError, InvalidArgumentError
from contracts.events import loads
from contracts.identity import check_index, check_session_id, check_text_id
from contracts.messages import Notice, WorkerReply


@dataclass(frozen=True, slots=True)
class CommandItem:
    """A command and the inbox entry that carried it; `found` if a claim of the partition found it unfinished."""

    entry_id: str
    command: Command
    found: bool = False

    @property
    def session_id(self) -> str:
        return self.command.session_id


@dataclass(frozen=True, slots=True)
class NewsItem:
    """A reply or a notice, the inbox entry that carried it, and whether a claim found it unfinished."""

    entry_id: str
    news: WorkerReply | Notice
    found: bool = False

    @property
    def session_id(self) -> str:
        return self.news.session_id


def read_entry(entry_id: str, fields: Mapping[bytes, bytes], *, found: bool) -> CommandItem | NewsItem:
    """The item of one inbox entry; InvalidArgumentError names the field at fault."""
    if b"command" in fields:
        return CommandItem(entry_id, Command.from_json(fields[b"command"]), found)
    if b"reply" in fields:
        return NewsItem(entry_id, _read_reply(fields[b"reply"]), found)
    if b"notice" in fields:
        return NewsItem(entry_id, Notice.from_json(fields[b"notice"]), found)
    raise InvalidArgumentError("an inbox entry has one field: command, reply or notice", field="entry")


def _read_reply(text: bytes) -> WorkerReply:
    """A reply that names its request counts, whatever is wrong with the rest: nobody must wait for it for ever."""
    try:
        return WorkerReply.from_json(text)
    except InvalidArgumentError as error:
        value = _object(text)
        return WorkerReply(
            session_id=check_session_id(value.get("session_id")),
            request_id=check_text_id(value.get("request_id"), "request_id"),
            fence=check_index(value.get("fence"), "fence"),
            life="",
            incarnation="",
            error=ChunkMetadataError(f"the worker's reply is malformed: {error}", field=error.field),
        )


def sender_of(fields: Mapping[bytes, bytes]) -> tuple[str, str] | None:
    """Session id and command id of a malformed command, where they can be read: somebody waits for an answer."""
    try:
        value = _object(fields.get(b"command", b""))
        session_id = check_session_id(value.get("session_id"))
        command_id = check_text_id(value.get("command_id"), "command_id")
    except InvalidArgumentError:
        return None
    return (session_id, command_id) if len(command_id) <= MAX_COMMAND_ID else None


def _object(text: bytes) -> dict[str, Any]:
    value = loads(text, "entry")
    if not isinstance(value, dict):
        raise InvalidArgumentError("an inbox entry holds a JSON object", field="entry")
    return value
