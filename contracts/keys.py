"""Every key in the broker. This is the only place where one is spelled.

The part in braces is the cluster hash tag: all keys of one session, one partition or one worker share a slot, so each
script touches one slot. Types, writers and readers of each key are listed in docs/redis.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from contracts.errors import ConfigurationError
from contracts.identity import partition_of
from contracts.lifecycle import Status

DEFAULT_PREFIX: Final = "wl"
WORKER_GROUP: Final = "worker"
SCHEMA_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class SessionKeys:
    """Keys of one session; all carry the hash tag `{session_id}`.

    state hash, events/rejected/answers/chunks/ticks/history streams, ids zset, answered hash, presence string.
    """

    base: str

    @property
    def state(self) -> str:
        return f"{self.base}:state"

    @property
    def events(self) -> str:
        return f"{self.base}:events"

    @property
    def ids(self) -> str:
        return f"{self.base}:ids"

    @property
    def rejected(self) -> str:
        return f"{self.base}:rejected"

    @property
    def answers(self) -> str:
        return f"{self.base}:answers"

    @property
    def answered(self) -> str:
        return f"{self.base}:answered"

    @property
    def chunks(self) -> str:
        return f"{self.base}:chunks"

    @property
    def ticks(self) -> str:
        return f"{self.base}:ticks"

    @property
    def history(self) -> str:
        return f"{self.base}:history"

    @property
    def presence(self) -> str:
        return f"{self.base}:presence"

    def payload(self, life: str, chunk_index: int) -> str:
        return f"{self.base}:payload:{life}:{chunk_index}"

    def frames(self, life: str, chunk_index: int) -> str:
        return f"{self.payload(life, chunk_index)}:frames"


@dataclass(frozen=True, slots=True)
class PartitionKeys:
    """Keys of one partition; all carry the hash tag `{p<k>}`."""

    base: str

    @property
    def inbox(self) -> str:
        return f"{self.base}:inbox"

    @property
    def attempts(self) -> str:
        return f"{self.base}:attempts"

    @property
    def lease(self) -> str:
        return f"{self.base}:lease"

    @property
    def live(self) -> str:
        return f"{self.base}:live"


@dataclass(frozen=True, slots=True)
class WorkerKeys:
    """Keys of one worker; all carry the hash tag `{w:<id>}`."""

    base: str

    @property
    def requests(self) -> str:
        return f"{self.base}:requests"

    @property
    def sessions(self) -> str:
        return f"{self.base}:sessions"

    @property
    def info(self) -> str:
        return f"{self.base}:info"


@dataclass(frozen=True, slots=True)
class Keys:
    """The key builder.

    Args:
        prefix: the namespace in front of every key; letters, digits, `_`, `-`, `.` only.
    """

    prefix: str = DEFAULT_PREFIX

    def __post_init__(self) -> None:
        if not self.prefix or not all(c.isascii() and (c.isalnum() or c in "_-.") for c in self.prefix):
            raise ConfigurationError(
                f"prefix {self.prefix!r} may hold letters, digits, _, -, . only", field="prefix"
            )

    def session(self, session_id: str) -> SessionKeys:
        return SessionKeys(f"{self.prefix}:{{{session_id}}}")

    def partition(self, index: int) -> PartitionKeys:
        return PartitionKeys(f"{self.prefix}:{{p{index}}}")

    def inbox_of(self, session_id: str, partitions: int) -> str:
        return self.partition(partition_of(session_id, partitions)).inbox

    def worker(self, worker_id: str) -> WorkerKeys:
        return WorkerKeys(f"{self.prefix}:{{w:{worker_id}}}")

    def index(self, status: Status) -> str:
        return f"{self.prefix}:sessions:{status}"

    @property
    def tombstones(self) -> str:
        return f"{self.prefix}:tombstones"

    @property
    def workers(self) -> str:
        return f"{self.prefix}:workers"

    @property
    def hosts(self) -> str:
        return f"{self.prefix}:hosts"

    @property
    def janitors(self) -> str:
        return f"{self.prefix}:janitors"

    @property
    def jobs_queue(self) -> str:
        """Name of the janitor's job queue on the broker for jobs; what is behind it is the job library's own."""
        return f"{self.prefix}-jobs"

    @property
    def config(self) -> str:
        return f"{self.prefix}:config"


SESSION_KEY_TYPES: Final[Mapping[str, str]] = {
    "state": "hash",
    "events": "stream",
    "ids": "zset",
    "rejected": "stream",
    "answers": "stream",
    "answered": "hash",
    "chunks": "stream",
    "ticks": "stream",
    "history": "stream",
    "presence": "string",
}
"""Type of each key of a session by its last part, for checks of live data."""
