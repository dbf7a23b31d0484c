"""The transformer: rounding, positions, and forwards over paged KV against a dense oracle of the formulas."""

import numpy as np
import pytest
import torch

from gpu_worker.models.dreamzero.attention import CastFirstRMSNorm
from gpu_worker.models.dreamzero.blocks import layer_norm, modulate
from gpu_worker.models.dreamzero.passes import PagedModel
from gpu_worker.models.dreamzero.registers import sine_cosine
from gpu_worker.models.dreamzero.rope import block_index, rotary
from gpu_worker.models.dreamzero.spec import POSITIVE
from gpu_worker.models.dreamzero.transformer import DreamZeroTransformer, Flow
from support.dreamzero_model import (
    SIZES,
    array,
    arrays,
    frames_at,
    random_action,
    random_image,
    random_state,
    random_text,
    registers,
    tiny_model,
    tiny_session,
)
from support.dreamzero_oracles import transformer as oracle
from support.dreamzero_oracles.rollout import DenseRollout
from support.kv_cache import CPU, cache_of
from support.lingbot_model import seeded


def dense(model: DreamZeroTransformer) -> DenseRollout:
    return DenseRollout(arrays(model), SIZES, array(random_text()), array(random_image()))


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
    current = frames_at(start, 2, float(timestep), seed)
    beside = registers(float(timestep), seed)

    found = model.denoise(POSITIVE, current, beside)

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
    clean = frames_at(start, count, 0.0, seed)
    model.prefill(POSITIVE, clean)
    reference.prefill(array(clean.latents), array(clean.condition), start)


def test_a_rollout_over_pages_equals_the_dense_formulas() -> None:
    model = tiny_model()
    paged, reference = PagedModel(model, tiny_session(model)), dense(model)

    check_prefill(paged, reference, 0, 1, 0)
    for step, timestep in enumerate((999, 416)):
        check_denoise(paged, reference, 1, timestep, 100 + step)
    for start in (3, 5, 7):
        check_prefill(paged, reference, start - 2, 2, start)
        for step, timestep in enumerate((999, 749, 0)):
            check_denoise(paged, reference, start, timestep, 10 * start + step)


def test_a_long_rollout_forgets_the_frames_that_left_the_window() -> None:
    model = tiny_model()
    paged, reference = PagedModel(model, tiny_session(model)), dense(model)

    check_prefill(paged, reference, 0, 1, 0)
    for start in range(1, 13, 2):
        check_prefill(paged, reference, start, 2, start)
    check_denoise(paged, reference, 13, 500, 99)


def test_a_denoise_leaves_nothing() -> None:
    model = tiny_model()
    kv = tiny_session(model)
    paged = PagedModel(model, kv)
    paged.prefill(POSITIVE, frames_at(0, 1))
    free = cache_of(kv).pool.num_free

    first = paged.denoise(POSITIVE, frames_at(1, 2, 999.0), registers())
    paged.denoise(POSITIVE, frames_at(1, 2, 300.0, seed=50), registers(300.0))
    again = paged.denoise(POSITIVE, frames_at(1, 2, 999.0), registers())

    assert torch.equal(first.video, again.video)
    assert kv.adapter(POSITIVE).absolute_frames == 1
    assert cache_of(kv).pool.num_free == free


def test_registers_and_frames_may_have_timesteps_of_their_own() -> None:
    model = tiny_model()
    paged, reference = PagedModel(model, tiny_session(model)), dense(model)
    check_prefill(paged, reference, 0, 1, 0)
    current = frames_at(1, 2, torch.tensor([[900.0, 100.0]]))
    steps = (800.0, 600.0, 400.0, 200.0)

    found = paged.denoise(POSITIVE, current, registers(torch.tensor([steps])))

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

    def run(**seen: torch.Tensor) -> Flow:
        kv = tiny_session(model, **seen)
        return PagedModel(model, kv).denoise(POSITIVE, frames_at(0, 2, 500.0), registers())

    base = run().video
    assert not torch.allclose(base, run(text=random_text(90)).video)
    assert not torch.allclose(base, run(image=random_image(90)).video)
