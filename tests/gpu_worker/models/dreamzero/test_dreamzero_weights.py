"""A checkpoint directory: names, what is loaded from it, and what is refused by name."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from contracts.errors import ConfigurationError
from gpu_worker.models.dreamzero.checkpoint import PREFIXES, DreamZeroCheckpoint
from gpu_worker.models.dreamzero.config import DreamZeroTopology
from gpu_worker.models.dreamzero.parts import DreamZeroParts, empty_parts, load_parts
from gpu_worker.models.dreamzero.text import DreamZeroText
from gpu_worker.models.dreamzero.vae import wan_vae
from gpu_worker.models.dreamzero.weights import Part
from support.dreamzero_checkpoint import published_weights, write_checkpoint
from support.dreamzero_model import TINY
from support.dreamzero_oracles import text as text_oracle
from support.kv_cache import CPU
from support.lingbot_checkpoint import change_json, write_shards

INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00002.safetensors"
MODEL = "action_head.model."
TEXT = "action_head.text_encoder."
TOWER = "action_head.image_encoder.model.visual."
VAE = "action_head.vae.model."


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def loaded(written: Path) -> DreamZeroParts:
    return load(written)


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return shutil.copytree(written, tmp_path / "checkpoint")


@cache
def published_parts() -> dict[str, Part]:
    return empty_parts(DreamZeroTopology())


def load(folder: Path, dtype: torch.dtype = torch.float32) -> DreamZeroParts:
    return load_parts(DreamZeroCheckpoint(folder), TINY, device=CPU, dtype=dtype)


def refused(action: Callable[[], object]) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as caught:
        action()
    assert "/tmp" not in caught.value.message
    return caught.value


# ---------------------------------------------------------------------------------------------------- the published names


def text_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{TEXT}token_embedding.weight", (256_384, 4096)
    yield f"{TEXT}norm.weight", (4096,)
    for layer in range(24):
        block = f"{TEXT}blocks.{layer}"
        yield f"{block}.pos_embedding.embedding.weight", (32, 64)
        for name in ("norm1", "norm2"):
            yield f"{block}.{name}.weight", (4096,)
        for name in "qkvo":
            yield f"{block}.attn.{name}.weight", (4096, 4096)
        yield f"{block}.ffn.gate.0.weight", (10_240, 4096)
        yield f"{block}.ffn.fc1.weight", (10_240, 4096)
        yield f"{block}.ffn.fc2.weight", (4096, 10_240)


def tower_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
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


def convolution(name: str, out: int, inputs: int, *kernel: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{VAE}{name}.weight", (out, inputs, *kernel)
    yield f"{VAE}{name}.bias", (out,)


def residual(name: str, inputs: int, out: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{VAE}{name}.residual.0.gamma", (inputs, 1, 1, 1)
    yield from convolution(f"{name}.residual.2", out, inputs, 3, 3, 3)
    yield f"{VAE}{name}.residual.3.gamma", (out, 1, 1, 1)
    yield from convolution(f"{name}.residual.6", out, out, 3, 3, 3)
    if inputs != out:
        yield from convolution(f"{name}.shortcut", out, inputs, 1, 1, 1)


def frame(
    side: str, first: int, inner: int, last_width: int, last: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """What encoder and decoder have in common: their ends and their middle."""
    yield from convolution(f"{side}.conv1", inner if side == "decoder" else 96, first, 3, 3, 3)
    for index in (0, 2):
        yield from residual(f"{side}.middle.{index}", 384, 384)
    yield f"{VAE}{side}.middle.1.norm.gamma", (384, 1, 1)
    yield from convolution(f"{side}.middle.1.to_qkv", 1152, 384, 1, 1)
    yield from convolution(f"{side}.middle.1.proj", 384, 384, 1, 1)
    yield f"{VAE}{side}.head.0.gamma", (last_width, 1, 1, 1)
    yield from convolution(f"{side}.head.2", last, last_width, 3, 3, 3)


def vae_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
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
        ("the text encoder", text_shapes, 242, 5_680_910_336),
        ("the image tower", tower_shapes, 377, 611_086_080),
        ("the VAE", vae_shapes, 194, 126_892_531),
    ],
)
def test_the_published_parts_have_these_names_and_shapes(
    what: str, expected: Callable[[], Iterator[tuple[str, tuple[int, ...]]]], tensors: int, parameters: int
) -> None:
    part = published_parts()[what]

    own = dict(part.module.named_parameters(remove_duplicate=False))
    found = {name: tuple(own[inner].shape) for name, inner in part.names().items()}

    assert found == dict(expected())
    assert len(found) == tensors
    assert sum(math.prod(shape) for shape in found.values()) == parameters
    assert all(value.is_meta for value in own.values())


def test_the_published_transformer_stands_under_its_prefix() -> None:
    part = published_parts()["the transformer"]

    assert len(part.names()) == 1317
    assert all(name == MODEL + own for name, own in part.names().items())


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


# ---------------------------------------------------------------------------------------------------- loading


def test_every_weight_arrives_where_its_name_says(loaded: DreamZeroParts) -> None:
    published = published_weights()
    modules: dict[str, Any] = {
        "the transformer": loaded.transformer,
        "the text encoder": loaded.text._model,
        "the image tower": loaded.clip,
        "the VAE": loaded.vae,
    }

    for what, part in empty_parts(TINY).items():
        own = dict(modules[what].named_parameters(remove_duplicate=False))
        for name, inner in part.names().items():
            assert torch.equal(own[inner], published[name]), name
        assert not any(value.is_meta or value.requires_grad for value in own.values())


def test_weights_have_the_type_that_is_asked_for(written: Path) -> None:
    parts = load(written, torch.bfloat16)

    assert parts.transformer.dtype == torch.bfloat16
    assert parts.vae.dtype == torch.bfloat16
    assert parts.clip.cls_embedding.dtype == torch.bfloat16
    assert parts.text("snow falls").dtype == torch.bfloat16


def test_a_checkpoint_in_one_file_is_the_same(folder: Path, loaded: DreamZeroParts) -> None:
    for file in (*folder.glob("model-*.safetensors"), folder / INDEX):
        file.unlink()
    save_file(published_weights(), folder / "model.safetensors")

    found = load(folder)

    assert torch.equal(found.transformer.head.modulation, loaded.transformer.head.modulation)
    assert torch.equal(found.vae.quant_conv.weight, loaded.vae.quant_conv.weight)


def test_the_transformer_has_the_checkpoint_s_noise_settings(tmp_path: Path) -> None:
    parts = load(write_checkpoint(tmp_path, decouple_inference_noise=True, video_inference_final_noise=0.6))

    assert parts.config.decouple_inference_noise is True
    assert parts.transformer.config.video_inference_final_noise == 0.6


def test_what_nothing_uses_may_be_missing(folder: Path) -> None:
    unused = (f"{TOWER}head", f"{TOWER}post_norm.", f"{TOWER}transformer.2.")
    kept = {name: value for name, value in published_weights().items() if not name.startswith(unused)}
    assert len(kept) == len(published_weights()) - 15
    write_shards(folder, "model", kept, 2)

    assert load(folder).clip(torch.zeros(1, 3, 32, 48)).shape == (1, 5, 8)


# ---------------------------------------------------------------------------------------------------- text


@pytest.mark.parametrize(
    "prompt", ["snow", "a valley over the snow", "rain falls over the river and the snow"]
)
def test_prompts_are_embedded_by_the_formulas(loaded: DreamZeroParts, prompt: str) -> None:
    ids = list(loaded.text.token_ids(prompt))
    geometry, length = TINY.text, TINY.head.transformer.text_len
    weights = {
        name.removeprefix(TEXT): value.double().numpy()
        for name, value in published_weights().items()
        if name.startswith(TEXT)
    }

    expected = text_oracle.forward(
        weights,
        ids,
        length,
        layers=geometry.layers,
        heads=geometry.heads,
        buckets=geometry.buckets,
        most=geometry.max_distance,
    )
    found = loaded.text(prompt)
    assert found.shape == (1, length, 10)
    np.testing.assert_allclose(found[0].numpy(), expected, atol=1e-5)


def test_prompts_of_the_same_tokens_are_the_same(loaded: DreamZeroParts) -> None:
    text = loaded.text

    assert text.token_ids("snow  falls ") == text.token_ids("snow falls")
    assert text.token_ids("snow falls") != text.token_ids("falls snow")
    assert len(text.token_ids("a " * 50)) == TINY.head.transformer.text_len


def test_a_tokenizer_that_is_none_is_refused(folder: Path) -> None:
    (folder / "tokenizer" / "tokenizer.json").write_text("{")

    assert refused(lambda: load(folder)).field == "tokenizer"


def test_a_tokenizer_speaks_no_more_words_than_the_encoder(written: Path, loaded: DreamZeroParts) -> None:
    error = refused(lambda: DreamZeroText.open(loaded.text._model, written / "tokenizer", 20, 7))

    assert error.field == "vocab_size"


# ---------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("name", "what"),
    [
        (f"{MODEL}blocks.1.cross_attn.k_img.bias", "the transformer"),
        (f"{TEXT}blocks.0.ffn.gate.0.weight", "the text encoder"),
        (f"{TEXT}token_embedding.weight", "the text encoder"),
        (f"{TOWER}transformer.1.attn.to_qkv.bias", "the image tower"),
        (f"{VAE}decoder.upsamples.2.resample.1.weight", "the VAE"),
    ],
)
@pytest.mark.parametrize("change", ["missing", "shape"])
def test_a_weight_is_refused_by_its_published_name(folder: Path, name: str, what: str, change: str) -> None:
    weights = published_weights()
    old = weights.pop(name)
    if change == "shape":
        weights[name] = torch.zeros(*old.shape, 2)
    write_shards(folder, "model", weights, 2)

    error = refused(lambda: load(folder))

    assert error.field == name
    assert error.message.startswith(what)
    assert change in error.message
    assert name in error.message


@pytest.mark.parametrize("prefix", PREFIXES.values())
def test_a_weight_that_nobody_knows_is_refused_by_its_name(folder: Path, prefix: str) -> None:
    write_shards(folder, "model", published_weights() | {f"{prefix}more.weight": torch.zeros(1)}, 2)

    assert refused(lambda: load(folder)).field == f"{prefix}more.weight"


@pytest.mark.parametrize("name", ["action_head.other.weight", "backbone.weight", "blocks.0.modulation"])
def test_a_weight_of_no_part_is_refused_by_its_name(folder: Path, name: str) -> None:
    write_shards(folder, "model", published_weights() | {name: torch.zeros(1)}, 2)

    assert refused(lambda: DreamZeroCheckpoint(folder)).field == name


def test_names_are_checked_before_a_weight_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = published_weights()
    del weights[f"{VAE}conv1.bias"]
    write_shards(folder, "model", weights, 2)
    monkeypatch.setattr(DreamZeroCheckpoint, "read", lambda *_: pytest.fail("a weight was read"))

    assert refused(lambda: load(folder)).field == f"{VAE}conv1.bias"


def drop_shard(folder: Path) -> None:
    (folder / SHARD).unlink()


def damage_shard(folder: Path) -> None:
    (folder / SHARD).write_bytes(b"\x10" * 100)


def climb(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    change_json(folder / INDEX, weight_map=index | {f"{MODEL}head.modulation": "../x.safetensors"})


def move_weight(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    index[f"{MODEL}head.modulation"] = next(
        file for file in index.values() if file != index[f"{MODEL}head.modulation"]
    )
    change_json(folder / INDEX, weight_map=index)


def empty_index(folder: Path) -> None:
    change_json(folder / INDEX, weight_map={})


def no_index(folder: Path) -> None:
    (folder / INDEX).unlink()


def no_json(folder: Path) -> None:
    (folder / INDEX).write_text("{")


def list_for_config(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        (drop_shard, SHARD),
        (damage_shard, SHARD),
        (climb, "weight_map"),
        (move_weight, f"{MODEL}head.modulation"),
        (empty_index, "weight_map"),
        (no_index, "model.safetensors"),
        (no_json, INDEX),
        (list_for_config, "config.json"),
        (no_config, "config.json"),
    ],
)
def test_a_damaged_checkpoint_is_refused(folder: Path, spoil: Callable[[Path], None], field: str) -> None:
    spoil(folder)

    assert refused(lambda: load(folder)).field == field


def test_a_damaged_single_file_is_refused(folder: Path) -> None:
    no_index(folder)
    (folder / "model.safetensors").write_bytes(b"\x10" * 100)

    assert refused(lambda: load(folder)).field == "model.safetensors"


@pytest.mark.parametrize("directory", [None, "", 7, "/nowhere/at/all"])
def test_a_checkpoint_is_a_directory(directory: object) -> None:
    assert refused(lambda: DreamZeroCheckpoint(directory)).field == "checkpoint"
