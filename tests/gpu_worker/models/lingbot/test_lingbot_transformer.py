"""The transformer: names, shapes, and one forward against an oracle of its formulas."""

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from contracts.errors import ConfigurationError, InvalidArgumentError, InvalidTypeError
from gpu_worker.models.lingbot_world.attention import TextKV, WideRMSNorm
from gpu_worker.models.lingbot_world.blocks import Head, patchify, unpatchify
from gpu_worker.models.lingbot_world.config import CLASS_NAME, LingBotTransformerConfig
from gpu_worker.models.lingbot_world.contiguous import ContiguousKV
from gpu_worker.models.lingbot_world.rope import axis_widths, rotary, rotate
from gpu_worker.models.lingbot_world.spec import owned_bytes
from gpu_worker.models.lingbot_world.transformer import (
    CausalLingBotWorldTransformer3DModel,
    UnknownWeightError,
)
from support.kv_cache import CPU
from support.lingbot_model import (
    HEIGHT,
    TINY,
    WIDTH,
    arrays,
    random_camera,
    random_condition,
    random_text,
    random_weights,
    seeded,
    tiny_model,
)
from support.lingbot_oracles import transformer as oracle


def tiny_past(config: LingBotTransformerConfig = TINY) -> ContiguousKV:
    return ContiguousKV(
        config.num_layers, 6, sink_frames=config.sink_size, visible_frames=config.sliding_window_num_frames
    )


def full_latents(seed: int = 5, *, batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, 36, 3, HEIGHT // 8, WIDTH // 8, generator=seeded(seed))


def run(
    model: CausalLingBotWorldTransformer3DModel,
    past: ContiguousKV,
    start: int,
    *,
    update: bool,
    timestep: Any = 500.0,
    seed: int = 5,
) -> torch.Tensor:
    chunk = model.prepare_chunk(random_camera(seed=seed), start)
    layers = past.begin(start, 3, update_cache=update)
    flow = model(
        full_latents(seed), timestep, chunk=chunk, kv=layers, text=list(model.text_kv(random_text()))
    )
    past.end()
    return flow


# ---------------------------------------------------------------------------------------------------- checkpoint


def expected_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every name and shape of the published checkpoint."""
    wide = {"weight": (5120, 5120), "bias": (5120,)}
    linear = {
        "patch_embedding": {"weight": (5120, 36, 1, 2, 2), "bias": (5120,)},
        "patch_embedding_wancamctrl": {"weight": (5120, 1536), "bias": (5120,)},
        "c2ws_hidden_states_layer1": wide,
        "c2ws_hidden_states_layer2": wide,
        "text_embedding.0": {"weight": (5120, 4096), "bias": (5120,)},
        "text_embedding.2": wide,
        "time_embedding.0": {"weight": (5120, 256), "bias": (5120,)},
        "time_embedding.2": wide,
        "time_projection.1": {"weight": (30720, 5120), "bias": (30720,)},
        "head.head": {"weight": (64, 5120), "bias": (64,)},
    }
    for layer in range(40):
        block = f"blocks.{layer}"
        yield f"{block}.modulation", (1, 6, 5120)
        for attention in ("self_attn", "cross_attn"):
            linear |= {f"{block}.{attention}.{name}": wide for name in "qkvo"}
            yield f"{block}.{attention}.norm_q.weight", (5120,)
            yield f"{block}.{attention}.norm_k.weight", (5120,)
        linear[f"{block}.norm3"] = {"weight": (5120,), "bias": (5120,)}
        linear[f"{block}.ffn.0"] = {"weight": (13824, 5120), "bias": (13824,)}
        linear[f"{block}.ffn.2"] = {"weight": (5120, 13824), "bias": (5120,)}
        for name in ("injector_layer1", "injector_layer2", "scale_layer", "shift_layer"):
            linear[f"{block}.cam_{name}"] = wide
    yield "head.modulation", (1, 2, 5120)
    for module, parts in linear.items():
        for part, shape in parts.items():
            yield f"{module}.{part}", shape


def test_the_published_topology_has_1421_tensors_and_18_544_332_864_parameters() -> None:
    model = CausalLingBotWorldTransformer3DModel.from_config({})

    found = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}

    assert found == dict(expected_shapes())
    assert len(found) == 1421
    assert sum(parameter.numel() for parameter in model.parameters()) == 18_544_332_864
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_checkpoint_s_config_in_json_is_the_published_topology() -> None:
    stored = {
        "_class_name": CLASS_NAME,
        "_diffusers_version": "0.36.0",
        "patch_size": [1, 2, 2],
        "num_attention_heads": 40,
        "attention_head_dim": 128,
        "in_channels": 36,
        "out_channels": 16,
        "text_dim": 4096,
        "freq_dim": 256,
        "ffn_dim": 13824,
        "num_layers": 40,
        "cross_attn_norm": True,
        "eps": 1e-06,
        "image_dim": None,
        "added_kv_proj_dim": None,
        "pos_embed_seq_len": None,
        "rope_max_seq_len": 1024,
        "qk_norm": "rms_norm_across_heads",
        "sink_size": 9,
        "num_frames_per_block": 3,
        "sliding_window_num_frames": 18,
        "local_attn_size": -1,
    }

    assert LingBotTransformerConfig.from_checkpoint(stored) == LingBotTransformerConfig()
    assert (LingBotTransformerConfig().dim, LingBotTransformerConfig().window_frames) == (5120, 9)


@pytest.mark.parametrize("field", [field.name for field in fields(LingBotTransformerConfig)])
def test_a_config_that_drifts_is_refused_by_the_field(field: str) -> None:
    other = {"patch_size": [1, 2, 1], "qk_norm": "rms_norm", "cross_attn_norm": 1}.get(field, 7)

    with pytest.raises(ConfigurationError, match=field) as caught:
        CausalLingBotWorldTransformer3DModel.from_config({field: other})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("config", "field"), [({"patch_size": 1}, "patch_size"), ({"_class_name": "Other"}, "_class_name")]
)
def test_a_config_of_another_kind_is_refused(config: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        LingBotTransformerConfig.from_checkpoint(config)
    assert caught.value.field == field


def test_a_config_is_a_mapping() -> None:
    with pytest.raises(InvalidTypeError, match="mapping"):
        LingBotTransformerConfig.from_checkpoint([])  # type: ignore[arg-type]


def test_weights_come_in_parts_and_the_missing_one_is_named() -> None:
    model = CausalLingBotWorldTransformer3DModel.from_config({}, pinned=TINY)
    weights = list(random_weights(model).items())

    assert model.load_weights(weights[:-1], device=CPU, dtype=torch.float64) == {n for n, _ in weights[:-1]}
    with pytest.raises(ConfigurationError, match="missing") as caught:
        model.check_loaded()
    assert caught.value.field == weights[-1][0]

    model.load_weights(weights[-1:], device=CPU, dtype=torch.float64)
    model.check_loaded()
    assert model.dtype == torch.float64
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_an_unknown_weight_is_a_key_error_that_names_it() -> None:
    with pytest.raises(KeyError) as caught:
        tiny_model().load_weights([("blocks.0.more", torch.zeros(1))], device=CPU, dtype=torch.float32)
    assert isinstance(caught.value, UnknownWeightError)
    assert caught.value.field == "blocks.0.more"


@pytest.mark.parametrize("shape", [(3,), (1, 64), ()])
def test_a_weight_of_another_shape_is_refused_by_name(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError, match="shape") as caught:
        tiny_model().load_weights([("head.head.bias", torch.zeros(shape))], device=CPU, dtype=torch.float32)
    assert caught.value.field == "head.head.bias"


# ---------------------------------------------------------------------------------------------------- parts


def test_the_norm_of_queries_spans_all_heads() -> None:
    norm = WideRMSNorm(2, eps=0.0)
    norm.weight.data = torch.tensor([1.0, 2.0])

    found = norm(torch.tensor([[3.0, 4.0]]))

    torch.testing.assert_close(found, torch.tensor([[3.0, 8.0]]) / 12.5**0.5)


def test_the_norm_weighs_in_float32_and_casts_last() -> None:
    norm = WideRMSNorm(64, eps=1e-6)
    norm.weight.data = torch.randn(64, generator=seeded())
    x = torch.randn(5, 64, generator=seeded(1)).bfloat16()

    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()
    assert torch.equal(norm(x), exact.float().bfloat16())


def test_the_head_is_modulated_frame_by_frame() -> None:
    head = Head(TINY)
    embedding = torch.tensor([10.0, 20.0]).view(1, 2, 1).expand(1, 2, TINY.dim)

    found = head.modulated(torch.ones(1, 4, TINY.dim), embedding)

    assert found[0, :, 0].tolist() == [21, 21, 41, 41]


def test_patches_are_read_channel_first_and_written_channel_last() -> None:
    x = torch.arange(2 * 3 * 4 * 6, dtype=torch.float32).view(1, 2, 3, 4, 6)

    tokens = patchify(x, (1, 2, 2))

    assert tokens.shape == (1, 18, 8)
    assert tokens[0, 0].tolist() == [0, 1, 6, 7, 72, 73, 78, 79]  # (c, row, column)
    assert torch.equal(tokens, torch.from_numpy(oracle.patches(x[0].numpy())).unsqueeze(0))
    channel_last = tokens.unflatten(2, (2, 4)).transpose(2, 3).flatten(2)
    assert torch.equal(unpatchify(channel_last, (3, 2, 3), (1, 2, 2)), x)


def test_patches_may_span_frames() -> None:
    x = torch.randn(2, 3, 4, 6, 8, generator=seeded())

    channel_last = patchify(x, (2, 3, 4)).unflatten(2, (3, 24)).transpose(2, 3).flatten(2)

    assert torch.equal(unpatchify(channel_last, (2, 2, 2), (2, 3, 4)), x)


def test_a_head_of_128_gives_44_to_time_and_42_to_each_side() -> None:
    assert axis_widths(128) == (44, 42, 42)


@pytest.mark.parametrize("start", [0, 3, 1023, 4096, 1_000_002])
def test_positions_are_absolute_in_time_at_any_distance_and_restart_in_every_frame(start: int) -> None:
    cos, sin = rotary(start, 3, 2, 3, 12, device=CPU, dtype=torch.float32)

    frequencies = [10_000.0 ** (-2 * j / 4) for j in range(2)]
    for token, place in enumerate(oracle.places(start, 3, 2, 3)):
        angles = np.array([position * f for position in place for f in frequencies])
        assert np.array_equal(cos[token].numpy(), np.cos(angles).astype(np.float32))
        assert np.array_equal(sin[token].numpy(), np.sin(angles).astype(np.float32))


def test_neighbouring_values_turn_together() -> None:
    x = torch.randn(1, 18, 2, 12, generator=seeded(), dtype=torch.float64)

    found = rotate(x, rotary(7, 3, 2, 3, 12, device=CPU, dtype=torch.float64))

    np.testing.assert_allclose(
        found[0].numpy(), oracle.rope(x[0].numpy(), oracle.places(7, 3, 2, 3)), atol=1e-6
    )


# ---------------------------------------------------------------------------------------------------- one forward


@pytest.mark.parametrize(("blocks", "timestep"), [(0, 1000.0), (1, 833.25), (7, 0.0)])
def test_a_forward_equals_the_formulas_with_and_without_a_past(blocks: int, timestep: float) -> None:
    model, past = tiny_model(), tiny_past()
    weights = arrays(model)
    kept: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in range(TINY.num_layers)]
    shape = {"layers": TINY.num_layers, "heads": TINY.num_attention_heads, "freq_dim": TINY.freq_dim}
    for block in range(blocks + 1):
        last = block == blocks
        step = timestep if last else 0.0
        found = run(model, past, 3 * block, update=not last, timestep=step, seed=block)
        visible = [_visible(frames) for frames in kept]
        expected, new = oracle.forward(
            weights,
            full_latents(block)[0].double().numpy(),
            step,
            camera=random_camera(seed=block)[0].double().numpy(),
            text=random_text()[0].double().numpy(),
            start_frame=3 * block,
            past=visible,
            **shape,
        )
        np.testing.assert_allclose(found[0].numpy(), expected, atol=1e-5)
        for layer, (k, v) in enumerate(new):
            kept[layer] += zip(np.split(k, 3), np.split(v, 3), strict=True)


def test_every_norm_has_the_eps_of_the_configuration() -> None:
    wide = replace(TINY, eps=0.5)  # 1e-6 is lost beside the variance of random tokens
    model = tiny_model(wide)

    found = run(model, tiny_past(), 0, update=False)

    nothing = np.zeros((0, wide.num_attention_heads, wide.attention_head_dim))
    expected, _ = oracle.forward(
        arrays(model),
        full_latents()[0].double().numpy(),
        500.0,
        camera=random_camera(seed=5)[0].double().numpy(),
        text=random_text()[0].double().numpy(),
        start_frame=0,
        past=[(nothing, nothing)] * wide.num_layers,
        layers=wide.num_layers,
        heads=wide.num_attention_heads,
        freq_dim=wide.freq_dim,
        eps=wide.eps,
    )
    np.testing.assert_allclose(found[0].numpy(), expected, atol=1e-5)


def _visible(frames: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """What a block of three sees of the frames before it: all of up to 15, else the first 9 and the last 6."""
    seen = frames if len(frames) <= 15 else frames[:9] + frames[-6:]
    empty = np.zeros((0, TINY.num_attention_heads, TINY.attention_head_dim))
    return np.concatenate([empty, *(k for k, _ in seen)]), np.concatenate([empty, *(v for _, v in seen)])


@pytest.mark.parametrize(
    "timestep", [500, torch.tensor(500.0), torch.tensor([500]), torch.full((1, 3), 500.0)]
)
def test_a_timestep_is_one_number_one_a_sample_or_one_a_frame(timestep: Any) -> None:
    model = tiny_model()

    assert torch.equal(
        run(model, tiny_past(), 0, update=False, timestep=timestep), run(model, tiny_past(), 0, update=False)
    )


def test_frames_may_have_timesteps_of_their_own() -> None:
    model = tiny_model()
    steps = torch.tensor([[1000.0, 500.0, 0.0]])

    mixed = run(model, tiny_past(), 0, update=False, timestep=steps)

    assert not torch.allclose(mixed, run(model, tiny_past(), 0, update=False, timestep=500.0))


@pytest.mark.parametrize("timestep", [True, "500", None])
def test_a_timestep_of_another_kind_is_refused(timestep: Any) -> None:
    with pytest.raises(InvalidTypeError, match="timestep"):
        run(tiny_model(), tiny_past(), 0, update=False, timestep=timestep)


@pytest.mark.parametrize("shape", [(2,), (1, 2), (3, 1), (1, 3, 1)])
def test_a_timestep_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgumentError, match="timestep"):
        run(tiny_model(), tiny_past(), 0, update=False, timestep=torch.zeros(shape))


@pytest.mark.parametrize("start", [True, -1, 1.0, None])
def test_a_start_frame_is_an_integer_from_0(start: Any) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        tiny_model().prepare_chunk(random_camera(), start)
    assert caught.value.field == "start_frame"


@pytest.mark.parametrize(
    "camera",
    [
        random_camera(2),
        random_camera(6),
        torch.zeros(1, 383, 3, 4, 6),
        torch.zeros(384, 3, 4, 6),
        torch.zeros(1, 384, 3, 4, 5),
        torch.zeros(0, 384, 3, 4, 6),
        random_camera().double(),
        random_camera().to("meta"),
    ],
)
def test_a_camera_is_of_exactly_three_frames_of_whole_patches(camera: torch.Tensor) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        tiny_model().prepare_chunk(camera, 0)
    assert caught.value.field == "camera"


def test_a_camera_is_a_tensor() -> None:
    with pytest.raises(InvalidTypeError, match="camera"):
        tiny_model().prepare_chunk(np.zeros((1, 384, 3, 4, 6)), 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "latents",
    [
        full_latents()[:, :, :2],
        full_latents()[:, :35],
        full_latents(batch=2),
        full_latents().repeat(1, 1, 1, 2, 1),
        full_latents().double(),
    ],
)
def test_latents_must_fit_model_and_camera(latents: torch.Tensor) -> None:
    model = tiny_model()
    chunk = model.prepare_chunk(random_camera(), 0)
    layers = tiny_past().begin(0, 3, update_cache=False)

    with pytest.raises(InvalidArgumentError) as caught:
        model(latents, 0.0, chunk=chunk, kv=layers, text=list(model.text_kv(random_text())))
    assert caught.value.field == "latents"


@pytest.mark.parametrize("missing", ["kv", "text"])
def test_every_layer_needs_a_past_and_a_text(missing: str) -> None:
    model = tiny_model()
    inputs: dict[str, Any] = {
        "kv": tiny_past().begin(0, 3, update_cache=False),
        "text": list(model.text_kv(random_text())),
    }
    inputs[missing] = inputs[missing][:1]

    with pytest.raises(InvalidArgumentError) as caught:
        model(full_latents(), 0.0, chunk=model.prepare_chunk(random_camera(), 0), **inputs)
    assert caught.value.field == missing


# ---------------------------------------------------------------------------------------------------- once


def test_what_a_chunk_shares_takes_the_bytes_that_are_declared() -> None:
    chunk = tiny_model().prepare_chunk(random_camera(), 0)

    declared = owned_bytes(HEIGHT, WIDTH, transformer=TINY, itemsize=4)
    assert chunk.camera_bytes == declared.camera_modulation


def test_the_camera_is_modulated_once_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    model, past = tiny_model(), tiny_past()
    calls: list[int] = []
    for block in model.blocks:
        block.cam_scale_layer.register_forward_hook(lambda *_: calls.append(1))
    chunk = model.prepare_chunk(random_camera(), 0)
    assert len(calls) == TINY.num_layers

    text = list(model.text_kv(random_text()))
    for _ in range(5):
        model(full_latents(), 0.0, chunk=chunk, kv=past.begin(0, 3, update_cache=True), text=text)
        past.end()

    assert len(calls) == TINY.num_layers


def test_only_layers_without_text_are_projected() -> None:
    model = tiny_model()
    whole = list(model.text_kv(random_text()))
    other: TextKV = (torch.zeros(1), torch.zeros(1))

    partial = list(model.text_kv(random_text(), [other, None]))

    assert partial[0] is other
    assert all(torch.equal(a, b) for a, b in zip(partial[1], whole[1], strict=True))


@pytest.mark.parametrize("shape", [(1, 5, 9), (5, 10)])
def test_text_has_the_encoder_s_width(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgumentError, match="text"):
        list(tiny_model().text_kv(torch.zeros(shape)))


def test_samples_of_a_batch_do_not_mix() -> None:
    model = tiny_model()
    camera, latents, text = random_camera(batch=2), full_latents(batch=2), random_text(batch=2)

    def forward(pick: slice) -> torch.Tensor:
        chunk = model.prepare_chunk(camera[pick], 0)
        layers = tiny_past().begin(0, 3, update_cache=False)
        return model(latents[pick], 700.0, chunk=chunk, kv=layers, text=list(model.text_kv(text[pick])))

    both = forward(slice(0, 2))

    torch.testing.assert_close(both, torch.cat((forward(slice(0, 1)), forward(slice(1, 2)))))


def test_bfloat16_stays_close_to_float32() -> None:
    exact, model = run(tiny_model(), tiny_past(), 0, update=False), tiny_model(dtype=torch.bfloat16)
    chunk = model.prepare_chunk(random_camera(seed=5).bfloat16(), 0)
    layers = tiny_past().begin(0, 3, update_cache=False)

    rounded = model(
        full_latents().bfloat16(), 500.0, chunk=chunk, kv=layers, text=list(model.text_kv(random_text()))
    )

    assert rounded.dtype == torch.bfloat16
    assert (rounded.float() - exact).norm() / exact.norm() < 0.05


def test_other_sinks_and_windows_are_other_topologies() -> None:
    small = replace(TINY, sink_size=3, sliding_window_num_frames=9)

    assert small.window_frames == 6
    with pytest.raises(ConfigurationError, match="sink_size"):
        LingBotTransformerConfig.from_checkpoint({"sink_size": 9}, small)


def test_a_condition_and_noise_make_up_the_input_channels() -> None:
    assert random_condition().shape[1] + TINY.out_channels == TINY.in_channels
