"""One command and its answer, over a connection that may break at any moment.

    XADD inbox command, XREAD BLOCK answers cursor     in one go; then more reads, until our command id comes

The cursor is where this process last saw the session's answers end. A command that is sent twice acts once, so after a
broken connection the same command id simply goes out again, unless its answer is remembered already. A call that is
cancelled leaves nothing behind that another call could trip over: its connection is dropped with it, and its answer is
skipped by everybody else.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from typing import Any, Final

from actors.broker_pool import Broker, NoHostError
from actors.streams import PAGE, CancelGuard, Entry, newest_id, read_after
from contracts.broker import BrokerFullError, map_exceptions
from contracts.commands import Answer, Command, Op
from contracts.errors import BrokerError, SessionError
from contracts.identity import partition_of
from contracts.worker_scripts import WorkerScripts

RECONNECT_S: Final = 30.0
"""How long a call or a watch keeps trying to reach a broker that went away."""

_ENDS: Final = frozenset({Op.CLOSE, Op.DISCONNECT})

_SLICE_MS: Final = 1_000
"""How long one read blocks: a call looks up by itself that often."""


class AnswerTimeoutError(SessionError, TimeoutError):
    """Raised when no answer came in time; the command may still run. Asking again with `command_id` is safe."""

    code = "no_answer"
    retryable = True

    def __init__(self, message: str, *, command_id: str) -> None:
        super().__init__(message, field="command_id")
        self.command_id = command_id


def backoff_s() -> Iterator[float]:
    """Pauses between attempts to reconnect: 0.05 s doubling to 1 s, each off by up to a quarter."""
    pause = 0.05
    while True:
        yield pause * random.uniform(0.75, 1.25)
        pause = min(1.0, pause * 2)


class Reconnection:
    """Bears with a broker that went away, up to RECONNECT_S in a row."""

    def __init__(self, deadline: float | None = None) -> None:
        self._deadline = deadline
        self.succeeded()

    def succeeded(self) -> None:
        """Something came back: the next failure is a new one."""
        self._since: float | None = None
        self._pauses = backoff_s()

    async def failed(self, error: BrokerError) -> None:
        """Waits before the next attempt, or raises `error` when it has been tried for long enough."""
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        pause = next(self._pauses)
        if isinstance(error, BrokerFullError) or now + pause - self._since > RECONNECT_S:
            raise error
        if self._deadline is not None and now + pause > self._deadline:
            raise error
        await asyncio.sleep(pause)


async def call(broker: Broker, command: Command, timeout_s: float) -> dict[str, Any]:
    """Sends a command and returns its result, or raises the error that it was answered with."""
    deadline = time.monotonic() + timeout_s
    inbox = await _find_inbox(broker, command.session_id, deadline)
    answer = await _Call(broker, command, inbox, deadline).run()
    return answer.unwrap()


async def _find_inbox(broker: Broker, session_id: str, deadline: float) -> str:
    """The inbox, borne with a broker that was there before; one that never was is said at once."""
    reconnection = Reconnection(deadline)
    while True:
        try:
            return await broker.inbox(session_id)
        except BrokerError as error:
            if not broker.was_reached:
                raise
            await reconnection.failed(error)


class _Call:
    def __init__(self, broker: Broker, command: Command, inbox: str, deadline: float) -> None:
        self._broker = broker
        self._command = command
        self._inbox = inbox
        self._deadline = deadline
        self._keys = broker.keys.session(command.session_id)
        self._needle = command.command_id.encode()
        self._cursor = broker.answers_seen.get(command.session_id)
        self._sent_before = False

    async def run(self) -> Answer:
        reconnection = Reconnection(self._deadline)
        guard = CancelGuard()
        answer = None
        sent = False
        while answer is None:
            try:
                answer = await (self._read() if sent else self._send())
                sent = True
                guard.check()
                reconnection.succeeded()
            except BrokerError as error:
                await reconnection.failed(error)
                sent = False
            if answer is None and time.monotonic() >= self._deadline:
                await self._give_up()
        return answer

    async def _send(self) -> Answer | None:
        """Puts the command into the inbox and reads on; a second time only if it has not been answered meanwhile."""
        if self._sent_before and (answer := await self._remembered()) is not None:
            return answer
        if self._cursor is None:
            self._cursor = await newest_id(self._broker.commands, self._keys.answers)
        self._sent_before = True
        if self._command.op in _ENDS:  # a broker that is out of memory must still let sessions end
            scripts = WorkerScripts(self._broker.commands, self._broker.keys)
            await scripts.add_to_inbox(self._inbox, "command", self._command.to_json())
            return None
        batch = self._broker.blocking.pipeline(transaction=False)
        batch.xadd(self._inbox, {"command": self._command.to_json()})
        batch.xread({self._keys.answers: self._cursor}, count=PAGE, block=self._block_ms())
        with map_exceptions(self._inbox):
            _, reply = await batch.execute()
        return self._find(reply[0][1] if reply else [])

    async def _read(self) -> Answer | None:
        """The answer, if it comes before the read ends."""
        assert self._cursor is not None
        key, block_ms = self._keys.answers, self._block_ms()
        entries = await read_after(self._broker.blocking, key, self._cursor, block_ms=block_ms)
        if not entries:  # it may have been trimmed before we came to it
            return await self._remembered()
        return self._find(entries)

    def _block_ms(self) -> int:
        left_ms = int((self._deadline - time.monotonic()) * 1000)
        return max(1, min(left_ms, self._broker.settings.block_ms, _SLICE_MS))

    def _find(self, entries: list[Entry]) -> Answer | None:
        """Our answer among those read."""
        if entries:
            self._cursor = entries[-1][0]
            self._broker.answers_seen.put(self._command.session_id, self._cursor)
        for _, fields in entries:
            text = fields.get(b"answer", b"")
            if self._needle in text:
                answer = Answer.from_json(text)
                if answer.command_id == self._command.command_id:
                    return answer
        return None

    async def _remembered(self) -> Answer | None:
        with map_exceptions(self._keys.answered):
            text: Any = await self._broker.commands.hget(self._keys.answered, self._command.command_id)
        return None if text is None else Answer.from_json(text)

    async def _give_up(self) -> None:
        """Says why no answer came: nobody owns the session, or its owner took too long."""
        op, session_id = self._command.op, self._command.session_id
        count = await self._broker.partitions()
        if count is None or await self._broker.lease_left_ms(partition_of(session_id, count)) <= 0:
            raise NoHostError(
                f"no session host is running; {op} of session {session_id} waits for one", field="host"
            )
        raise AnswerTimeoutError(
            f"{op} of session {session_id} was not answered in time; it may still be carried out",
            command_id=self._command.command_id,
        )
