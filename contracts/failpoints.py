"""Named failpoints: places where a test makes a process die, raise, stop or hang. All are off unless armed.

WORLDLINE_FAILPOINTS="host.commit.after=exit@2,host.adopt.before=stop"

arms the second passage of one place and the first of another. Each fires once. What it costs while nothing is armed is
one call that looks at an empty table.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from contracts.errors import ConfigurationError

EXIT_STATUS: Final = 86
"""What a process ends with that an armed failpoint ended."""


class Action(StrEnum):
    """What happens at a failpoint."""

    EXIT = "exit"
    """The process ends at once: nothing is flushed, finished or handed over."""

    RAISE = "raise"
    """An exception that no code expects."""

    STOP = "stop"
    """The process stops as if paused, until it gets SIGCONT."""

    HANG = "hang"
    """The thread never comes back."""


@dataclass(frozen=True, slots=True)
class Point:
    """One failpoint: its name, the process that passes it, and when it does."""

    name: str
    process: str
    when: str


def _host(name: str, when: str) -> Point:
    return Point(f"host.{name}", "host", when)


def _worker(name: str, when: str) -> Point:
    return Point(f"worker.{name}", "worker", when)


POINTS: Final = (
    _host("adopt.before", "before a session is adopted, or read again after a doubt"),
    _host("adopt.after", "when it has been adopted"),
    _host("command.read", "a command was taken from the inbox"),
    _host("begin.before", "a tick is prepared, nothing of it is written"),
    _host("begin.after", "the tick is in flight and was sent"),
    _host("reply.read", "a reply or notice was taken from the inbox"),
    _host("reduce.before", "the reply equals the tick, the reducer has not committed"),
    _host("reduce.after", "the reducer has committed, in memory only"),
    _host("commit.before", "before the commit script"),
    _host("commit.after", "the chunk is committed, its command answered"),
    _host("fail.before", "before the script that makes a session FAILED"),
    _host("fail.after", "the session is FAILED, a release is in flight"),
    _host("reset.begin.before", "room is reserved for the new life, the reset is not in flight"),
    _host("reset.begin.after", "the reset is in flight and was sent"),
    _host("reset.finish.before", "the worker has reset, the new life has not begun"),
    _host("reset.finish.after", "the new life has begun"),
    _host("close.begin.before", "the session is in the tombstones, not yet CLOSING"),
    _host("close.begin.after", "the session is CLOSING, a release is in flight"),
    _host("close.finish.before", "the worker has released, the session is still CLOSING"),
    _host("close.finish.after", "the session is CLOSED"),
    _host("entry.before", "an outcome is durable, its inbox entry still there"),
    _host("entry.after", "the inbox entry was deleted"),
    _host("resend.before", "before what is in flight is sent again"),
    _host("resend.after", "it was sent again, under a higher fence"),
    _worker("request.read", "a request was read, nothing has been done about it"),
    _worker("run.before", "a tick is about to run"),
    _worker("run.after", "the chunk is made, nothing of it is stored"),
    _worker("payload.stored", "the chunk is stored, or goes out with the reply"),
    _worker("reply.before", "before the reply is added to the inbox"),
    _worker("reply.after", "the reply was added, the request is not acknowledged"),
    _worker("ack.before", "before the request is acknowledged and deleted"),
    _worker("ack.after", "the request was acknowledged, the next one is read"),
    _worker("reset.before", "before the engine resets a session"),
    _worker("reset.after", "the engine has reset it"),
    _worker("release.before", "before the engine releases a session"),
    _worker("release.after", "the engine has released it, its room is still reserved"),
)

_NAMES: Final = frozenset(point.name for point in POINTS)
_ITEM: Final = re.compile(r"([a-z.]+)=([a-z]+)(?:@([1-9][0-9]{0,8}))?")
_HANG_S: Final = 3600.0


class FailpointError(Exception):
    """Raised by an armed failpoint: a defect that nobody foresaw."""


@dataclass(slots=True)
class _Armed:
    action: Action
    left: int


_armed: dict[str, _Armed] = {}


def hit(name: str) -> None:
    """The process passes a failpoint. Does nothing unless it is armed."""
    if _armed:
        _pass(name)


def arm(text: str) -> None:
    """Arms what a setting says, and nothing else. Raises ConfigurationError."""
    armed = parse(text)
    _armed.clear()
    _armed.update({name: _Armed(action, nth) for name, (action, nth) in armed.items()})


def parse(text: str) -> Mapping[str, tuple[Action, int]]:
    """`name=action@n,...` as a mapping from name to action and number of the passage; ConfigurationError."""
    return dict(_parse_item(item) for item in text.replace(" ", "").split(",") if item)


def _parse_item(item: str) -> tuple[str, tuple[Action, int]]:
    match = _ITEM.fullmatch(item)
    if match is None or match[1] not in _NAMES or match[2] not in list(Action):
        actions = "|".join(Action)
        raise ConfigurationError(
            f"failpoint {item!r:.80} is not a known name, '=' and {actions}, with '@n' for the nth passage",
            field="failpoints",
        )
    return match[1], (Action(match[2]), int(match[3] or 1))


def _pass(name: str) -> None:
    armed = _armed.get(name)
    if armed is None:
        return
    armed.left -= 1
    if armed.left > 0:
        return
    del _armed[name]
    # Straight to the file: whoever watches the process must see it, whatever happens next.
    os.write(2, f"failpoint {name}: {armed.action}\n".encode())
    _ACTIONS[armed.action](name)


def _exit(_: str) -> None:
    os._exit(EXIT_STATUS)


def _raise(name: str) -> None:
    raise FailpointError(f"failpoint {name}")


def _stop(_: str) -> None:
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def _hang(_: str) -> None:
    while True:
        time.sleep(_HANG_S)


_ACTIONS: Final[Mapping[Action, Callable[[str], None]]] = {
    Action.EXIT: _exit,
    Action.RAISE: _raise,
    Action.STOP: _stop,
    Action.HANG: _hang,
}
