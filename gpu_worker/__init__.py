"""The device side: runs models, keeps their KV. Exports the seam that a pipeline is written against.

Names are imported on first use, so that `import gpu_worker` stays light and loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from contracts.kv_spec import (
        ARDiffusionCrossAttentionKVSpec,
        ARDiffusionKVBranchSpec,
        ARDiffusionKVCacheSpec,
    )
    from gpu_worker.capability import (
        WARMUP_SESSION_ID,
        ARDiffusionRequest,
        DiffusionOutput,
        StepState,
        SupportsARDiffusionPipeline,
        SupportsStepExecution,
    )
    from gpu_worker.engine import ARDiffusionEngine, TickEngine, load_engine
    from gpu_worker.kv.state import ARDiffusionKVState
    from gpu_worker.runner import ARDiffusionModelRunner

__all__ = [
    "WARMUP_SESSION_ID",
    "ARDiffusionCrossAttentionKVSpec",
    "ARDiffusionEngine",
    "ARDiffusionKVBranchSpec",
    "ARDiffusionKVCacheSpec",
    "ARDiffusionKVState",
    "ARDiffusionModelRunner",
    "ARDiffusionRequest",
    "DiffusionOutput",
    "StepState",
    "SupportsARDiffusionPipeline",
    "SupportsStepExecution",
    "TickEngine",
    "load_engine",
]

_HOME: Final = {
    "ARDiffusionCrossAttentionKVSpec": "contracts.kv_spec",
    "ARDiffusionKVBranchSpec": "contracts.kv_spec",
    "ARDiffusionKVCacheSpec": "contracts.kv_spec",
    "ARDiffusionRequest": "gpu_worker.capability",
    "DiffusionOutput": "gpu_worker.capability",
    "StepState": "gpu_worker.capability",
    "SupportsARDiffusionPipeline": "gpu_worker.capability",
    "SupportsStepExecution": "gpu_worker.capability",
    "WARMUP_SESSION_ID": "gpu_worker.capability",
    "ARDiffusionEngine": "gpu_worker.engine",
    "TickEngine": "gpu_worker.engine",
    "load_engine": "gpu_worker.engine",
    "ARDiffusionKVState": "gpu_worker.kv.state",
    "ARDiffusionModelRunner": "gpu_worker.runner",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
