"""What a forward accepts, and what it refuses by name."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from contracts.errors import InvalidArgumentError, InvalidTypeError, KVStateError
from gpu_worker.models.dreamzero.config import DreamZeroConfig, DreamZeroTransformerConfig
from gpu_worker.models.dreamzero.passes import Frames, PagedModel
from gpu_worker.models.dreamzero.spec import POSITIVE, TEXT, dreamzero_kv_spec, owned_bytes
from gpu_worker.models.dreamzero.transformer import DreamZeroTransformer, Flow
from support.dreamzero_model import (
    TINY,
    frames_at,
    random_action,
    random_condition,
    random_image,
    random_latents,
    random_state,
    random_text,
    tiny_model,
    tiny_session,
)
from support.kv_cache import make_state


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
        "caches": [Present()] * TINY.head.transformer.num_layers,
        "text_kv": list(model.project_text(random_text())),
        "image_kv": list(model.project_image(random_image())),
    }
    return model(**{**arguments, **changes})


def with_registers(model: DreamZeroTransformer) -> Flow:
    return call(
        model,
        latents=random_latents(2).bfloat16().to(model.dtype),
        condition=random_condition(2).bfloat16().to(model.dtype),
        action=random_action().bfloat16().to(model.dtype),
        action_timestep=5,
        state=random_state().bfloat16().to(model.dtype),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_forward_stays_in_the_model_s_type(dtype: torch.dtype) -> None:
    flow = with_registers(tiny_model(dtype=dtype))

    assert (flow.video.dtype, flow.video.shape) == (dtype, (1, 16, 2, 4, 6))
    assert flow.action is not None
    assert (flow.action.dtype, flow.action.shape) == (dtype, (1, 4, 10))


def test_half_precision_costs_a_hundredth() -> None:
    """Weights and inputs are the same numbers for both, so all that differs is rounding on the way."""
    rough = with_registers(tiny_model(dtype=torch.bfloat16))
    fine = with_registers(tiny_model(dtype=torch.bfloat16).double())

    for found, exact in zip(rough, fine, strict=True):
        assert found is not None
        assert exact is not None
        error = (found.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
        assert 0 < error < 0.02


class Sizes(Present):
    """Notes the tokens of queries, frames and registers of each layer."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, int]] = []

    def write_and_attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        extra_k: torch.Tensor | None = None,
        extra_v: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert q.shape[2:] == k.shape[2:] == (40, 128)
        self.seen.append((q.shape[1], k.shape[1], 0 if extra_k is None else extra_k.shape[1]))
        return super().write_and_attend(q, k, v, extra_k, extra_v)


@pytest.mark.parametrize(("frames", "registers", "tokens"), [(1, 0, 880), (2, 0, 1760), (2, 25, 1785)])
def test_the_published_model_takes_880_tokens_a_frame_and_25_registers(
    frames: int, registers: int, tokens: int
) -> None:
    config = replace(DreamZeroConfig(), transformer=replace(DreamZeroTransformerConfig(), num_layers=2))
    sizes = Sizes()
    with torch.device("meta"):
        model = DreamZeroTransformer(config).bfloat16()
        beside = {
            "action": torch.zeros(1, 24, 32, dtype=torch.bfloat16),
            "action_timestep": 500.0,
            "state": torch.zeros(1, 1, 64, dtype=torch.bfloat16),
        }
        flow = model(
            torch.zeros(1, 16, frames, 44, 80, dtype=torch.bfloat16),
            torch.zeros(1, 20, frames, 44, 80, dtype=torch.bfloat16),
            start_frame=1,
            video_timestep=500.0,
            caches=[sizes] * 2,
            text_kv=list(model.project_text(torch.zeros(1, 512, 4096))),
            image_kv=list(model.project_image(torch.zeros(1, 257, 1280))),
            **(beside if registers else {}),
        )

    assert sizes.seen == [(tokens, tokens - registers, registers)] * 2
    assert (flow.video.shape, flow.video.dtype) == ((1, 16, frames, 44, 80), torch.bfloat16)
    assert (flow.action is None) == (not registers)
    assert flow.action is None or flow.action.shape == (1, 24, 32)


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
    paged = PagedModel(model, tiny_session(model))

    with pytest.raises(KVStateError) as caught:
        paged.prefill(POSITIVE, frames_at(1, 2))
    assert caught.value.field == "start_frame"


def test_frames_have_the_size_of_a_page() -> None:
    model = tiny_model()
    wide = Frames(torch.zeros(1, 16, 1, 4, 8), torch.zeros(1, 20, 1, 4, 8), 0, 0.0)

    with pytest.raises(KVStateError) as caught:
        PagedModel(model, tiny_session(model)).prefill(POSITIVE, wide)
    assert caught.value.field == "latents"


def test_nothing_runs_before_text_and_image_are_there() -> None:
    model = tiny_model()
    kv = make_state(dreamzero_kv_spec(TINY, owned=owned_bytes(TINY, itemsize=4), session_capacity=1))
    kv.populate_cross_attention(POSITIVE, TEXT, model.project_text(random_text()))

    with pytest.raises(KVStateError, match="image"):
        PagedModel(model, kv).prefill(POSITIVE, frames_at(0, 1))
