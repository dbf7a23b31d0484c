"""The event loop that a service runs on: uvloop where it is installed, which makes a tick about a tenth cheaper."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, on the fastest loop there is (`pip install 'worldline[fast]'`)."""
    try:
        uvloop: Any = importlib.import_module("uvloop")
    except ImportError:
        return asyncio.run(main)
    result: T = uvloop.run(main)
    return result


def name() -> str:
    """Which loop `run` takes, for reports."""
    return "uvloop" if importlib.util.find_spec("uvloop") else "asyncio"
