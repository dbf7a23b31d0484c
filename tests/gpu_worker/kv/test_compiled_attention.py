"""Attention inside a compiled graph: one graph, the same bits."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from contracts.errors import KVStateError
from gpu_worker.kv.layer import LayerKVHandle, paged_write_and_attend
from support.kv_cache import cache_of, make_state, tiny_spec

SPEC = tiny_spec(num_layers=2, num_kv_heads=2, head_size=8, window_frames=3, max_scratch_tokens_per_branch=2)


def layer(handle: LayerKVHandle, x: torch.Tensor) -> torch.Tensor:
    return x + handle.write_and_attend(x, x * 2, x * 3)


# The tracer of the compiler warns about its own use of a deprecated name, not about ours.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_one_graph_serves_every_layer_and_every_length_of_history() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    state, plain = make_state(SPEC), make_state(SPEC)
    torch.manual_seed(0)
    for call in range(10):
        x = torch.randn(1, 16, 2, 8)
        outputs = []
        for kv, run in ((state, compiled), (plain, layer)):
            handles = kv.get_kv_caches("main", seq_len=16, commit_current=call % 2 == 1)
            kv.prepare_paged_context("main")
            outputs.append([run(handle, x) for handle in handles])
            kv.commit_paged_context("main")
        for ours, theirs in zip(*outputs, strict=True):
            assert torch.equal(ours, theirs)
    assert counter.frame_count == 1


def test_the_operator_equals_the_direct_call_bit_for_bit() -> None:
    state = make_state(SPEC)
    handle = state.get_kv_caches("main", seq_len=16)[1]
    state.prepare_paged_context("main", extra_tokens=2)
    x, extra = torch.randn(1, 16, 2, 8), torch.randn(1, 2, 2, 8)
    direct = handle.write_and_attend(x, x, x, extra, extra)
    fused = paged_write_and_attend(x, x, x, extra, extra, handle.branch_id, handle.layer_idx)
    assert torch.equal(direct, fused)


def test_the_operator_refuses_a_context_that_is_gone() -> None:
    x = torch.randn(1, 16, 2, 8)
    with pytest.raises(KVStateError, match="over"):
        paged_write_and_attend(x, x, x, None, None, torch.tensor(-1), torch.tensor(0))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_a_layer_whose_output_nobody_reads_writes_all_the_same() -> None:
    def committing(handle: LayerKVHandle, x: torch.Tensor) -> torch.Tensor:
        handle.write_and_attend(x, x * 2, x * 3)
        return x + 1

    torch._dynamo.reset()
    state = make_state(SPEC)
    handle = state.get_kv_caches("main", seq_len=16, commit_current=True)[0]
    (page,) = state.prepare_paged_context("main").metadata.current_ids
    x = torch.randn(1, 16, 2, 8)
    torch.compile(committing, backend="aot_eager", fullgraph=True)(
        handle, x
    )  # a backend that drops dead code
    cache = cache_of(state)
    assert torch.equal(cache.k_pages[0][page], 2 * x[0])
    assert torch.equal(cache.v_pages[0][page], 3 * x[0])
