"""Services run on uvloop where it is installed, and as well without it."""

import asyncio
import sys
from types import ModuleType

import pytest

from contracts import event_loop


async def answer() -> int:
    await asyncio.sleep(0)
    return 42


def test_without_uvloop_it_is_the_loop_of_the_standard_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)

    assert event_loop.run(answer()) == 42


def test_with_uvloop_it_is_that(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("uvloop")
    module.run = lambda main: (asyncio.run(main), "uvloop")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "uvloop", module)

    assert event_loop.run(answer()) == (42, "uvloop")


def test_its_name_is_one_of_two() -> None:
    assert event_loop.name() in {"asyncio", "uvloop"}
