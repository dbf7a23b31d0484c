"""Settings that several processes share, read from the environment once at start-up.

`actors/config.py` and `gpu_worker/config.py` add what only one side needs. A `WORLDLINE_*` variable that no process
knows is an error, because a misspelt setting would otherwise silently be its default.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Final, Self, TypeVar

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from contracts import failpoints
from contracts.broker import BLOCK_MARGIN_S, redact
from contracts.errors import ConfigurationError
from contracts.keys import Keys

ENV_PREFIX: Final = "WORLDLINE_"
DEFAULT_REDIS_URL: Final = "redis://127.0.0.1:6379/0"

HOST_NAMES: Final = frozenset(
    {
        "HOST_ID",
        "OVERCOMMIT",
        "PARTITIONS",
        "CLOSED_RETENTION_MS",
        "CLOSE_RETRY_FIRST_MS",
        "CLOSE_RETRY_LONGEST_MS",
        "CLOSE_ATTEMPTS_LIMIT",
        "JANITOR_ID",
        "JOBS_URL",
        "RECONCILE_MS",
    }
)
"""Variables that only `actors/config.py` reads, without their prefix."""

WORKER_NAMES: Final = frozenset(
    {
        "WORKER_ID",
        "MODEL",
        "DEVICE",
        "DTYPE",
        "DEVICE_MEMORY",
        "GPU_MEMORY_FRACTION",
        "SESSION_CAPACITY",
        "PAYLOAD_URL",
        "RECONCILE_MS",
        "ATTENTION_BACKEND",
        "STEP_EXECUTION",
        "WATCHDOG",
        "CHECKPOINT",
        "AR_DIFFUSION_HEIGHT",
        "AR_DIFFUSION_WIDTH",
        "LINGBOT_ACTION_ROOT",
        "ULYSSES_DEGREE",
        "PARALLEL_CONFIG",
        "OMNI_SETUP",
        "MODEL_PARAMS",
        "KV_CONFIG",
    }
)
"""Variables that only `gpu_worker/config.py` reads, without their prefix."""

Milliseconds = Annotated[int, Field(gt=0)]


class SharedSettings(BaseSettings):
    """What host, worker, client and janitor must agree on; all times in milliseconds.

    `REDIS_URL` has no prefix, everything else is `WORLDLINE_<NAME>`. `failpoints` is for tests alone: host and worker
    die, raise, stop or hang at the places that it names; see `contracts/failpoints.py`.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, extra="forbid", frozen=True, populate_by_name=True
    )

    redis_url: SecretStr = Field(default=SecretStr(DEFAULT_REDIS_URL), validation_alias="REDIS_URL")
    prefix: str = "wl"
    lease_ms: Milliseconds = 5_000
    heartbeat_ms: Milliseconds = 1_000
    worker_lost_after_ms: Milliseconds = 15_000
    execution_limit_ms: Milliseconds = 30_000
    queue_limit_ms: Milliseconds = 60_000
    payload_ttl_ms: Milliseconds = 600_000
    block_ms: Milliseconds = 5_000
    log_level: str = "info"
    log_format: str = Field(default="console", pattern="^(console|json)$")
    failpoints: str = ""

    @field_validator("failpoints")
    @classmethod
    def _known_failpoints(cls, value: str) -> str:
        try:
            failpoints.parse(value)
        except ConfigurationError as error:
            raise ValueError(error.message) from None
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.worker_lost_after_ms <= self.heartbeat_ms:
            raise ValueError("worker_lost_after_ms must be longer than heartbeat_ms")
        Keys(self.prefix)
        return self

    @property
    def url(self) -> str:
        """The broker's URL, password included: for connecting, never for printing."""
        return self.redis_url.get_secret_value()

    @property
    def shown_url(self) -> str:
        """The broker's URL with its password hidden."""
        return redact(self.url)

    @property
    def keys(self) -> Keys:
        return Keys(self.prefix)

    @property
    def blocking_timeout_s(self) -> float:
        return self.block_ms / 1000 + BLOCK_MARGIN_S


S = TypeVar("S", bound=SharedSettings)


def load_settings(cls: type[S], **overrides: object) -> S:
    """Reads settings from the environment; `overrides` (a command line's options) win, None means unset.

    Raises ConfigurationError naming the setting, also for an unknown `WORLDLINE_*` variable.
    """
    _reject_unknown(cls)
    try:
        values: dict[str, Any] = {name: value for name, value in overrides.items() if value is not None}
        return cls(**values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = ".".join(map(str, first["loc"])) or "settings"
        raise ConfigurationError(f"{_variable(name)}: {first['msg']}", field=name) from None


def _variable(name: str) -> str:
    """The variable that a setting is read from: what somebody who gets it wrong has to look for."""
    known = name == "settings" or name.isupper()
    return name if known else ENV_PREFIX + name.upper()


def _reject_unknown(cls: type[SharedSettings]) -> None:
    known = HOST_NAMES | WORKER_NAMES | {name.upper() for name in cls.model_fields}
    for variable in sorted(os.environ):
        if variable.startswith(ENV_PREFIX) and variable.removeprefix(ENV_PREFIX) not in known:
            raise ConfigurationError(f"unknown setting {variable}", field=variable)
