"""What the documentation points at exists: files, headings, make targets, commands."""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from support.tree import REPOSITORY, files, name_of, pyproject

PAGES = [path for path in files() if path.suffix == ".md" and "tests" not in path.parts]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = [link for link in _links(page) if not _leads_somewhere(page, link)]

    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_make_target_that_is_named_exists(page: Path) -> None:
    named = set(re.findall(r"(?:`|^\$ )make ([a-z][a-z-]*)", page.read_text(encoding="utf-8"), re.MULTILINE))

    assert named - _make_targets() == set()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_that_is_shown_exists(page: Path) -> None:
    shown = set(re.findall(r"(?:`|^\$ )worldline ([a-z]+)", page.read_text(encoding="utf-8"), re.MULTILINE))

    assert {command for command in shown if not _is_command(command)} == set()


def _links(page: Path) -> list[str]:
    """The targets of links, pictures included, outside code; addresses on the web are left alone."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def _leads_somewhere(page: Path, link: str) -> bool:
    path, _, heading = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if target != REPOSITORY and REPOSITORY not in target.parents:
        return False
    return target.exists() and (not heading or target.suffix != ".md" or heading in _anchors(target))


@cache
def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as code hosts make them."""
    headings = re.findall(r"^#+ +(.+?) *$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache
def _make_targets() -> set[str]:
    return set(
        re.findall(r"^([a-z][a-z-]*):", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    )


@cache
def _is_command(command: str) -> bool:
    assert "worldline" in pyproject()["project"]["scripts"]
    program = Path(sys.executable).parent / "worldline"
    return subprocess.run([program, command, "--help"], capture_output=True, timeout=60).returncode == 0
