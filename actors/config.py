"""Settings of the control plane. Environment variables are read here and in `contracts/config.py`, nowhere else here."""

from __future__ import annotations

import os
import re
import socket
from typing import Annotated, Final, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from contracts.broker import check_url, redact
from contracts.config import Milliseconds, SharedSettings

_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9._-]+")
_ANSWER_MARGIN_S: Final = 5.0


def _checked_name(value: str, what: str) -> str:
    if _NAME.fullmatch(value) is None:
        raise ValueError(f"{what} has 1 to 64 letters, digits, '.', '_' or '-'")
    return value


def _name_of_this_process() -> str:
    name = _NOT_IN_NAMES.sub("-", socket.gethostname())[:48] or "localhost"
    return f"{name}-{os.getpid()}"


class HostSettings(SharedSettings):
    """What a session host needs beyond what all share.

    `host_id` differs from process to process by default. `partitions` counts only when the first host of a broker
    writes it down; all later ones use what is written. `close_retry_first_ms` and `close_retry_longest_ms` bound the
    time after which a close that failed is due again.
    """

    host_id: str = Field(default_factory=_name_of_this_process)
    overcommit: bool = False
    partitions: Annotated[int, Field(gt=0, le=1024)] = 8
    closed_retention_ms: Milliseconds = 3_600_000
    close_retry_first_ms: Milliseconds = 1_000
    close_retry_longest_ms: Milliseconds = 600_000

    @field_validator("host_id")
    @classmethod
    def _legal_name(cls, value: str) -> str:
        return _checked_name(value, "a host id")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.close_retry_longest_ms < self.close_retry_first_ms:
            raise ValueError("close_retry_longest_ms must not be shorter than close_retry_first_ms")
        return self


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


class JanitorSettings(ClientSettings):
    """What a janitor needs beyond what clients need; `closed_retention_ms` as the hosts have it.

    `reconcile_ms` is the period in which it compares what ought to be with what is. A close that has failed
    `close_attempts_limit` times is not retried any more: it stays a tombstone that people see.
    """

    janitor_id: str = Field(default_factory=_name_of_this_process)
    jobs_url: SecretStr | None = None
    reconcile_ms: Milliseconds = 30_000
    closed_retention_ms: Milliseconds = 3_600_000
    close_attempts_limit: Annotated[int, Field(gt=0)] = 50

    @field_validator("janitor_id")
    @classmethod
    def _legal_name(cls, value: str) -> str:
        return _checked_name(value, "a janitor id")

    @field_validator("jobs_url")
    @classmethod
    def _legal_url(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            check_url(value.get_secret_value(), "WORLDLINE_JOBS_URL")
        return value

    @property
    def jobs_broker_url(self) -> str:
        """Where the janitor's jobs are queued: `jobs_url`, or the broker itself; password included."""
        return self.url if self.jobs_url is None else self.jobs_url.get_secret_value()

    @property
    def shown_jobs_url(self) -> str:
        return redact(self.jobs_broker_url)
