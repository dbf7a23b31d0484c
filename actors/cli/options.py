"""Options and arguments that several commands take, and what every command of a session does first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Annotated, Any, Final, TypeVar

import typer

from actors.broker_pool import Broker
from actors.client import SessionClient
from contracts.identity import check_session_id

HOST_WAIT_S: Final = 2.0
"""How long a command waits for a session host: a person would rather hear that there is none."""

T = TypeVar("T")

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
SessionArgument = Annotated[str, typer.Argument(metavar="ID", help="The session's id.", show_default=False)]
TimeoutOption = Annotated[
    float | None,
    typer.Option(
        "--timeout", metavar="S", min=0.0, help="Seconds to wait for the answer.", show_default=False
    ),
]


@asynccontextmanager
async def open_session(session_id: str, timeout_s: float | None = None) -> AsyncIterator[SessionClient]:
    """The client behind a command; a broker that can't be reached is found out first."""
    check_session_id(session_id)
    async with (
        Broker(host_wait_s=HOST_WAIT_S) as broker,
        SessionClient(session_id, broker, timeout_s=timeout_s) as session,
    ):
        yield session


def with_session(
    session_id: str, timeout_s: float | None, work: Callable[[SessionClient], Coroutine[Any, Any, T]]
) -> T:
    """Runs `work` on a session, from a command."""

    async def run() -> T:
        async with open_session(session_id, timeout_s) as session:
            return await work(session)

    return asyncio.run(run())
