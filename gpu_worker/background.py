"""Tasks beside the main one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine


@contextlib.asynccontextmanager
async def background(*coroutines: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Tasks that run beside the body and end with it; what one of them raises is raised by the body's end."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
