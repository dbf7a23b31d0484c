"""Files that are made from the code: written, or compared with what is there."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def write_or_check(files: Mapping[Path, str], arguments: Sequence[str], command: str) -> int:
    """Writes `files`, or with `--check` says which are out of date; the exit status."""
    if arguments not in ([], ["--check"]):
        sys.stderr.write(f"usage: {command} [--check]\n")
        return 2
    stale = [
        path for path, text in files.items() if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path in stale:
        if arguments:
            sys.stderr.write(f"{path} is out of date: run {command}\n")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[path], encoding="utf-8")
            sys.stdout.write(f"wrote {path}\n")
    return 1 if stale and arguments else 0
