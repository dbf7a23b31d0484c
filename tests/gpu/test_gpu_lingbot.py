"""A tiny LingBot World on a CUDA device: paged against contiguous, a prompt switch, and where the host waits."""

import warnings
from typing import Any

import torch

from contracts.capacity import plan_capacity
from contracts.kv_spec import resolve_kv_config
from gpu_worker.kv.cache import ARDiffusionKVCache
from gpu_worker.kv.state import ARDiffusionKVState
from gpu_worker.models.lingbot_world.contiguous import ContiguousKV
from gpu_worker.models.lingbot_world.passes import ContiguousFlow, PagedFlow, publish_prompt, rollout
from gpu_worker.models.lingbot_world.pipeline import LingBotWorldPipeline
from gpu_worker.models.lingbot_world.schedule import DMDSchedule
from gpu_worker.models.lingbot_world.spec import BRANCH
from gpu_worker.models.lingbot_world.transformer import CausalLingBotWorldTransformer3DModel
from gpu_worker.runner import ARDiffusionModelRunner, RunnerOptions
from support.kv_cache import cache_of
from support.lingbot_model import (
    HEIGHT,
    TINY,
    WIDTH,
    random_camera,
    random_condition,
    random_text,
    random_weights,
    tiny_spec,
)
from support.lingbot_worlds import TOPOLOGY, Worlds, shared_checkpoint

FRAMES = 24  # eight blocks: the window of 18 rolls from the seventh on
TOLERANCE = 1e-3


def model_on(device: torch.device) -> CausalLingBotWorldTransformer3DModel:
    model = CausalLingBotWorldTransformer3DModel.from_config({}, pinned=TINY)
    model.load_weights(random_weights(model).items(), device=device, dtype=torch.float32)
    return model


def state_on(device: torch.device) -> ARDiffusionKVState:
    spec = tiny_spec()
    config = resolve_kv_config(spec, {"gpu_memory_fraction": 1.0})
    plan = plan_capacity(spec, config, available_bytes=1 << 30, itemsize=4)
    return ARDiffusionKVState("w", ARDiffusionKVCache(spec, config, plan, device=device, dtype=torch.float32))


def clip(model: CausalLingBotWorldTransformer3DModel, flow_of: Any, frames: int = FRAMES) -> torch.Tensor:
    return rollout(
        model,
        flow_of,
        camera=random_camera(frames).to(model.device),
        condition=random_condition(frames).to(model.device),
        schedule=DMDSchedule.of(),
        generator=torch.Generator(model.device).manual_seed(0),
    )


@torch.no_grad()
def test_paged_equals_contiguous_over_the_rolling_window(cuda: torch.device) -> None:
    model, state = model_on(cuda), state_on(cuda)
    text = random_text().to(cuda)
    publish_prompt(model, state, text)
    kv = ContiguousKV(TINY.num_layers, 6, sink_frames=9, visible_frames=18)
    projected = list(model.text_kv(text))

    found = clip(model, lambda chunk: PagedFlow(model, state, chunk))

    expected = clip(model, lambda chunk: ContiguousFlow(model, kv, chunk, projected))
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)


@torch.no_grad()
def test_a_prompt_switch_changes_what_comes_and_not_what_was(cuda: torch.device) -> None:
    model, state = model_on(cuda), state_on(cuda)
    publish_prompt(model, state, random_text().to(cuda))
    clip(model, lambda chunk: PagedFlow(model, state, chunk), 6)
    pages = list(state.adapter(BRANCH).table.ids)
    before = [page[pages].clone() for page in (*cache_of(state).k_pages, *cache_of(state).v_pages)]
    chunk = model.prepare_chunk(random_camera().to(cuda), 6)
    noise = torch.randn(1, 36, 3, HEIGHT // 8, WIDTH // 8, device=cuda)
    old = PagedFlow(model, state, chunk)(noise, 500.0, update_cache=False)

    publish_prompt(model, state, random_text(4).to(cuda))
    new = PagedFlow(model, state, chunk)(noise, 500.0, update_cache=False)

    assert not torch.allclose(old, new, atol=TOLERANCE)
    after = [page[pages] for page in (*cache_of(state).k_pages, *cache_of(state).v_pages)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


class WorldsOnADevice(Worlds):
    """As `Worlds`, with models, pool and random states on a device."""

    def __init__(self, device: torch.device) -> None:
        config = {
            "checkpoint": str(shared_checkpoint()),
            "ar_diffusion_height": HEIGHT,
            "ar_diffusion_width": WIDTH,
        }
        self.pipeline = LingBotWorldPipeline(
            device=device, dtype=torch.float32, config=config, topology=TOPOLOGY
        )
        options = RunnerOptions(available_bytes=1 << 30)
        self.runner = ARDiffusionModelRunner(
            self.pipeline, device=device, dtype=torch.float32, options=options
        )
        self.runner.load()
        self._next: dict[str, int] = {}


def test_a_chunk_waits_for_the_device_once(cuda: torch.device) -> None:
    worlds = WorldsOnADevice(cuda)
    for _ in range(7):
        worlds.tick()

    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            worlds.tick()
    finally:
        torch.cuda.set_sync_debug_mode("default")

    waits = [str(one.message) for one in caught if "synchronizing CUDA operation" in str(one.message)]
    assert len(waits) == 1, [f"{one.filename}:{one.lineno}" for one in caught]


def test_ticks_on_a_device_are_finite_and_have_pictures(cuda: torch.device) -> None:
    worlds = WorldsOnADevice(cuda)
    for index in range(7):
        output = worlds.tick()
        assert output.payload["latents"].device.type == cuda.type
        assert bool(output.payload["latents"].isfinite().all())
        assert output.frames.shape[0] == (12 if index else 9)
