"""Commands of clients, and their answers. Each has one JSON form, and a strict reader that names the field at fault."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from contracts.creation import CREATE_FIELDS, CreateArgs, only_fields
from contracts.errors import InvalidArgumentError, WorldlineError, error_from_dict
from contracts.events import loads
from contracts.fields import dumps, mapping, named, optional_id, optional_index
from contracts.identity import check_session_id, check_text_id, new_command_id

MAX_COMMAND_ID: Final = 200
"""Characters of a command id."""


class Op(StrEnum):
    """What a command asks for."""

    CREATE = "create"
    NEXT_CHUNK = "next_chunk"
    RUN = "run"
    PAUSE = "pause"
    RESET = "reset"
    CLOSE = "close"
    DISCONNECT = "disconnect"
    SWEEP = "sweep"


class Condition(StrEnum):
    """What must hold for a disconnect that was sent on suspicion; looked at again where it is carried out."""

    ABSENT = "absent"
    """The client's presence has expired."""

    IDLE = "idle"
    """Neither event nor command nor chunk came for `idle_ms`."""


_ARGS: Final[Mapping[Op, frozenset[str]]] = {
    Op.CREATE: CREATE_FIELDS,
    Op.RUN: frozenset({"pace_ms"}),
    Op.CLOSE: frozenset({"life", "reason"}),
    Op.DISCONNECT: frozenset({"life", "reason", "only_if"}),
}


@dataclass(frozen=True, slots=True)
class Command:
    """One command of a client; `args` have been checked for their op."""

    op: Op
    session_id: str
    command_id: str = field(default_factory=new_command_id)
    args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_session_id(self.session_id)
        if len(check_text_id(self.command_id, "command_id")) > MAX_COMMAND_ID:
            raise InvalidArgumentError(
                f"command_id has more than {MAX_COMMAND_ID} characters", field="command_id"
            )
        only_fields(mapping(self.args, "args"), _ARGS.get(self.op, frozenset()), self.op)
        if self.op is Op.CREATE:
            CreateArgs.from_dict(self.args)
        if self.op is Op.RUN:
            optional_index(self.args, "pace_ms")
        for name in ("life", "reason"):
            optional_id(self.args, name)
        if self.args.get("only_if") is not None:
            named(Condition, self.args["only_if"], "only_if")

    def to_json(self) -> str:
        """The inbox entry's `command` field."""
        return dumps(
            {
                "op": self.op,
                "session_id": self.session_id,
                "command_id": self.command_id,
                "args": dict(self.args),
            }
        )

    @classmethod
    def from_json(cls, text: bytes) -> Command:
        """Strict; an InvalidArgumentError names the field."""
        value = mapping(loads(text, "command"), "command")
        only_fields(value, frozenset({"op", "session_id", "command_id", "args"}), "command")
        op = named(Op, value.get("op"), "op")
        args = {} if value.get("args") is None else mapping(value["args"], "args")
        command_id = check_text_id(value.get("command_id"), "command_id")
        return cls(op, check_session_id(value.get("session_id")), command_id, args)


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of one command: a result or an error."""

    command_id: str
    result: Mapping[str, Any] | None = None
    error: WorldlineError | None = None

    def to_json(self) -> str:
        """`{"command_id", "ok", "result" | "error"}`."""
        body: dict[str, Any] = {"command_id": self.command_id, "ok": self.error is None}
        if self.error is None:
            body["result"] = self.result
        else:
            body["error"] = self.error.to_dict()
        return dumps(body)

    @classmethod
    def from_json(cls, text: bytes | str) -> Answer:
        value = mapping(loads(text, "answer"), "answer")
        command_id = check_text_id(value.get("command_id"), "command_id")
        if value.get("ok") is True:
            return cls(command_id, result=mapping(value.get("result"), "result"))
        return cls(command_id, error=error_from_dict(mapping(value.get("error"), "error")))

    def unwrap(self) -> dict[str, Any]:
        """The result, or the error raised."""
        if self.error is not None:
            raise self.error
        return dict(self.result or {})
