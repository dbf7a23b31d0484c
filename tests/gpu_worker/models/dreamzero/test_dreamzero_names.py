"""The published checkpoint: every name and shape of its four parts."""

import math
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch

from gpu_worker.models.dreamzero.config import DreamZeroTopology
from gpu_worker.models.dreamzero.parts import empty_parts
from gpu_worker.models.dreamzero.vae import wan_vae
from gpu_worker.models.dreamzero.weights import Part

MODEL = "action_head.model."
TEXT_ENCODER = "action_head.text_encoder."
TOWER = "action_head.image_encoder.model.visual."
VAE = "action_head.vae.model."

Shapes = Iterator[tuple[str, tuple[int, ...]]]


@cache
def published_parts() -> dict[str, Part]:
    return empty_parts(DreamZeroTopology())


def transformer_shapes() -> Shapes:
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
        yield f"{MODEL}{block}.modulation", (1, 6, 5120)
        for attention, extra in (("self_attn", ()), ("cross_attn", ("k_img", "v_img"))):
            parts |= {f"{block}.{attention}.{name}": wide for name in (*"qkvo", *extra)}
            for name in ("norm_q", "norm_k") + (("norm_k_img",) if extra else ()):
                yield f"{MODEL}{block}.{attention}.{name}.weight", (5120,)
        parts[f"{block}.norm3"] = norm
        parts[f"{block}.ffn.0"] = {"weight": (13824, 5120), "bias": (13824,)}
        parts[f"{block}.ffn.2"] = {"weight": (5120, 13824), "bias": (5120,)}
    yield f"{MODEL}head.modulation", (1, 2, 5120)
    for module, shapes in parts.items():
        for part, shape in shapes.items():
            yield f"{MODEL}{module}.{part}", shape


def text_shapes() -> Shapes:
    yield f"{TEXT_ENCODER}token_embedding.weight", (256_384, 4096)
    yield f"{TEXT_ENCODER}norm.weight", (4096,)
    for layer in range(24):
        block = f"{TEXT_ENCODER}blocks.{layer}"
        yield f"{block}.pos_embedding.embedding.weight", (32, 64)
        for name in ("norm1", "norm2"):
            yield f"{block}.{name}.weight", (4096,)
        for name in "qkvo":
            yield f"{block}.attn.{name}.weight", (4096, 4096)
        yield f"{block}.ffn.gate.0.weight", (10_240, 4096)
        yield f"{block}.ffn.fc1.weight", (10_240, 4096)
        yield f"{block}.ffn.fc2.weight", (4096, 10_240)


def tower_shapes() -> Shapes:
    yield f"{TOWER}patch_embedding.weight", (1280, 3, 14, 14)
    yield f"{TOWER}cls_embedding", (1, 1, 1280)
    yield f"{TOWER}pos_embedding", (1, 257, 1280)
    linear = {
        "attn.to_qkv": (3840, 1280),
        "attn.proj": (1280, 1280),
        "mlp.0": (5120, 1280),
        "mlp.2": (1280, 5120),
    }
    for norm in ["pre_norm", *(f"transformer.{layer}.norm{n}" for layer in range(31) for n in (1, 2))]:
        yield f"{TOWER}{norm}.weight", (1280,)
        yield f"{TOWER}{norm}.bias", (1280,)
    for layer in range(31):
        for name, shape in linear.items():
            yield f"{TOWER}transformer.{layer}.{name}.weight", shape
            yield f"{TOWER}transformer.{layer}.{name}.bias", shape[:1]


def convolution(name: str, out: int, inputs: int, *kernel: int) -> Shapes:
    yield f"{VAE}{name}.weight", (out, inputs, *kernel)
    yield f"{VAE}{name}.bias", (out,)


def residual(name: str, inputs: int, out: int) -> Shapes:
    yield f"{VAE}{name}.residual.0.gamma", (inputs, 1, 1, 1)
    yield from convolution(f"{name}.residual.2", out, inputs, 3, 3, 3)
    yield f"{VAE}{name}.residual.3.gamma", (out, 1, 1, 1)
    yield from convolution(f"{name}.residual.6", out, out, 3, 3, 3)
    if inputs != out:
        yield from convolution(f"{name}.shortcut", out, inputs, 1, 1, 1)


def frame(side: str, first: int, inner: int, last_width: int, last: int) -> Shapes:
    """What encoder and decoder have in common: their ends and their middle."""
    yield from convolution(f"{side}.conv1", inner if side == "decoder" else 96, first, 3, 3, 3)
    for index in (0, 2):
        yield from residual(f"{side}.middle.{index}", 384, 384)
    yield f"{VAE}{side}.middle.1.norm.gamma", (384, 1, 1)
    yield from convolution(f"{side}.middle.1.to_qkv", 1152, 384, 1, 1)
    yield from convolution(f"{side}.middle.1.proj", 384, 384, 1, 1)
    yield f"{VAE}{side}.head.0.gamma", (last_width, 1, 1, 1)
    yield from convolution(f"{side}.head.2", last, last_width, 3, 3, 3)


def vae_shapes() -> Shapes:
    yield from convolution("conv1", 32, 32, 1, 1, 1)
    yield from convolution("conv2", 16, 16, 1, 1, 1)
    yield from frame("encoder", 3, 384, 384, 32)
    yield from frame("decoder", 16, 384, 96, 3)
    down = {
        0: (96, 96),
        1: (96, 96),
        3: (96, 192),
        4: (192, 192),
        6: (192, 384),
        7: (384, 384),
        9: (384, 384),
        10: (384, 384),
    }
    up = {0: (384, 384), 1: (384, 384), 2: (384, 384), 4: (192, 384), 5: (384, 384), 6: (384, 384)}
    up |= {8: (192, 192), 9: (192, 192), 10: (192, 192), 12: (96, 96), 13: (96, 96), 14: (96, 96)}
    for index, (inputs, out) in down.items():
        yield from residual(f"encoder.downsamples.{index}", inputs, out)
    for index, (inputs, out) in up.items():
        yield from residual(f"decoder.upsamples.{index}", inputs, out)
    for index, width, timed in ((2, 96, False), (5, 192, True), (8, 384, True)):
        yield from convolution(f"encoder.downsamples.{index}.resample.1", width, width, 3, 3)
        if timed:
            yield from convolution(f"encoder.downsamples.{index}.time_conv", width, width, 3, 1, 1)
    for index, width, timed in ((3, 384, True), (7, 384, True), (11, 192, False)):
        yield from convolution(f"decoder.upsamples.{index}.resample.1", width // 2, width, 3, 3)
        if timed:
            yield from convolution(f"decoder.upsamples.{index}.time_conv", 2 * width, width, 3, 1, 1)


@pytest.mark.parametrize(
    ("what", "expected", "tensors", "parameters"),
    [
        ("the transformer", transformer_shapes, 1317, 16_484_292_448),
        ("the text encoder", text_shapes, 242, 5_680_910_336),
        ("the image tower", tower_shapes, 377, 611_086_080),
        ("the VAE", vae_shapes, 194, 126_892_531),
    ],
)
def test_the_published_parts_have_these_names_and_shapes(
    what: str, expected: Callable[[], Shapes], tensors: int, parameters: int
) -> None:
    part = published_parts()[what]

    own = dict(part.module.named_parameters(remove_duplicate=False))
    found = {name: tuple(own[inner].shape) for name, inner in part.names().items()}

    assert found == dict(expected())
    assert len(found) == tensors
    assert sum(math.prod(shape) for shape in found.values()) == parameters
    assert all(value.is_meta for value in own.values())


@pytest.mark.parametrize(
    ("published", "own"),
    [
        ("conv1.weight", "quant_conv.weight"),
        ("conv2.bias", "post_quant_conv.bias"),
        ("encoder.conv1.weight", "encoder.conv_in.weight"),
        ("decoder.head.0.gamma", "decoder.norm_out.gamma"),
        ("decoder.head.2.bias", "decoder.conv_out.bias"),
        ("encoder.middle.1.to_qkv.weight", "encoder.mid_block.attentions.0.to_qkv.weight"),
        ("decoder.middle.2.residual.6.weight", "decoder.mid_block.resnets.1.conv2.weight"),
        ("encoder.downsamples.3.shortcut.weight", "encoder.down_blocks.3.conv_shortcut.weight"),
        ("encoder.downsamples.9.residual.3.gamma", "encoder.down_blocks.9.norm2.gamma"),
        ("decoder.upsamples.2.residual.0.gamma", "decoder.up_blocks.0.resnets.2.norm1.gamma"),
        ("decoder.upsamples.3.time_conv.bias", "decoder.up_blocks.0.upsamplers.0.time_conv.bias"),
        ("decoder.upsamples.7.resample.1.weight", "decoder.up_blocks.1.upsamplers.0.resample.1.weight"),
        ("decoder.upsamples.14.residual.2.weight", "decoder.up_blocks.3.resnets.2.conv1.weight"),
    ],
)
def test_the_vae_s_names_are_told_apart(published: str, own: str) -> None:
    assert published_parts()["the VAE"].names()[VAE + published] == own


def test_the_vae_scales_its_latents_as_published() -> None:
    with torch.device("meta"):
        config = wan_vae(DreamZeroTopology().vae).config

    mean = [-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508]
    mean += [0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921]
    std = [2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743]
    std += [3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160]
    assert (list(config.latents_mean), list(config.latents_std)) == (mean, std)
