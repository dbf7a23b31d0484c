"""How a deployment runs a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from contracts.errors import ConfigurationError
from contracts.kv_spec import ARDiffusionKVOverrides


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """The deployment's settings.

    Args:
        kv: KV overrides; None in them means unset.
        session_capacity: resident sessions wanted, None for the pipeline's cap.
        available_bytes: device memory to plan with; None asks the device.
        scratch_blocks_per_branch: lower bound of scratch pages, None for the derived number.
        attention_backend: how layers attend to their pages, see `gpu_worker.kv.backends`.
        step_execution: run requests through the pipeline's step functions instead of its `forward`.
        group_steps: whether one call of `execute_stepwise` runs all denoise steps of a chunk, or one.
        max_num_seqs: requests at a time; only 1 exists.
        supports_request_batch: whether batches of requests are wanted; they are refused.
        enforce_eager: no compiled graphs, so nothing to warm up.
    """

    kv: ARDiffusionKVOverrides | Mapping[str, Any] | None = None
    session_capacity: int | None = None
    available_bytes: int | None = None
    scratch_blocks_per_branch: int | None = None
    attention_backend: str = "sdpa"
    step_execution: bool = False
    group_steps: bool = True
    max_num_seqs: int = 1
    supports_request_batch: bool = False
    enforce_eager: bool = False

    def __post_init__(self) -> None:
        if self.max_num_seqs != 1:
            raise ConfigurationError(f"max_num_seqs must be 1, got {self.max_num_seqs}", field="max_num_seqs")
        if self.supports_request_batch:
            raise ConfigurationError(
                "request-batch execution is not supported", field="supports_request_batch"
            )
