"""What lies in the repository: files, settings, commands."""

import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("contracts", "actors", "gpu_worker")


@cache
def files() -> tuple[Path, ...]:
    """Every file that git knows or would take in; without git, every file outside hidden and generated folders."""
    if (REPOSITORY / ".git").exists():
        listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = (
            subprocess.run(listing, cwd=REPOSITORY, capture_output=True, check=True)
            .stdout.decode()
            .split("\0")
        )
        paths = [REPOSITORY / name for name in names if name]
    else:
        found = (path.relative_to(REPOSITORY) for path in REPOSITORY.rglob("*"))
        paths = [
            REPOSITORY / path for path in found if path.parts[0] not in {".venv", ".worldline", "demo-out"}
        ]
    return tuple(sorted(path for path in paths if path.is_file()))


def sources(suffix: str, *folders: str) -> list[Path]:
    """The files with this suffix below one of the folders (default: the three packages)."""
    roots = [REPOSITORY / folder for folder in folders or PACKAGES]
    return [path for path in files() if path.suffix == suffix and any(root in path.parents for root in roots)]


def name_of(path: Path) -> str:
    """A path as it is shown: relative to the repository."""
    return path.relative_to(REPOSITORY).as_posix()


@cache
def pyproject() -> dict[str, Any]:
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
