"""One finding of the doctor, and how findings are weighed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """How bad a finding is; only `FAIL` breaks a promise."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    Args:
        name: what was looked at.
        level: how it stands.
        message: one line for a person.
        values: what was measured, for a program.
    """

    name: str
    level: Level
    message: str
    values: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The form that `--json` prints."""
        return {"name": self.name, "level": self.level, "message": self.message, "values": dict(self.values)}
