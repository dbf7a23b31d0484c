"""Settings of the GPU worker. Environment variables are read here and in `contracts/config.py`, nowhere else here."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_settings import NoDecode

from contracts.config import Milliseconds, SharedSettings
from contracts.errors import ConfigurationError
from contracts.events import loads
from contracts.kv_spec import ARDiffusionKVOverrides
from contracts.memory_size import parse_memory
from contracts.payloads import check_payload_base
from gpu_worker.parallel.launch import Launch
from gpu_worker.parallel.modes import ParallelConfig

SCRATCH_VARIABLE: Final = "AR_DIFFUSION_KV_SCRATCH_BLOCKS_PER_BRANCH"
"""The published name of the one setting without our prefix."""

_WORKER_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DEVICE: Final = re.compile(r"auto|cpu|cuda(:[0-9]{1,3})?")
_DTYPES: Final = ("float32", "float16", "bfloat16")

Positive = Annotated[int, Field(gt=0)]


def _bytes(value: object) -> object:
    """Text such as "141GB" as a number of bytes."""
    return parse_memory(value, "device_memory") if isinstance(value, str) else value


def _json(value: object) -> object:
    """Text of the environment as the JSON that it is."""
    return loads(value, "value") if isinstance(value, str) else value


JsonObject = Annotated[dict[str, Any], NoDecode, BeforeValidator(_json)]


def launch() -> Launch:
    """Which of a worker's processes this is, from what torchrun says; the only one where nobody says anything.

    Raises ConfigurationError where they are spread over several machines.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    try:
        rank, degree, local_rank, local, attempt = (
            int(os.environ.get(name, default)) for name, default in zip(names, (0, 1, 0, 1, 0), strict=True)
        )
    except ValueError as error:
        raise ConfigurationError(f"{', '.join(names)} must be numbers: {error}", field="RANK") from None
    if (rank, degree) != (local_rank, local):
        raise ConfigurationError(
            f"the processes of a worker run on one machine, here are {local} of {degree}", field="WORLD_SIZE"
        )
    return Launch(rank, degree, attempt)


class WorkerSettings(SharedSettings):
    """What a GPU worker needs beyond what all share.

    Args:
        worker_id: its name, and that of its request stream; one live process a name.
        model: entry point name of the pipeline.
        device: `cpu`, `cuda`, `cuda:N`, or `auto`: a GPU where there is one.
        dtype: element type of weights and KV; None leaves it to the model.
        device_memory: bytes to plan with; None asks the device. "141GB" and "80GiB" are understood.
        gpu_memory_fraction: share of it for sessions, in (0, 1]; None leaves it to the model.
        session_capacity: resident sessions wanted; None leaves it to the model.
        payload_url: where chunks are stored: `redis:`, or an fsspec URL.
        reconcile_ms: how often residents and reservations are compared with the sessions' state.
        scratch_blocks_per_branch: lower bound of scratch pages; None for the derived number.
        attention_backend: how layers attend to their pages: `sdpa`, `flex` or `flash_attn`.
        step_execution: run ticks through the model's step functions, one denoise step after the other.
        omni_setup: for `--engine vllm-omni`: `module:function`, called as `function(engine, settings)`, that says how
            ticks are put to the engine.
        watchdog: a process beside the worker ends it when a request takes longer than `execution_limit_ms`; False
            where something else sees to that. There is no other way to be without the limit than a large one.
        checkpoint: the local directory of a model that has one.
        ar_diffusion_height, ar_diffusion_width: size of every session's pictures, in pixels, of a model that has a
            choice; None leaves it to the model.
        ulysses_degree: devices that share every sequence, a process each; None for as many as torchrun has started.
        parallel_config: what else is said about parallelism, as JSON; all but pure Ulysses is refused.
        lingbot_action_root: the folder beneath which requests may name trajectory directories and images; None allows
            none.
        model_params: settings of the model that have no name here, as JSON; what `worldline plan --param` tries.
        kv_config: what the deployment changes of the model's KV policy, as JSON: `window_frames`, `sink_frames`,
            `reset_at_boundary` and the other names of `ARDiffusionKVOverrides`.
    """

    worker_id: str = "gpu-0"
    model: Annotated[str, Field(min_length=1)] = "reference"
    device: str = "auto"
    dtype: str | None = None
    device_memory: Annotated[Positive | None, BeforeValidator(_bytes)] = None
    gpu_memory_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    session_capacity: Positive | None = None
    payload_url: str = "redis:"
    reconcile_ms: Milliseconds = 30_000
    scratch_blocks_per_branch: Annotated[int, Field(ge=0)] | None = Field(
        default=None, validation_alias=SCRATCH_VARIABLE
    )
    attention_backend: Literal["sdpa", "flex", "flash_attn"] = "sdpa"
    step_execution: bool = False
    omni_setup: str | None = None
    watchdog: bool = True
    checkpoint: Annotated[str, Field(min_length=1)] | None = None
    ar_diffusion_height: Positive | None = None
    ar_diffusion_width: Positive | None = None
    ulysses_degree: Positive | None = None
    parallel_config: JsonObject = Field(default_factory=dict)
    lingbot_action_root: Annotated[str, Field(min_length=1)] | None = None
    model_params: JsonObject = Field(default_factory=dict)
    kv_config: JsonObject = Field(default_factory=dict)

    @field_validator("worker_id")
    @classmethod
    def _legal_id(cls, value: str) -> str:
        if _WORKER_ID.fullmatch(value) is None:
            raise ValueError("a worker id has 1 to 64 letters, digits, '.', '_' or '-'")
        return value

    @field_validator("device")
    @classmethod
    def _known_device(cls, value: str) -> str:
        if _DEVICE.fullmatch(value) is None:
            raise ValueError("device is auto, cpu, cuda or cuda:N")
        return value

    @field_validator("dtype")
    @classmethod
    def _known_dtype(cls, value: str | None) -> str | None:
        if value is not None and value not in _DTYPES:
            raise ValueError(f"dtype is one of {', '.join(_DTYPES)}")
        return value

    @field_validator("payload_url")
    @classmethod
    def _known_store(cls, value: str) -> str:
        try:
            return check_payload_base(value)
        except ConfigurationError as error:
            raise ValueError(error.message) from None

    @field_validator("kv_config")
    @classmethod
    def _known_kv_config(cls, value: dict[str, Any]) -> dict[str, Any]:
        ARDiffusionKVOverrides.from_mapping(value)
        return value

    @model_validator(mode="after")
    def _said_once(self) -> Self:
        twice = self._named_settings.keys() & self.model_params.keys()
        if twice:
            raise ValueError(f"{min(twice)} is set, and again in model_params")
        if self.gpu_memory_fraction is not None and "gpu_memory_fraction" in self.kv_config:
            raise ValueError("gpu_memory_fraction is set, and again in kv_config")
        return self

    @property
    def parallel(self) -> ParallelConfig:
        """How many share a sequence; UnsupportedParallelismError for any other kind of parallelism."""
        degree = {} if self.ulysses_degree is None else {"ulysses_degree": self.ulysses_degree}
        return ParallelConfig.from_mapping({**self.parallel_config, **degree})

    @property
    def pipeline_config(self) -> dict[str, object]:
        """What the pipeline gets to see: the settings of a checkpoint's model that are set, and `model_params`."""
        return {**self._named_settings, **self.model_params}

    @property
    def _named_settings(self) -> dict[str, object]:
        names = ["checkpoint", "ar_diffusion_height", "ar_diffusion_width"]
        if self.checkpoint is not None:
            # This one may be set for all workers of a machine, whatever they serve.
            names.append("lingbot_action_root")
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def name_ttl_ms(self) -> int:
        """How long the worker's name and info outlive its last heartbeat."""
        return 5 * self.heartbeat_ms
