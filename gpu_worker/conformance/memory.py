"""Is what a session takes what the spec says?"""

from __future__ import annotations

import gc
from typing import Final

import torch

from gpu_worker.conformance.bench import Bench
from gpu_worker.conformance.subject import require

_INDEX_TYPES: Final = frozenset({torch.int32, torch.int64, torch.bool})
"""Block tables and slots: of the forward, not of the model, and a few bytes."""


def memory(bench: Bench) -> None:
    """A session's own tensors stay within `model_owned_state_bytes_per_session`, the pool within the plan."""
    device, declared = bench.subject.device, bench.spec.model_owned_state_bytes_per_session
    bench.alone("first", bench.chunks_past_window)  # tables that are made once are no session's
    before = _outside_pool(bench, device)
    session_id = bench.session("world")
    for _ in range(bench.chunks_past_window):
        bench.tick(session_id)
    owned = _outside_pool(bench, device) - before
    require(
        owned <= declared,
        f"after {bench.chunks_past_window} chunks the model keeps {owned} bytes of tensors for the session, "
        f"model_owned_state_bytes_per_session says {declared}",
    )
    _require_planned(bench)
    bench.close(session_id)


def _require_planned(bench: Bench) -> None:
    plan = bench.runner.plan
    allocated = bench.runner.memory()["allocated_bytes"]
    limit = plan.planned_bytes - plan.capacity * bench.spec.model_owned_state_bytes_per_session
    require(allocated <= limit, f"{allocated} bytes of KV are allocated, the plan says {limit}")


def _outside_pool(bench: Bench, device: torch.device) -> int:
    return live_bytes(device) - bench.runner.cache.cross_attention.nbytes


def live_bytes(device: torch.device) -> int:
    """Bytes of all tensors on a device that anything refers to; storage that several share counts once."""
    gc.collect()
    storages: dict[int, int] = {}
    for item in gc.get_objects():
        # type() and not isinstance(): asking some lazy objects for their class makes them do things.
        if issubclass(type(item), torch.Tensor) and not _is_traced(item) and _counts(item, device):
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _is_traced(tensor: torch.Tensor) -> bool:
    """Whether it is one of those that a compiler traces with, which have no memory."""
    return type(tensor).__module__.startswith("torch._subclasses")


def _counts(tensor: torch.Tensor, device: torch.device) -> bool:
    return (
        tensor.device.type == device.type
        and tensor.layout == torch.strided
        and tensor.dtype not in _INDEX_TYPES
    )
