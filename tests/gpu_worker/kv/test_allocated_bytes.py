"""What is allocated is what was planned, to the byte."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch.utils._python_dispatch import TorchDispatchMode

from contracts.capacity import plan_capacity
from contracts.kv_spec import (
    ARDiffusionCrossAttentionKVSpec,
    ARDiffusionKVBranchSpec,
    ARDiffusionKVCacheSpec,
    resolve_kv_config,
)
from gpu_worker.capability import ARDiffusionRequest
from gpu_worker.kv.cache import ARDiffusionKVCache
from gpu_worker.kv.state import ARDiffusionKVState
from gpu_worker.models.reference.spec import kv_spec
from support.geometries import geometries, spec_of
from support.kv_cache import CPU, tiny_spec
from support.kv_pipeline import RecordingPipeline, make_runner, make_tick
from support.plain_plan import PlainGeometry

META = torch.device("meta")
"""Tensors without memory: the bytes of a whole card can be counted on any machine."""

CFG = (ARDiffusionKVBranchSpec("positive", 0), ARDiffusionKVBranchSpec("negative", 1))
ONE_SLOT = (ARDiffusionKVBranchSpec("positive", 0), ARDiffusionKVBranchSpec("negative", 0))
TEXT = ARDiffusionCrossAttentionKVSpec("text", 512)
IMAGE = ARDiffusionCrossAttentionKVSpec("image", 257)


def shipped(**values: Any) -> ARDiffusionKVCacheSpec:
    return ARDiffusionKVCacheSpec(num_layers=40, num_kv_heads=40, head_size=128, window_frames=9, **values)


LINGBOT = shipped(
    tokens_per_frame=1560,
    frames_per_block=3,
    sink_frames=9,
    kv_branches=(ARDiffusionKVBranchSpec("main", 0),),
    cross_attention=(TEXT,),
    session_capacity=2,
    model_owned_state_bytes_per_session=7_488_000,
)
DREAMZERO: dict[str, Any] = {
    "tokens_per_frame": 880,
    "frames_per_block": 2,
    "cross_attention": (TEXT, IMAGE),
    "max_scratch_tokens_per_branch": 25,
    "session_capacity": 2,
    "model_owned_state_bytes_per_session": 632_291_328,
}

SPECS = {
    "tiny": tiny_spec(),
    "tiny with everything": tiny_spec(
        num_layers=3,
        num_kv_heads=2,
        head_size=5,
        frames_per_block=3,
        sink_frames=2,
        kv_branches=CFG,
        cross_attention=(
            ARDiffusionCrossAttentionKVSpec("text", 2),
            ARDiffusionCrossAttentionKVSpec("image", 3, 7),
        ),
        max_scratch_tokens_per_branch=17,
        session_capacity=3,
        model_owned_state_bytes_per_session=11,
    ),
    "reference": kv_spec({}),
    "lingbot": LINGBOT,
    "dreamzero": shipped(kv_branches=CFG, **DREAMZERO),
    "dreamzero on one slot": shipped(kv_branches=ONE_SLOT, **DREAMZERO),
}


class CountingStorage(TorchDispatchMode):
    """Adds up the bytes of every storage that operators make on one kind of device; keeps what they made alive."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._seen: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.device.type == self._device.type:
            storage = result.untyped_storage()
            self._seen[storage._cdata] = storage
        return result

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes() for storage in self._seen.values())


def fill(cache: ARDiffusionKVCache, device: torch.device) -> None:
    """As many sessions as were planned, each with all its caches, and with a commit in every slot: branches that share
    one never run on the same worker."""
    spec = cache.spec
    running = {branch.local_index: branch.name for branch in spec.kv_branches}.values()
    head = (spec.head_size,)
    for number in range(cache.plan.capacity):
        state = ARDiffusionKVState(f"s{number}", cache)
        for branch in running:
            state.get_kv_caches(
                branch, seq_len=spec.frames_per_block * spec.tokens_per_frame, commit_current=True
            )
            state.prepare_paged_context(branch)
            state.commit_paged_context(branch)
        for branch in spec.branch_names:
            for named in spec.cross_attention:
                heads = spec.num_kv_heads if named.num_kv_heads is None else named.num_kv_heads
                # One element seen everywhere: what a pipeline passes in is not the cache's.
                k = torch.zeros((), device=device).expand(1, named.num_tokens, heads, *head)
                state.populate_cross_attention(branch, named.name, ((k, k) for _ in range(spec.num_layers)))
    cache.check_integrity()


def allocated_and_planned(
    spec: ARDiffusionKVCacheSpec, *, itemsize: int, kv: dict[str, Any], scratch: int | None = None
) -> tuple[int, int, int]:
    """(bytes counted, bytes that the cache says it holds, bytes planned without what the model owns)."""
    config = resolve_kv_config(spec, kv)
    plan = plan_capacity(
        spec, config, available_bytes=1 << 50, itemsize=itemsize, scratch_blocks_minimum=scratch
    )
    generous = plan.required_bytes + 3 * plan.memory.page_bytes + 1
    fitted = resolve_kv_config(spec, {**kv, "gpu_memory_fraction": 1.0})
    plan = plan_capacity(
        spec, fitted, available_bytes=generous, itemsize=itemsize, scratch_blocks_minimum=scratch
    )
    dtype = {2: torch.bfloat16, 4: torch.float32}[itemsize]
    with CountingStorage(META) as counting:
        cache = ARDiffusionKVCache(spec, fitted, plan, device=META, dtype=dtype)
        fill(cache, CPU)
    owned = plan.capacity * spec.model_owned_state_bytes_per_session
    return counting.nbytes, cache.allocated_bytes(), plan.planned_bytes - owned


@pytest.mark.parametrize("staging", [False, True])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("name", SPECS)
def test_a_full_pool_is_what_was_planned(name: str, itemsize: int, staging: bool) -> None:
    kv = {"reuse_history_staging": staging}
    counted, said, planned = allocated_and_planned(SPECS[name], itemsize=itemsize, kv=kv)
    assert counted == said == planned


@pytest.mark.parametrize(
    "kv", [{"window_chunks": 1}, {"sink_chunks": 0}, {"window_chunks": 30, "sink_chunks": 4}]
)
def test_a_pool_of_another_window_is_what_was_planned(kv: dict[str, Any]) -> None:
    counted, said, planned = allocated_and_planned(LINGBOT, itemsize=2, kv=kv, scratch=9)
    assert counted == said == planned


@settings(max_examples=20, deadline=None)
@given(plain=geometries(most_layers=3, most_heads=4, most_cap=3))
def test_a_pool_of_any_geometry_is_what_was_planned(plain: PlainGeometry) -> None:
    spec = spec_of(plain)
    scratch = plain.scratch_minimum
    counted, said, planned = allocated_and_planned(spec, itemsize=plain.itemsize, kv={}, scratch=scratch)
    assert counted == said == planned


def test_the_runner_allocates_the_pool_at_once_and_nothing_later_but_cross_attention() -> None:
    pipeline = RecordingPipeline(model_owned_state_bytes_per_session=40)
    with CountingStorage(CPU) as counting:
        runner = make_runner(pipeline)
    plan = runner.plan
    cross, owned = plan.memory.cross_bytes_per_session, 40
    assert counting.nbytes == runner.memory()["allocated_bytes"] == plan.planned_bytes - 2 * (cross + owned)
    assert 0 <= plan.budget_bytes - plan.planned_bytes < plan.memory.page_bytes
    for resident, session_id in enumerate(("a", "b"), start=1):
        for index in range(5):
            runner.execute_model(ARDiffusionRequest(tick=make_tick(session_id, index)))
        allocated = runner.memory()["allocated_bytes"]
        assert allocated == plan.planned_bytes - 2 * owned - (2 - resident) * cross
    runner.close_session("a")
    runner.close_session("b")
    assert runner.memory()["allocated_bytes"] == counting.nbytes
