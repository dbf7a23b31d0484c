"""Values that a command line writes as text: `K=JSON` and `TRACK:SCHEMA:JSON`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from contracts.assignments import parse_assignments
from contracts.errors import InvalidArgumentError
from contracts.events import ARDiffusionControlInput, loads


def parse_params(texts: Sequence[str]) -> dict[str, Any]:
    """`["fov=60", 'sky="red"']` as a mapping; each name at most once."""
    return parse_assignments(texts, "param")


def parse_control(text: str) -> ARDiffusionControlInput:
    """`camera:lingbot.camera_actions.v1:{"mode": ...}` as a control."""
    parts = text.split(":", 2)
    if len(parts) != 3:
        raise InvalidArgumentError(f"--control is TRACK:SCHEMA:JSON, got {text!r:.80}", field="control")
    track, schema, data = parts
    return ARDiffusionControlInput(track, schema, loads(data, f"control {track}"))
