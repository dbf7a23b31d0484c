"""Writes `contracts/schemas/*.json`: JSON Schemas of all messages, for producers and tools in other languages.

    python -m contracts.make_schemas           write them
    python -m contracts.make_schemas --check   exit 1 if one is out of date

Each file stands alone. Entries of streams have flat fields, all of them strings; where one holds JSON, its
`contentSchema` says what. What a schema can't say (a control track at most once in an event) is in its description.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from contracts import schema_parts as part
from contracts.commands import MAX_COMMAND_ID, Condition, Op
from contracts.creation import MAX_PENDING_EVENTS, RECORDING_PATTERN
from contracts.dreamzero import URL_PATTERN
from contracts.errors import answer_codes
from contracts.events import MAX_EVENT_BYTES
from contracts.generated import ROOT, write_or_check
from contracts.lifecycle import Status
from contracts.lingbot import (
    CAMERA_KEYS,
    FRAMES_MODE,
    FRAMES_PER_CHUNK,
    MAX_SCRIPT_FRAMES,
    POSES_PER_CHUNK,
    SCRIPT_MODE,
    STATE_MODE,
)
from contracts.messages import Kind, NoticeKind
from contracts.schema_parts import Schema, described, enum, json_text, optional, record

COMMAND: Final = "python -m contracts.make_schemas"
FOLDER: Final = ROOT / "contracts" / "schemas"


def control() -> Schema:
    """One value of one control track."""
    return record({"track": part.TEXT_ID, "schema": part.TEXT_ID, "data": part.OPAQUE})


def event_entry() -> Schema:
    """An entry of a session's `events` stream, as any producer adds it."""
    controls = json_text(
        {"type": "array", "items": control()}, description="JSON list of controls, each track at most once."
    )
    return record(
        {"event_id": part.DIGITS},
        {"prompt": part.PROMPT, "controls": {**controls, "maxLength": MAX_EVENT_BYTES}},
        anyOf=[{"required": ["prompt"]}, {"required": ["controls"]}],
    )


def tick() -> Schema:
    """The snapshot that one chunk is generated from."""
    return record(
        {
            "session_id": part.SESSION_ID,
            "request_id": part.TEXT_ID,
            "chunk_index": part.INDEX,
            "applied_event_ids": part.EVENT_IDS,
            "prompt": optional({"type": "string"}),
            "controls": {"type": "array", "items": control()},
            "reset": {"type": "boolean"},
            "close_session": {"type": "boolean"},
        }
    )


def _create_args() -> Schema:
    milliseconds = optional(part.INDEX)
    return record(
        {"model": part.TEXT_ID},
        {
            "reducer": optional(part.TEXT_ID),
            "seed": optional(part.INDEX),
            "prompt": optional(part.PROMPT),
            "params": optional(part.OPAQUE),
            "recording": optional({"type": "string", "pattern": f"^{RECORDING_PATTERN}$"}),
            "max_pending_events": optional({"type": "integer", "minimum": 1, "maximum": MAX_PENDING_EVENTS}),
            "pace_ms": milliseconds,
            "presence_ms": milliseconds,
            "idle_ms": milliseconds,
        },
    )


def _args_of(op: Op) -> Schema:
    if op is Op.CREATE:
        return _create_args()
    if op is Op.RUN:
        return record({}, {"pace_ms": optional(part.INDEX)})
    if op in (Op.CLOSE, Op.DISCONNECT):
        condition = {"only_if": optional(enum(Condition))} if op is Op.DISCONNECT else {}
        return record({}, {"life": optional(part.TEXT_ID), "reason": optional(part.TEXT_ID), **condition})
    return record({})


def command() -> Schema:
    """What a client asks for: the `command` field of an inbox entry, one form an op."""
    return {"oneOf": [_command(op) for op in Op]}


def _command(op: Op) -> Schema:
    head: dict[str, Schema] = {
        "op": {"const": str(op)},
        "session_id": part.SESSION_ID,
        "command_id": {**part.TEXT_ID, "maxLength": MAX_COMMAND_ID},
    }
    args = _args_of(op)
    if args["required"]:
        return record({**head, "args": args})
    return record(head, {"args": optional(args)})


def error() -> Schema:
    """Why something failed; newer peers may send codes that are not listed."""
    return record(
        {
            "code": {"type": "string", "examples": list(answer_codes())},
            "message": {"type": "string"},
            "field": optional({"type": "string"}),
            "retryable": {"type": "boolean"},
        }
    )


def answer() -> Schema:
    """The outcome of one command: the `answer` field of an entry of the `answers` stream."""
    begun = record(
        {"life": part.TEXT_ID, "chunk_index": part.INDEX, "event_floor": {"type": "integer", "minimum": -1}}
    )
    result = {
        "anyOf": [
            described(begun, "Of create and reset."),
            described(chunk(), "Of next_chunk."),
            described(record({"status": enum(Status)}), "Of close and disconnect."),
            described(part.OBJECT, "Of the others."),
        ]
    }
    return {
        "oneOf": [
            record({"command_id": part.TEXT_ID, "ok": {"const": True}, "result": result}),
            record({"command_id": part.TEXT_ID, "ok": {"const": False}, "error": error()}),
        ]
    }


def _chunk(index: Schema, ids: Schema) -> tuple[dict[str, Schema], dict[str, Schema]]:
    required = {
        "life": part.TEXT_ID,
        "chunk_index": index,
        "request_id": part.TEXT_ID,
        "applied_event_ids": ids,
        "payload": described(part.TEXT_ID, "URL of the payload."),
        "content_type": part.TEXT_ID,
        "sha256": described(part.TEXT_ID, "Of the payload, hex."),
        "bytes": index,
        "queued_ms": index,
        "executed_ms": index,
        "committed_at_ms": index,
    }
    extra = {
        "frames": described(part.TEXT_ID, "URL of the pixel frames."),
        "accepted_to_applied_ms": described(index, "Absent or null where no event was applied."),
    }
    return required, extra


def chunk() -> Schema:
    """A committed chunk, typed: the result of `next_chunk`."""
    required, extra = _chunk(part.INDEX, part.EVENT_IDS)
    return record(required, {name: optional(value) for name, value in extra.items()})


def chunk_entry() -> Schema:
    """An entry of a session's `chunks` stream."""
    return record(*_chunk(part.DIGITS, json_text(part.EVENT_IDS)))


def worker_request() -> Schema:
    """An entry of a worker's `requests` stream; a tick carries its session id inside."""
    head: dict[str, Schema] = {
        "request_id": part.TEXT_ID,
        "life": part.TEXT_ID,
        "parent_request_id": part.TEXT_ID,
        "fence": part.DIGITS,
        "reply_to": described(part.TEXT_ID, "Key of the inbox that the reply goes to."),
        "model": part.TEXT_ID,
        "params": json_text(part.OPAQUE),
    }
    extra: dict[str, Schema] = {"seed": part.DIGITS, "expires_at_ms": part.DIGITS}
    others = [str(kind) for kind in Kind if kind is not Kind.TICK]
    return {
        "oneOf": [
            record({"kind": {"const": str(Kind.TICK)}, **head, "tick": json_text(tick())}, extra),
            record({"kind": {"enum": others}, **head, "session_id": part.SESSION_ID}, extra),
        ]
    }


def worker_reply() -> Schema:
    """A worker's answer to one request: the `reply` field of an inbox entry."""
    output = record(
        {
            "metadata": part.OBJECT,
            "payload": part.TEXT_ID,
            "content_type": part.TEXT_ID,
            "sha256": part.TEXT_ID,
            "bytes": part.INDEX,
        },
        {"frames": optional(part.TEXT_ID)},
    )
    return record(
        {
            "session_id": part.SESSION_ID,
            "request_id": part.TEXT_ID,
            "fence": part.INDEX,
            "life": part.TEXT_ID,
            "incarnation": part.TEXT_ID,
        },
        {"queued_ms": part.INDEX, "executed_ms": part.INDEX, "output": output, "error": error()},
    )


def notice() -> Schema:
    """News about a session's memory on a worker: the `notice` field of an inbox entry."""
    return record(
        {
            "kind": enum(NoticeKind),
            "session_id": part.SESSION_ID,
            "worker": part.TEXT_ID,
            "life": part.TEXT_ID,
            "incarnation": part.TEXT_ID,
        },
        {"message": {"type": "string"}},
    )


def lingbot_camera_actions() -> Schema:
    """Data of a control `lingbot.camera_actions.v1`: state or script in an event, frames in a tick."""
    letters = [*CAMERA_KEYS, *(key.upper() for key in CAMERA_KEYS)]
    keys: Schema = {"type": "array", "items": {"enum": letters}}
    transition = record({"actions": keys}, {"client_ts_ms": described(part.INDEX, "Never decreases.")})
    script: Schema = {"type": "array", "items": keys, "minItems": 1, "maxItems": MAX_SCRIPT_FRAMES}
    frames: Schema = {
        "type": "array",
        "items": keys,
        "minItems": FRAMES_PER_CHUNK,
        "maxItems": FRAMES_PER_CHUNK,
    }
    return {
        "oneOf": [
            record(
                {
                    "mode": {"const": STATE_MODE},
                    "transitions": {"type": "array", "items": transition, "minItems": 1},
                }
            ),
            record({"mode": {"const": SCRIPT_MODE}, "frames": script}),
            record({"mode": {"const": FRAMES_MODE}, "frames": frames}),
        ]
    }


def lingbot_camera_trajectory() -> Schema:
    """Data of a control `lingbot.camera_trajectory.v1`: as many intrinsics as poses."""
    four: Schema = {"type": "array", "items": {"type": "number"}, "minItems": 4, "maxItems": 4}
    pose: Schema = {"type": "array", "items": four, "minItems": 4, "maxItems": 4}
    return record(
        {
            "poses": {"type": "array", "items": pose, "minItems": POSES_PER_CHUNK},
            "intrinsics": {
                "type": "array",
                "items": described(four, "fx, fy, cx, cy"),
                "minItems": POSES_PER_CHUNK,
            },
        }
    )


def dreamzero_observation() -> Schema:
    """Data of a control `dreamzero.observation.v1`; names of views and parts of the state are the deployment's."""
    url: Schema = {"type": "string", "pattern": URL_PATTERN, "description": "A payload URL."}
    numbers: Schema = {"type": "array", "items": {"type": "number"}, "minItems": 1}
    names: Schema = {"pattern": r"\S", "maxLength": 80}

    def named(values: Schema) -> Schema:
        return {"type": "object", "propertyNames": names, "additionalProperties": values, "minProperties": 1}

    return record(
        {
            "images": described(named(url), "By view."),
            "state": described(named(numbers), "By part, for example joint_position."),
            "language": {"type": "string", "pattern": r"\S"},
        }
    )


MESSAGES: Final[tuple[Callable[[], Schema], ...]] = (
    control,
    event_entry,
    tick,
    command,
    answer,
    chunk,
    chunk_entry,
    worker_request,
    worker_reply,
    notice,
    lingbot_camera_actions,
    lingbot_camera_trajectory,
    dreamzero_observation,
)


def schemas() -> dict[str, Schema]:
    """Every schema by the name of its file, without `.json`."""
    return {make.__name__: _document(make) for make in MESSAGES}


def _document(make: Callable[[], Schema]) -> Schema:
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": make.__name__,
        "description": make.__doc__ or "",
    }
    return {**head, **make()}


def _text(schema: Mapping[str, Any]) -> str:
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def main(arguments: Sequence[str], folder: Path = FOLDER) -> int:
    """Writes or checks; the exit status."""
    files = {folder / f"{name}.json": _text(schema) for name, schema in schemas().items()}
    return write_or_check(files, arguments, COMMAND)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
