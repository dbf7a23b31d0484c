"""The walk of the demo: which event holds which keys, as its producer numbers them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from contracts.errors import ConfigurationError
from contracts.events import loads

PACE_MS: Final = 200
FIRST_PROMPT: Final = "a quiet valley at dawn"
SECOND_PROMPT: Final = "the same valley in snow"
SWITCH_AT_MS: Final = 1_250

EXAMPLE: Final = Path(__file__).resolve().parents[2] / "examples" / "first_session"


@dataclass(frozen=True, slots=True)
class Walk:
    """Events of the walk by id.

    Args:
        keys: the keys that an event holds, by event id.
        switch_id: id of the event that switches the prompt.
    """

    keys: Mapping[int, tuple[str, ...]]
    switch_id: int


class Scene:
    """What holds at a chunk: follows the events that were applied."""

    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        self.keys: tuple[str, ...] = ()
        self.prompt = FIRST_PROMPT

    def apply(self, event_ids: Iterable[int]) -> None:
        """Takes over what a chunk applied, in order."""
        for event_id in event_ids:
            if event_id == self._walk.switch_id:
                self.prompt = SECOND_PROMPT
            self.keys = self._walk.keys.get(event_id, self.keys)


def read_walk(folder: Path = EXAMPLE) -> Walk:
    """Reads `walk.jsonl` and numbers its events together with the prompt switch, by time."""
    path = folder / "walk.jsonl"
    if not path.exists():
        raise ConfigurationError(
            f"the demo needs the examples of the source tree, and {path} is not there", field="examples"
        )
    steps: list[tuple[int, tuple[str, ...] | None]] = [(SWITCH_AT_MS, None)]
    for line in path.read_text(encoding="utf-8").splitlines():
        step = loads(line, path.name)
        steps.append((step["t_ms"], tuple(step["actions"])))
    steps.sort(key=lambda step: step[0])
    keys = {number: held for number, (_, held) in enumerate(steps) if held is not None}
    switch_id = next(number for number, (_, held) in enumerate(steps) if held is None)
    return Walk(keys, switch_id)
