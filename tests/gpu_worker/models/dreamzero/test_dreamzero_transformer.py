"""The transformer: names, shapes, rounding, and forwards over paged KV against a dense oracle of the formulas."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from contracts.errors import InvalidArgumentError, InvalidTypeError, KVStateError
from contracts.kv_spec import (
    ARDiffusionCrossAttentionKVSpec,
    ARDiffusionKVBranchSpec,
    ARDiffusionKVCacheSpec,
)
from gpu_worker.kv.state import ARDiffusionKVState
from gpu_worker.models.dreamzero.attention import CastFirstRMSNorm
from gpu_worker.models.dreamzero.blocks import layer_norm, modulate
from gpu_worker.models.dreamzero.passes import Frames, PagedModel, Registers
from gpu_worker.models.dreamzero.registers import sine_cosine
from gpu_worker.models.dreamzero.rope import block_index, rotary
from gpu_worker.models.dreamzero.spec import IMAGE, TEXT
from gpu_worker.models.dreamzero.transformer import DreamZeroTransformer, Flow
from support.dreamzero_model import (
    TINY,
    arrays,
    random_action,
    random_condition,
    random_image,
    random_latents,
    random_state,
    random_text,
    tiny_model,
)
from support.dreamzero_oracles import transformer as oracle
from support.dreamzero_oracles.rollout import DenseRollout
from support.kv_cache import CPU, cache_of, make_state
from support.lingbot_model import seeded

BRANCH = "positive"
MODEL = TINY.head.transformer
SIZES = oracle.Sizes(
    layers=MODEL.num_layers,
    heads=MODEL.num_heads,
    freq_dim=MODEL.freq_dim,
    frames_per_block=TINY.head.num_frame_per_block,
    window_frames=TINY.head.window_frames,
)


def tiny_spec() -> ARDiffusionKVCacheSpec:
    return ARDiffusionKVCacheSpec(
        num_layers=MODEL.num_layers,
        num_kv_heads=MODEL.num_heads,
        head_size=MODEL.head_dim,
        tokens_per_frame=MODEL.frame_seqlen,
        frames_per_block=TINY.head.num_frame_per_block,
        window_frames=TINY.head.window_frames,
        kv_branches=(ARDiffusionKVBranchSpec(BRANCH, 0),),
        cross_attention=(
            ARDiffusionCrossAttentionKVSpec(TEXT, MODEL.text_len),
            ARDiffusionCrossAttentionKVSpec(IMAGE, TINY.clip.tokens),
        ),
        max_scratch_tokens_per_branch=MODEL.registers,
    )


def session(model: DreamZeroTransformer) -> ARDiffusionKVState:
    """A session's KV with text and image published."""
    kv = make_state(tiny_spec())
    kv.populate_cross_attention(BRANCH, TEXT, model.project_text(random_text()))
    kv.populate_cross_attention(BRANCH, IMAGE, model.project_image(random_image()))
    return kv


def frames(start: int, count: int, timestep: Any = 0.0, seed: int = 0) -> Frames:
    return Frames(random_latents(count, seed + 10), random_condition(count, seed + 11), start, timestep)


def registers(timestep: Any = 500.0, seed: int = 5) -> Registers:
    return Registers(random_action(seed), timestep, random_state())


def array(x: torch.Tensor) -> np.ndarray:
    return x[0].double().numpy()


def dense(model: DreamZeroTransformer) -> DenseRollout:
    return DenseRollout(arrays(model), SIZES, array(random_text()), array(random_image()))


# ---------------------------------------------------------------------------------------------------- checkpoint


def expected_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every name and shape of the published transformer."""
    wide = {"weight": (5120, 5120), "bias": (5120,)}
    norm = {"weight": (5120,), "bias": (5120,)}
    parts: dict[str, dict[str, tuple[int, ...]]] = {
        "patch_embedding": {"weight": (5120, 36, 1, 2, 2), "bias": (5120,)},
        "text_embedding.0": {"weight": (5120, 4096), "bias": (5120,)},
        "text_embedding.2": wide,
        "time_embedding.0": {"weight": (5120, 256), "bias": (5120,)},
        "time_embedding.2": wide,
        "time_projection.1": {"weight": (30720, 5120), "bias": (30720,)},
        "head.head": {"weight": (64, 5120), "bias": (64,)},
        "img_emb.proj.0": {"weight": (1280,), "bias": (1280,)},
        "img_emb.proj.1": {"weight": (1280, 1280), "bias": (1280,)},
        "img_emb.proj.3": {"weight": (5120, 1280), "bias": (5120,)},
        "img_emb.proj.4": norm,
        "state_encoder.layer1": {"W": (1, 64, 1024), "b": (1, 1024)},
        "state_encoder.layer2": {"W": (1, 1024, 5120), "b": (1, 5120)},
        "action_encoder.W1": {"W": (1, 32, 5120), "b": (1, 5120)},
        "action_encoder.W2": {"W": (1, 10240, 5120), "b": (1, 5120)},
        "action_encoder.W3": {"W": (1, 5120, 5120), "b": (1, 5120)},
        "action_decoder.layer1": {"W": (1, 5120, 1024), "b": (1, 1024)},
        "action_decoder.layer2": {"W": (1, 1024, 32), "b": (1, 32)},
    }
    for layer in range(40):
        block = f"blocks.{layer}"
        yield f"{block}.modulation", (1, 6, 5120)
        for attention, extra in (("self_attn", ()), ("cross_attn", ("k_img", "v_img"))):
            parts |= {f"{block}.{attention}.{name}": wide for name in (*"qkvo", *extra)}
            for name in ("norm_q", "norm_k") + (("norm_k_img",) if extra else ()):
                yield f"{block}.{attention}.{name}.weight", (5120,)
        parts[f"{block}.norm3"] = norm
        parts[f"{block}.ffn.0"] = {"weight": (13824, 5120), "bias": (13824,)}
        parts[f"{block}.ffn.2"] = {"weight": (5120, 13824), "bias": (5120,)}
    yield "head.modulation", (1, 2, 5120)
    for module, shapes in parts.items():
        for part, shape in shapes.items():
            yield f"{module}.{part}", shape


def test_the_published_transformer_has_1317_tensors_and_16_484_292_448_parameters() -> None:
    with torch.device("meta"):
        model = DreamZeroTransformer()

    found = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}

    assert found == dict(expected_shapes())
    assert len(found) == 1317
    assert sum(parameter.numel() for parameter in model.parameters()) == 16_484_292_448


# ---------------------------------------------------------------------------------------------------- parts


def test_the_norm_of_queries_is_cast_before_it_is_weighed() -> None:
    norm = CastFirstRMSNorm(64, eps=1e-6)
    norm.weight.data = torch.randn(64, generator=seeded()).bfloat16()
    x = torch.randn(5, 64, generator=seeded(1)).bfloat16()

    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    assert torch.equal(norm(x), exact.float().bfloat16() * norm.weight)
    assert not torch.equal(norm(x), (exact * norm.weight.double()).float().bfloat16())


def test_modulation_is_rounded_at_every_step() -> None:
    x, shift, scale = (torch.randn(1, 9, 64, generator=seeded(seed)).bfloat16() for seed in range(3))

    found = modulate(layer_norm(x, 1e-6), shift, scale)

    normed = torch.nn.functional.layer_norm(x.float(), (64,), eps=1e-6).bfloat16()
    weighed = (normed.float() * (1 + scale.float()).bfloat16().float()).bfloat16()
    assert torch.equal(found, (weighed.float() + shift.float()).bfloat16())


@pytest.mark.parametrize(("start", "block"), [(0, 0), (1, 0), (2, 0), (3, 1), (5, 2), (7, 3)])
def test_the_first_frame_stands_in_front_of_block_0(start: int, block: int) -> None:
    assert block_index(start, 2) == block


@pytest.mark.parametrize("start", [0, 1, 7, 1023, 1_000_001])
def test_positions_of_frames_are_absolute_and_registers_have_a_line_of_their_own(start: int) -> None:
    block = block_index(start, 2)
    cos, sin = rotary(start, (2, 2, 3), 12, block=block, actions=4, states=1, device=CPU)

    expected = [oracle.video_angles(place, 12) for place in oracle.places(start, 2, 2, 3)]
    expected += [oracle.line_angles(4 * block + action, 12) for action in range(4)]
    expected += [oracle.line_angles(block, 12)]
    assert cos.dtype == torch.float64
    np.testing.assert_allclose(cos.numpy(), np.cos(expected), atol=1e-9)
    np.testing.assert_allclose(sin.numpy(), np.sin(expected), atol=1e-9)


def test_timesteps_of_actions_are_sines_first() -> None:
    found = sine_cosine(torch.tensor([[0.0, 2.0]]), 4)

    assert found[0, 0].tolist() == [0, 0, 1, 1]
    np.testing.assert_allclose(found[0, 1], [np.sin(2), np.sin(0.02), np.cos(2), np.cos(0.02)], atol=1e-6)


# ---------------------------------------------------------------------------------------------------- forwards


def check_denoise(model: PagedModel, reference: DenseRollout, start: int, timestep: int, seed: int) -> None:
    current = frames(start, 2, float(timestep), seed)
    beside = registers(float(timestep), seed)

    found = model.denoise(BRANCH, current, beside)

    video, action = reference.denoise(
        array(current.latents),
        array(current.condition),
        start,
        timestep=float(timestep),
        action=array(beside.action),
        action_timestep=float(timestep),
        state=array(beside.state),
    )
    assert found.action is not None
    np.testing.assert_allclose(array(found.video), video, atol=1e-5)
    np.testing.assert_allclose(array(found.action), action, atol=1e-5)


def check_prefill(model: PagedModel, reference: DenseRollout, start: int, count: int, seed: int) -> None:
    clean = frames(start, count, 0.0, seed)
    model.prefill(BRANCH, clean)
    reference.prefill(array(clean.latents), array(clean.condition), start)


def test_a_rollout_over_pages_equals_the_dense_formulas() -> None:
    model = tiny_model()
    paged, reference = PagedModel(model, session(model)), dense(model)

    check_prefill(paged, reference, 0, 1, 0)
    for step, timestep in enumerate((999, 416)):
        check_denoise(paged, reference, 1, timestep, 100 + step)
    for start in (3, 5, 7):
        check_prefill(paged, reference, start - 2, 2, start)
        for step, timestep in enumerate((999, 749, 0)):
            check_denoise(paged, reference, start, timestep, 10 * start + step)


def test_a_long_rollout_forgets_the_frames_that_left_the_window() -> None:
    model = tiny_model()
    paged, reference = PagedModel(model, session(model)), dense(model)

    check_prefill(paged, reference, 0, 1, 0)
    for start in range(1, 13, 2):
        check_prefill(paged, reference, start, 2, start)
    check_denoise(paged, reference, 13, 500, 99)


def test_a_denoise_leaves_nothing() -> None:
    model = tiny_model()
    kv = session(model)
    paged = PagedModel(model, kv)
    paged.prefill(BRANCH, frames(0, 1))
    free = cache_of(kv).pool.num_free

    first = paged.denoise(BRANCH, frames(1, 2, 999.0), registers())
    paged.denoise(BRANCH, frames(1, 2, 300.0, seed=50), registers(300.0))
    again = paged.denoise(BRANCH, frames(1, 2, 999.0), registers())

    assert torch.equal(first.video, again.video)
    assert kv.adapter(BRANCH).absolute_frames == 1
    assert cache_of(kv).pool.num_free == free


def test_registers_and_frames_may_have_timesteps_of_their_own() -> None:
    model = tiny_model()
    paged, reference = PagedModel(model, session(model)), dense(model)
    check_prefill(paged, reference, 0, 1, 0)
    current = frames(1, 2, torch.tensor([[900.0, 100.0]]))
    steps = (800.0, 600.0, 400.0, 200.0)

    found = paged.denoise(BRANCH, current, registers(torch.tensor([steps])))

    video, action = oracle.forward(
        arrays(model),
        oracle.Block(array(current.latents), array(current.condition), 1, (900.0, 100.0)),
        history=reference.history,
        registers=oracle.Registers(array(random_action()), steps, array(random_state())),
        text=array(random_text()),
        image=array(random_image()),
        sizes=SIZES,
    )
    assert found.action is not None
    assert action is not None
    np.testing.assert_allclose(array(found.video), video, atol=1e-5)
    np.testing.assert_allclose(array(found.action), action, atol=1e-5)


def test_text_and_image_are_attended_to_separately() -> None:
    model = tiny_model()

    def run(text: torch.Tensor, image: torch.Tensor) -> Flow:
        kv = make_state(tiny_spec())
        kv.populate_cross_attention(BRANCH, TEXT, model.project_text(text))
        kv.populate_cross_attention(BRANCH, IMAGE, model.project_image(image))
        return PagedModel(model, kv).denoise(BRANCH, frames(0, 2, 500.0), registers())

    base = run(random_text(), random_image()).video
    assert not torch.allclose(base, run(random_text(90), random_image()).video)
    assert not torch.allclose(base, run(random_text(), random_image(90)).video)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_forward_stays_in_the_model_s_type(dtype: torch.dtype) -> None:
    model = tiny_model(dtype=dtype)
    flow = call(model, action=random_action().to(dtype), action_timestep=5, state=random_state().to(dtype))

    assert (flow.video.dtype, flow.video.shape) == (dtype, (1, 16, 2, 4, 6))
    assert flow.action is not None
    assert (flow.action.dtype, flow.action.shape) == (dtype, (1, 4, 10))


# ---------------------------------------------------------------------------------------------------- bad input


class Present:
    """No past: attends to the present only."""

    def write_and_attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        extra_k: torch.Tensor | None = None,
        extra_v: torch.Tensor | None = None,
    ) -> torch.Tensor:
        keys = [part.transpose(1, 2) for part in (k, extra_k) if part is not None]
        values = [part.transpose(1, 2) for part in (v, extra_v) if part is not None]
        out = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), torch.cat(keys, dim=2), torch.cat(values, dim=2)
        )
        return out.transpose(1, 2)


def call(model: DreamZeroTransformer, **changes: Any) -> Flow:
    arguments: dict[str, Any] = {
        "latents": random_latents(2).to(model.dtype),
        "condition": random_condition(2).to(model.dtype),
        "start_frame": 1,
        "video_timestep": 500.0,
        "caches": [Present()] * MODEL.num_layers,
        "text_kv": list(model.project_text(random_text())),
        "image_kv": list(model.project_image(random_image())),
    }
    return model(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"latents": random_latents(2)[:, :15]}, "latents"),
        ({"latents": random_latents(2)[..., :5], "condition": random_condition(2)[..., :5]}, "latents"),
        ({"latents": random_latents(2).double()}, "latents"),
        ({"latents": random_latents(2).to("meta")}, "latents"),
        ({"latents": random_latents(2).expand(2, -1, -1, -1, -1)}, "latents"),
        ({"latents": None}, "latents"),
        ({"latents": random_latents(2)[..., :3, :], "condition": random_condition(2)[..., :3, :]}, "latents"),
        ({"condition": random_condition(1)}, "condition"),
        ({"condition": random_condition(2)[..., :5]}, "condition"),
        ({"condition": random_condition(2)[:, :16]}, "condition"),
        ({"start_frame": -1}, "start_frame"),
        ({"start_frame": True}, "start_frame"),
        ({"video_timestep": torch.zeros(2)}, "video_timestep"),
        ({"video_timestep": "500"}, "video_timestep"),
        ({"video_timestep": True}, "video_timestep"),
        ({"caches": []}, "caches"),
        ({"text_kv": []}, "text_kv"),
        ({"image_kv": iter(())}, "image_kv"),
        ({"state": random_state()}, "action"),
        ({"action": random_action(), "state": random_state()}, "action_timestep"),
        ({"action": random_action(), "action_timestep": 5}, "state"),
    ],
)
def test_a_wrong_argument_is_refused_by_its_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises((InvalidArgumentError, InvalidTypeError)) as caught:
        call(tiny_model(), **changes)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"action": random_action()[:, :3]}, "action"),
        ({"action": random_action()[..., :9]}, "action"),
        ({"state": random_state().expand(1, 2, -1)}, "state"),
        ({"state": random_state()[..., :11]}, "state"),
        ({"action_timestep": torch.zeros(1, 3)}, "action_timestep"),
    ],
)
def test_wrong_registers_are_refused_by_their_name(changes: dict[str, Any], field: str) -> None:
    good = {"action": random_action(), "action_timestep": 5.0, "state": random_state()}
    with pytest.raises(InvalidArgumentError) as caught:
        call(tiny_model(), **{**good, **changes})
    assert caught.value.field == field


@pytest.mark.parametrize("shape", [(2, 7, 10), (1, 7, 9), (7, 10)])
def test_text_has_one_sample_of_the_encoder_s_width(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        tiny_model().project_text(torch.zeros(shape))
    assert caught.value.field == "text"


@pytest.mark.parametrize("shape", [(1, 4, 8), (1, 5, 7), (2, 5, 8)])
def test_an_image_has_exactly_the_tokens_of_the_tower(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        tiny_model().project_image(torch.zeros(shape))
    assert caught.value.field == "image"


def test_frames_follow_the_past_of_their_branch() -> None:
    model = tiny_model()
    paged = PagedModel(model, session(model))

    with pytest.raises(KVStateError) as caught:
        paged.prefill(BRANCH, frames(1, 2))
    assert caught.value.field == "start_frame"


def test_frames_have_the_size_of_a_page() -> None:
    model = tiny_model()
    wide = Frames(torch.zeros(1, 16, 1, 4, 8), torch.zeros(1, 20, 1, 4, 8), 0, 0.0)

    with pytest.raises(KVStateError) as caught:
        PagedModel(model, session(model)).prefill(BRANCH, wide)
    assert caught.value.field == "latents"


def test_nothing_runs_before_text_and_image_are_there() -> None:
    model = tiny_model()
    kv = make_state(tiny_spec())
    kv.populate_cross_attention(BRANCH, TEXT, model.project_text(random_text()))

    with pytest.raises(KVStateError, match="image"):
        PagedModel(model, kv).prefill(BRANCH, frames(0, 1))
