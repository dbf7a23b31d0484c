"""What the demo says: a line a chunk while it runs, and the sum of it at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.text import Text

from actors.demo.drive import DemoChunk, Options

_HEADER = f"{'chunk':>5}  {'keys':<6}  {'events':<8}  {'to applied':>10}  {'tick':>7}"


class Progress:
    """One line a chunk on stderr."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._started = False

    def say(self, text: str) -> None:
        """What happens besides chunks."""
        self._console.print(Text(text, style="dim"))

    def show(self, made: DemoChunk) -> None:
        """The line of one chunk."""
        if not self._started:
            self._started = True
            self._console.print(Text(_HEADER, style="bold"))
        waited = made.chunk.accepted_to_applied_ms
        line = Text(f"{made.chunk.chunk_index:>5}  ")
        line.append(f"{' '.join(made.keys).upper() or '-':<6}", style="bold cyan" if made.keys else "dim")
        line.append(f"  {','.join(map(str, made.chunk.applied_event_ids)) or '-':<8}")
        line.append(f"  {'-' if waited is None else f'{waited} ms':>10}  {made.tick_ms:>4} ms")
        if made.switched:
            line.append(f'  prompt: "{made.prompt}"', style="magenta")
        self._console.print(line, soft_wrap=True)


def summarize(made: Sequence[DemoChunk], seconds: float, files: Mapping[str, Path]) -> dict[str, Any]:
    """The demo in numbers."""
    waits = [item.chunk.accepted_to_applied_ms for item in made]
    return {
        "committed": len(made),
        "events_applied": sum(len(item.chunk.applied_event_ids) for item in made),
        "pixel_frames": sum(0 if item.frames is None else len(item.frames) for item in made),
        "accepted_to_applied_ms": _spread([wait for wait in waits if wait is not None]),
        "tick_ms": _spread([item.tick_ms for item in made]),
        "seconds": round(seconds, 1),
        "files": {name: str(path) for name, path in files.items()},
    }


def summary_lines(summary: Mapping[str, Any]) -> list[str]:
    """The same for a person."""
    lines = [
        f"events applied        {summary['events_applied']}",
        f"accepted to applied   {_spread_text(summary['accepted_to_applied_ms'])}",
        f"tick                  {_spread_text(summary['tick_ms'])}",
        f"pixel frames          {summary['pixel_frames']}",
        f"took                  {summary['seconds']} s, start and end of all processes included",
    ]
    return lines + [f"{name:<21} {path}" for name, path in summary["files"].items()]


def document(made: Sequence[DemoChunk], options: Options, summary: Mapping[str, Any]) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "model": options.model,
        "seed": options.seed,
        "lockstep": options.lockstep,
        "keys": options.keys,
        "chunks": [item.to_dict() for item in made],
        "summary": dict(summary),
    }


def _spread(values: Sequence[int]) -> dict[str, float] | None:
    return {"median": median(values), "max": max(values)} if values else None


def _spread_text(spread: Mapping[str, float] | None) -> str:
    return "-" if spread is None else f"{spread['median']:g} ms median, {spread['max']:g} ms at most"
