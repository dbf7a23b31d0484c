"""Settings of the control plane. Environment variables are read here and in `contracts/config.py`, nowhere else here."""

from __future__ import annotations

import os
import re
import socket
from typing import Annotated, Final

from pydantic import Field, SecretStr, field_validator

from contracts.broker import redact
from contracts.config import Milliseconds, SharedSettings

_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9._-]+")
_ANSWER_MARGIN_S: Final = 5.0


def _default_host_id() -> str:
    name = _NOT_IN_NAMES.sub("-", socket.gethostname())[:48] or "host"
    return f"{name}-{os.getpid()}"


class HostSettings(SharedSettings):
    """What a session host needs beyond what all share.

    `host_id` differs from process to process by default. `partitions` counts only when the first host of a broker
    writes it down; all later ones use what is written.
    """

    host_id: str = Field(default_factory=_default_host_id)
    overcommit: bool = False
    partitions: Annotated[int, Field(gt=0, le=1024)] = 8
    jobs_url: SecretStr | None = None
    closed_retention_ms: Milliseconds = 3_600_000
    reconcile_ms: Milliseconds = 30_000

    @field_validator("host_id")
    @classmethod
    def _legal_name(cls, value: str) -> str:
        if _NAME.fullmatch(value) is None:
            raise ValueError("a host id has 1 to 64 letters, digits, '.', '_' or '-'")
        return value

    @property
    def jobs_broker_url(self) -> str:
        """Where the janitor's jobs are queued: `jobs_url`, or the broker itself; password included."""
        return self.url if self.jobs_url is None else self.jobs_url.get_secret_value()

    @property
    def shown_jobs_url(self) -> str:
        return redact(self.jobs_broker_url)


class ClientSettings(SharedSettings):
    """What a client needs; the limits that it shares with hosts and workers tell how long an answer may take."""

    @property
    def answer_timeout_s(self) -> float:
        """How long a client waits for an answer: a tick's whole allowance, and a margin."""
        return (self.queue_limit_ms + self.execution_limit_ms) / 1000 + _ANSWER_MARGIN_S

    @property
    def host_wait_s(self) -> float:
        """How long a client waits for a host before it sends anything: time enough for a takeover."""
        return 2 * self.lease_ms / 1000
