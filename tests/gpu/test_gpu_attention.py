"""Paged attention on a CUDA device, with every backend that it has."""

import pytest
import torch

from contracts.capacity import plan_capacity
from contracts.errors import ConfigurationError
from contracts.kv_spec import ARDiffusionKVCacheSpec, resolve_kv_config
from gpu_worker.capability import ARDiffusionRequest
from gpu_worker.kv.backends import make_attention_backend
from gpu_worker.kv.cache import ARDiffusionKVCache
from gpu_worker.kv.layer import paged_write_and_attend
from gpu_worker.kv.state import ARDiffusionKVState
from gpu_worker.models.reference.pipeline import ReferencePipeline
from gpu_worker.runner import ARDiffusionModelRunner, RunnerOptions
from support.kv_cache import tiny_spec
from support.kv_pipeline import make_tick
from support.plain_kv import PlainTimeline

BACKENDS = ["sdpa", "flex", "flash_attn"]
TOLERANCE = 2e-2


def geometry(block: int) -> ARDiffusionKVCacheSpec:
    return tiny_spec(
        num_layers=2,
        num_kv_heads=4,
        head_size=64,
        tokens_per_frame=block,
        frames_per_block=3,
        window_frames=6,
        sink_frames=3,
        max_scratch_tokens_per_branch=25,
    )


def make_state(
    spec: ARDiffusionKVCacheSpec, name: str, cuda: torch.device, dtype: torch.dtype = torch.float16
) -> ARDiffusionKVState:
    config = resolve_kv_config(spec, {"gpu_memory_fraction": 1.0})
    plan = plan_capacity(spec, config, available_bytes=1 << 30, itemsize=dtype.itemsize)
    try:
        backend = make_attention_backend(name, spec, config, device=cuda, dtype=dtype)
    except ConfigurationError as error:
        pytest.skip(error.message)
    cache = ARDiffusionKVCache(spec, config, plan, device=cuda, dtype=dtype, attention=backend)
    return ARDiffusionKVState("s", cache)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) / q.shape[3] ** 0.5
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.float())


@pytest.mark.parametrize("block", [256, 1560])
@pytest.mark.parametrize("extra", [0, 25])
@pytest.mark.parametrize("name", BACKENDS)
def test_paged_equals_dense(cuda: torch.device, name: str, extra: int, block: int) -> None:
    state = make_state(geometry(block), name, cuda)
    plain = PlainTimeline(6, 3, reset_at_boundary=False)
    frames_k: list[torch.Tensor] = []
    frames_v: list[torch.Tensor] = []
    torch.manual_seed(0)
    for _ in range(5):
        for commit in (False, True):
            k, v = torch.randn(2, 1, 3 * block, 4, 64, device=cuda, dtype=torch.float16)
            q = torch.randn(1, 3 * block + extra, 4, 64, device=cuda, dtype=torch.float16)
            registers = torch.randn(1, extra, 4, 64, device=cuda, dtype=torch.float16) if extra else None
            handle = state.get_kv_caches("main", seq_len=3 * block, commit_current=commit)[1]
            state.prepare_paged_context("main", extra_tokens=extra)
            out = handle.write_and_attend(q, k, v, registers, registers)
            state.commit_paged_context("main")
            every_k, every_v = [*frames_k, *k.split(block, 1)], [*frames_v, *v.split(block, 1)]
            more = [] if registers is None else [registers]
            seen = plain.visible_with(3)
            expected = dense(
                q,
                torch.cat([*(every_k[frame] for frame in seen), *more], 1),
                torch.cat([*(every_v[frame] for frame in seen), *more], 1),
            )
            torch.testing.assert_close(out.float(), expected, atol=TOLERANCE, rtol=TOLERANCE)
            if commit:
                frames_k, frames_v = every_k, every_v
                plain.commit(3)


@pytest.mark.parametrize("name", BACKENDS)
def test_the_operator_equals_the_direct_call_bit_for_bit(cuda: torch.device, name: str) -> None:
    state = make_state(geometry(256), name, cuda)
    handle = state.get_kv_caches("main", seq_len=768)[0]
    state.prepare_paged_context("main")
    x = torch.randn(1, 768, 4, 64, device=cuda, dtype=torch.float16)
    direct = handle.write_and_attend(x, x, x)
    fused = paged_write_and_attend(x, x, x, None, None, handle.branch_id, handle.layer_idx)
    assert torch.equal(direct, fused)


@pytest.mark.parametrize("name", ["sdpa", "flash_attn"])
def test_a_world_is_the_same_bit_for_bit_on_whatever_pages_it_gets(cuda: torch.device, name: str) -> None:
    states = [make_state(geometry(256), name, cuda) for _ in range(2)]
    pool = states[1]._cache.pool
    pool._free = pool._free[::-1]
    torch.manual_seed(0)
    for call in range(12):
        x = torch.randn(1, 768, 4, 64, device=cuda, dtype=torch.float16)
        outputs = []
        for state in states:
            handle = state.get_kv_caches("main", seq_len=768, commit_current=call % 2 == 1)[0]
            state.prepare_paged_context("main")
            outputs.append(handle.write_and_attend(x, x, x))
            state.commit_paged_context("main")
        assert torch.equal(*outputs)


@pytest.mark.parametrize("name", BACKENDS)
def test_the_reference_world_runs_and_what_is_allocated_is_what_was_planned(
    cuda: torch.device, name: str
) -> None:
    pipeline = ReferencePipeline(device=cuda, dtype=torch.bfloat16)
    options = RunnerOptions(available_bytes=1 << 28, session_capacity=2, attention_backend=name)
    try:
        runner = ARDiffusionModelRunner(pipeline, device=cuda, dtype=torch.bfloat16, options=options)
    except ConfigurationError as error:
        pytest.skip(error.message)
    before = torch.cuda.memory_stats(cuda)["requested_bytes.all.current"]
    runner.load()
    pool = torch.cuda.memory_stats(cuda)["requested_bytes.all.current"] - before
    memory = runner.plan.memory
    later = 2 * (memory.cross_bytes_per_session + memory.owned_bytes_per_session)
    assert pool == runner.plan.planned_bytes - later == runner.memory()["allocated_bytes"]
    for index in range(5):
        for session in ("a", "b"):
            output = runner.execute_model(ARDiffusionRequest(tick=make_tick(session, index)), seed=1)
            assert bool(output.payload["latents"].isfinite().all())
    runner.check_integrity()
