"""The producer's process: `examples/first_session/producer.py`, which needs redis-py and nothing of ours."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from types import TracebackType
from typing import Final, Self

from actors.demo.walk import EXAMPLE, PACE_MS, SECOND_PROMPT, SWITCH_AT_MS
from contracts.errors import WorldlineError

_START_S: Final = 30.0
_END_S: Final = 10.0


class ProducerError(WorldlineError, RuntimeError):
    """Raised when the demo's producer ended in an error; the message is its last line."""

    code = "producer_failed"


class Producer:
    """The process, from its start to its end."""

    def __init__(self, session_id: str, url: str, *, prefix: str, lockstep: bool, keys: bool) -> None:
        self._arguments = [
            *("--session", session_id, "--url", url, "--prefix", prefix),
            *("--prompt", SECOND_PROMPT, "--prompt-at-ms", str(SWITCH_AT_MS), "--pace-ms", str(PACE_MS)),
            *(["--lockstep"] if lockstep else []),
            *([] if keys else ["--no-keys"]),
        ]
        self._lockstep = lockstep
        self._process: Process | None = None

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(EXAMPLE / "producer.py"),
            *self._arguments,
            stdin=PIPE if self._lockstep else DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
        )
        try:
            await self._line("ready")
        except BaseException:
            await self._end(0)
            raise
        return self

    async def push(self, chunk_index: int) -> None:
        """In lockstep: has the events of one chunk added."""
        stdin = self._running.stdin
        assert stdin is not None
        stdin.write(f"{chunk_index}\n".encode())
        await stdin.drain()
        await self._line(str(chunk_index))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Lets it come to its end, which it is near by then, or ends it."""
        said = await self._end(_END_S if kind is None else 0)
        if kind is None and self._running.returncode:
            raise _failure(said)

    async def _end(self, patience_s: float) -> bytes:
        """Waits for the end of the process and of its pipes, or kills it; what stood on its standard error.

        Nothing of it may outlive the event loop, which would complain.
        """
        process = self._running
        if process.stdin is not None:
            process.stdin.close()
        ending = asyncio.ensure_future(process.communicate())
        try:
            await asyncio.wait({ending}, timeout=patience_s)
        finally:
            if process.returncode is None:
                process.kill()
            _, said = await asyncio.shield(ending)
        return said

    @property
    def _running(self) -> Process:
        assert self._process is not None
        return self._process

    async def _line(self, expected: str) -> None:
        stdout = self._running.stdout
        assert stdout is not None
        try:
            async with asyncio.timeout(_START_S):
                line = await stdout.readline()
        except TimeoutError:
            raise ProducerError(f"the producer did not say {expected!r} in time") from None
        if line.decode().strip() != expected:
            assert self._running.stderr is not None
            raise _failure(await self._running.stderr.read())


def _failure(said: bytes) -> ProducerError:
    lines = said.decode(errors="replace").strip().splitlines()
    return ProducerError(f"the producer failed: {lines[-1] if lines else 'it said nothing'}")
