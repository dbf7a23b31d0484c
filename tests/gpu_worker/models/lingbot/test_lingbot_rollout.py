"""The past: the contiguous reference by exact values, and paged KV against it over the rolling window."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from contracts.errors import InvalidArgumentError, KVStateError
from gpu_worker.kv.state import ARDiffusionKVState
from gpu_worker.models.lingbot_world.contiguous import ContiguousKV
from gpu_worker.models.lingbot_world.passes import ContiguousFlow, PagedFlow, publish_prompt, rollout
from gpu_worker.models.lingbot_world.resolution import latent_frames
from gpu_worker.models.lingbot_world.sampler import DMDBlock, FlowModel
from gpu_worker.models.lingbot_world.schedule import DMDSchedule
from gpu_worker.models.lingbot_world.spec import BRANCH, TEXT
from gpu_worker.models.lingbot_world.transformer import CausalLingBotWorldTransformer3DModel, ChunkInputs
from support.kv_cache import cache_of, make_state
from support.lingbot_model import (
    TINY,
    random_camera,
    random_condition,
    random_text,
    seeded,
    tiny_model,
    tiny_spec,
)
from support.lingbot_ranks import ThreadRank, on_ranks

FRAMES = 24  # eight blocks: the window of 18 rolls from the seventh on
SCHEDULE = DMDSchedule.of()

FlowOf = Callable[[ChunkInputs], FlowModel]


def past(model: CausalLingBotWorldTransformer3DModel) -> ContiguousKV:
    config = model.config
    return ContiguousKV(
        config.num_layers, 6, sink_frames=config.sink_size, visible_frames=config.sliding_window_num_frames
    )


def contiguous(model: CausalLingBotWorldTransformer3DModel, seed: int = 3) -> FlowOf:
    kv, text = past(model), list(model.text_kv(random_text(seed)))
    return lambda chunk: ContiguousFlow(model, kv, chunk, text)


def paged(model: CausalLingBotWorldTransformer3DModel, state: ARDiffusionKVState, seed: int = 3) -> FlowOf:
    publish_prompt(model, state, random_text(seed))
    return lambda chunk: PagedFlow(model, state, chunk)


def clip(
    model: CausalLingBotWorldTransformer3DModel, flow_of: FlowOf, frames: int = FRAMES, **options: Any
) -> torch.Tensor:
    return rollout(
        model,
        flow_of,
        camera=random_camera(frames),
        condition=random_condition(frames),
        schedule=SCHEDULE,
        generator=seeded(),
        **options,
    )


# ---------------------------------------------------------------------------------------------------- contiguous


def small_past() -> ContiguousKV:
    return ContiguousKV(1, 1, sink_frames=1, visible_frames=4)


def values(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32).view(1, -1, 1, 1)


def put(kv: ContiguousKV, start: int, *numbers: float, update: bool = True) -> torch.Tensor:
    """One forward whose keys are all alike, so that its output is the mean of the visible values."""
    (layer,) = kv.begin(start, len(numbers), update_cache=update)
    out = layer.write_and_attend(values(*numbers), torch.zeros(1, len(numbers), 1, 1), values(*numbers))
    kv.end()
    return out.flatten()


def test_the_sink_stays_and_the_window_slides() -> None:
    kv = small_past()

    for start, pair in ((0, (1, 2)), (2, (3, 4)), (4, (5, 6))):
        put(kv, start, *pair)

    assert kv.layers[0].stored[1].flatten().tolist() == [1, 4, 5, 6]
    assert kv.end_frame == 6


def test_a_repeated_start_replaces_the_last_block() -> None:
    kv = small_past()
    for start, pair in ((0, (1, 2)), (0, (7, 8)), (2, (3, 4)), (4, (5, 6)), (4, (9, 10))):
        put(kv, start, *pair)

    assert kv.layers[0].stored[1].flatten().tolist() == [7, 4, 9, 10]
    assert kv.end_frame == 6


def test_every_token_of_a_block_sees_the_whole_block_and_its_past() -> None:
    kv = small_past()

    assert put(kv, 0, 1, 3).tolist() == [2, 2]
    assert put(kv, 2, 5, 7).tolist() == [4, 4]
    assert put(kv, 4, 9, 11).tolist() == [(1 + 7 + 9 + 11) / 4] * 2


@pytest.mark.parametrize("start", [2, 0])
def test_a_forward_that_does_not_stay_sees_the_past_and_changes_no_byte(start: int) -> None:
    kv = small_past()
    put(kv, 0, 1, 3)
    before = [tensor.clone() for tensor in kv.layers[0].stored]

    seen = put(kv, start, 5, 7, update=False)

    assert seen.tolist() == ([4, 4] if start else [6, 6])
    assert all(torch.equal(a, b) for a, b in zip(before, kv.layers[0].stored, strict=True))
    assert kv.end_frame == 2


@pytest.mark.parametrize(
    ("start", "message"), [(0, "before the last"), (3, "overlaps"), (5, "gap"), (2, "overlaps")]
)
def test_a_block_neither_next_nor_repeated_is_refused(start: int, message: str) -> None:
    kv = small_past()
    put(kv, 0, 1, 2)
    put(kv, 2, 3, 4)

    with pytest.raises(InvalidArgumentError, match=message) as caught:
        kv.begin(start, 1, update_cache=True)
    assert caught.value.field == "start_frame"


@pytest.mark.parametrize(
    ("start", "frames", "field"),
    [
        (True, 1, "start_frame"),
        (-1, 1, "start_frame"),
        (1, 1, "start_frame"),
        (0, 0, "frames"),
        (0, 4, "frames"),
    ],
)
def test_a_first_block_starts_at_0_and_fits_the_window(start: Any, frames: Any, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        small_past().begin(start, frames, update_cache=True)
    assert caught.value.field == field


def test_misuse_of_the_contiguous_past_is_refused() -> None:
    kv = small_past()
    with pytest.raises(KVStateError, match="no forward"):
        kv.end()
    with pytest.raises(KVStateError, match="no block"):
        _ = kv.layers[0].stored
    (layer,) = kv.begin(0, 2, update_cache=True)
    with pytest.raises(KVStateError, match="2 tokens"):
        layer.write_and_attend(values(1), values(1), values(1))


# ---------------------------------------------------------------------------------------------------- paged


def test_paged_equals_contiguous_over_the_rolling_window() -> None:
    model, state = tiny_model(), make_state(tiny_spec())

    found = clip(model, paged(model, state))

    torch.testing.assert_close(found, clip(model, contiguous(model)), atol=1e-5, rtol=1e-5)
    assert state.adapter(BRANCH).absolute_frames == FRAMES
    assert len(state.adapter(BRANCH).table) == 18


def test_reusing_the_last_step_keeps_the_last_probe_paged_and_contiguous_alike() -> None:
    model, state = tiny_model(), make_state(tiny_spec())

    found = clip(model, paged(model, state), 12, reuse_last_step_kv=True)

    expected = clip(model, contiguous(model), 12, reuse_last_step_kv=True)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert state.adapter(BRANCH).absolute_frames == 12
    assert not torch.allclose(found[:, :, 3:], clip(model, contiguous(model), 12)[:, :, 3:], atol=1e-3)


def test_129_pixel_frames_are_33_latent_frames_and_55_passes() -> None:
    model, state = tiny_model(), make_state(tiny_spec())
    flow_of = paged(model, state)
    calls: list[tuple[int, float, bool]] = []

    def recording(chunk: ChunkInputs) -> FlowModel:
        flow = flow_of(chunk)

        def call(model_input: torch.Tensor, timestep: float, *, update_cache: bool) -> torch.Tensor:
            calls.append((chunk.start_frame, timestep, update_cache))
            return flow(model_input, timestep, update_cache=update_cache)

        return call

    found = clip(model, recording, latent_frames(129))

    assert found.shape == (1, 16, 33, 4, 6)
    assert found.isfinite().all()
    assert len(calls) == 55
    for block in range(11):
        five = calls[5 * block : 5 * block + 5]
        assert [start for start, _, _ in five] == [3 * block] * 5
        assert [timestep for _, timestep, _ in five] == [*SCHEDULE.timesteps, 0.0]
        assert [update for _, _, update in five] == [False] * 4 + [True]


def test_the_window_makes_a_difference_once_it_rolls() -> None:
    model = tiny_model()
    wider = tiny_model(replace(TINY, sliding_window_num_frames=30))

    narrow, wide = clip(model, contiguous(model)), clip(wider, contiguous(wider))

    assert torch.equal(narrow[:, :, :18], wide[:, :, :18])
    assert not torch.allclose(narrow[:, :, 18:], wide[:, :, 18:], atol=1e-3)


def test_a_probe_leaves_committed_pages_as_they_are() -> None:
    model, state = tiny_model(), make_state(tiny_spec())
    flow_of = paged(model, state)
    clip(model, flow_of, 6)
    cache, table = cache_of(state), state.adapter(BRANCH).table
    before = [(k[list(table.ids)].clone(), v[list(table.ids)].clone()) for k, v in _pages(cache)]

    flow = flow_of(model.prepare_chunk(random_camera(), 6))
    for timestep in SCHEDULE.timesteps:
        flow(torch.randn(1, 36, 3, 4, 6, generator=seeded(9)), timestep, update_cache=False)

    assert state.adapter(BRANCH).absolute_frames == 6
    for (k, v), (old_k, old_v) in zip(_pages(cache), before, strict=True):
        assert torch.equal(k[list(table.ids)], old_k)
        assert torch.equal(v[list(table.ids)], old_v)


def _pages(cache: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(cache.k_pages, cache.v_pages, strict=True))


def test_a_new_prompt_rebuilds_text_and_keeps_the_past() -> None:
    model, state = tiny_model(), make_state(tiny_spec())
    flow_of = paged(model, state)
    clip(model, flow_of, 6)
    table = list(state.adapter(BRANCH).table.ids)
    before = [k[table].clone() for k in cache_of(state).k_pages]
    chunk, noise = model.prepare_chunk(random_camera(), 6), torch.randn(1, 36, 3, 4, 6, generator=seeded(9))
    old = flow_of(chunk)(noise, 500.0, update_cache=False)

    new = paged(model, state, seed=4)(chunk)(noise, 500.0, update_cache=False)

    assert not torch.allclose(old, new, atol=1e-3)
    assert state.adapter(BRANCH).absolute_frames == 6
    assert list(state.adapter(BRANCH).table.ids) == table
    assert all(torch.equal(k[table], kept) for k, kept in zip(cache_of(state).k_pages, before, strict=True))
    back = paged(model, state)(chunk)(noise, 500.0, update_cache=False)
    assert torch.equal(back, old)


def test_a_prompt_that_fails_leaves_none() -> None:
    model, state = tiny_model(), make_state(tiny_spec())
    publish_prompt(model, state, random_text())

    with pytest.raises(InvalidArgumentError):
        publish_prompt(model, state, torch.zeros(1, 5, 3))

    assert not state.is_cross_attention_populated(BRANCH, TEXT)
    with pytest.raises(KVStateError, match="before it was populated"):
        PagedFlow(model, state, model.prepare_chunk(random_camera(), 0))(
            torch.zeros(1, 36, 3, 4, 6), 0.0, update_cache=True
        )


def test_a_chunk_starts_where_the_past_ends() -> None:
    model, state = tiny_model(), make_state(tiny_spec())
    flow = paged(model, state)(model.prepare_chunk(random_camera(), 3))

    with pytest.raises(KVStateError, match="starts at frame 3") as caught:
        flow(torch.zeros(1, 36, 3, 4, 6), 0.0, update_cache=True)
    assert caught.value.field == "start_frame"


def test_paged_kv_holds_one_world() -> None:
    model, state = tiny_model(), make_state(tiny_spec())
    flow = paged(model, state)(model.prepare_chunk(random_camera(batch=2), 0))

    with pytest.raises(RuntimeError, match="one world"):
        flow(torch.zeros(2, 36, 3, 4, 6), 0.0, update_cache=True)


def test_pages_hold_frames_of_one_size() -> None:
    model, state = tiny_model(), make_state(tiny_spec())
    chunk = model.prepare_chunk(torch.zeros(1, 384, 3, 4, 4), 0)

    with pytest.raises(RuntimeError, match="4 tokens, the session's pages hold 6"):
        paged(model, state)(chunk)(torch.zeros(1, 36, 3, 4, 4), 0.0, update_cache=True)


def test_two_sessions_interleaved_equal_each_alone() -> None:
    model, spec = tiny_model(), tiny_spec()
    alone = [clip(model, paged(model, make_state(spec), seed), 9) for seed in (3, 4)]
    first = make_state(spec, "a")
    second = ARDiffusionKVState("b", cache_of(first))
    flows = [paged(model, first, 3), paged(model, second, 4)]
    generators = [seeded(), seeded()]
    made: list[list[torch.Tensor]] = [[], []]
    for start in (0, 3, 6):
        for which in (0, 1):
            made[which].append(_next_block(model, flows[which], start, generators[which]))

    for found, expected in zip(made, alone, strict=True):
        torch.testing.assert_close(torch.cat(found, dim=2), expected, atol=1e-5, rtol=1e-5)


def _next_block(
    model: CausalLingBotWorldTransformer3DModel, flow_of: FlowOf, start: int, generator: torch.Generator
) -> torch.Tensor:
    part = slice(start, start + 3)
    chunk = model.prepare_chunk(random_camera(9)[:, :, part], start)
    return DMDBlock(flow_of(chunk), random_condition(9)[:, :, part], SCHEDULE, generator).run()


@pytest.mark.parametrize(("camera", "condition"), [(0, 0), (4, 4), (3, 6)])
def test_a_rollout_is_whole_blocks(camera: int, condition: int) -> None:
    model = tiny_model()

    with pytest.raises(InvalidArgumentError, match="whole blocks"):
        rollout(
            model,
            contiguous(model),
            camera=random_camera(camera),
            condition=random_condition(condition),
            schedule=SCHEDULE,
            generator=seeded(),
        )


# ---------------------------------------------------------------------------------------------------- several ranks


def test_two_ranks_of_one_sequence_equal_one() -> None:
    expected = clip(tiny_model(), contiguous(tiny_model()), 9)

    def work(rank: ThreadRank) -> tuple[torch.Tensor, int]:
        model = tiny_model(parallel=rank)
        state = make_state(tiny_spec(degree=2))
        chunk_bytes = model.prepare_chunk(random_camera(), 0).camera_bytes
        return clip(model, paged(model, state), 9), chunk_bytes

    for found, chunk_bytes in on_ranks(2, work):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        assert chunk_bytes == tiny_model().prepare_chunk(random_camera(), 0).camera_bytes // 2


def test_ranks_that_cannot_share_equally_are_refused() -> None:
    model = tiny_model(parallel=ThreadRank(0, [torch.empty(0)] * 4, threading.Barrier(4)))

    with pytest.raises(InvalidArgumentError, match="2 heads") as caught:
        model.prepare_chunk(random_camera(), 0)
    assert caught.value.field == "ulysses_degree"


# ---------------------------------------------------------------------------------------------------- compiled


# The tracer of the compiler warns about its own use of a deprecated name, not about ours.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_compiled_blocks_share_graphs_and_change_no_result() -> None:
    torch._dynamo.reset()
    model, state = tiny_model(), make_state(tiny_spec())
    expected = clip(model, paged(model, make_state(tiny_spec())))
    counter = CompileCounterWithBackend("eager")

    model.compile_blocks(backend=counter, fullgraph=True)
    found = clip(model, paged(model, state))

    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    assert counter.frame_count == 1
