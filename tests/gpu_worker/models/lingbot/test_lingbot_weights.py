"""A checkpoint directory: what is loaded, and what is refused by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from contracts.errors import ConfigurationError
from gpu_worker.models.lingbot_world.vae import wan_vae_class
from gpu_worker.models.lingbot_world.weights import Checkpoint, fill_module
from support.kv_cache import CPU
from support.lingbot_checkpoint import VAE_CONFIG, change_json, tiny_vae, write_checkpoint, write_json
from support.lingbot_model import random_weights, tiny_model

SHARD = "diffusion_pytorch_model-00001-of-00002.safetensors"
INDEX = "diffusion_pytorch_model.safetensors.index.json"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return shutil.copytree(written, tmp_path / "checkpoint")


def meta_vae() -> torch.nn.Module:
    with torch.device("meta"):
        return wan_vae_class().from_config(VAE_CONFIG)


def refused(action: Callable[[], object]) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as caught:
        action()
    assert "/tmp" not in caught.value.message
    return caught.value


def test_shards_give_every_weight_once(written: Path) -> None:
    weights = list(Checkpoint(written).weights("transformer"))

    expected = random_weights(tiny_model())
    assert sorted(name for name, _ in weights) == sorted(expected)
    assert all(torch.equal(value, expected[name]) for name, value in weights)


def test_a_module_without_memory_is_filled(written: Path) -> None:
    vae = meta_vae()

    fill_module(vae, Checkpoint(written).weights("vae"), "the VAE", device=CPU, dtype=torch.bfloat16)

    expected = tiny_vae().state_dict()
    assert {name: value.dtype for name, value in vae.state_dict().items()} == dict.fromkeys(
        expected, torch.bfloat16
    )
    assert all(torch.equal(vae.state_dict()[name], expected[name].bfloat16()) for name in expected)
    assert not any(value.requires_grad for value in vae.parameters())


@pytest.mark.parametrize("directory", [None, "", 7, "/nowhere/at/all"])
def test_a_directory_that_is_none_is_refused(directory: object) -> None:
    assert refused(lambda: Checkpoint(directory)).field == "checkpoint"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_class_name", "WanPipeline"),
        ("transformer", ["diffusers", "WanTransformer3DModel"]),
        ("vae", ["diffusers", "AutoencoderKL"]),
        ("text_encoder", None),
        ("tokenizer", ["transformers", 7]),
        ("scheduler", "UniPC"),
    ],
)
def test_another_component_is_refused_by_name(folder: Path, name: str, value: object) -> None:
    change_json(folder / "model_index.json", **{name: value})

    assert refused(lambda: Checkpoint(folder)).field == name


def drop_shard(folder: Path) -> None:
    (folder / "transformer" / SHARD).unlink()


def damage_shard(folder: Path) -> None:
    (folder / "transformer" / SHARD).write_bytes(b"\x10" * 100)


def move_weight(folder: Path) -> None:
    index = json.loads((folder / "transformer" / INDEX).read_text())
    index["weight_map"]["head.modulation"] = SHARD.replace("00001", "00002")
    index["weight_map"].pop("blocks.0.modulation")
    write_json(folder / "transformer" / INDEX, index)


def climb(folder: Path) -> None:
    change_json(folder / "transformer" / INDEX, weight_map={"head.modulation": "../vae/x.safetensors"})


def no_file_name(folder: Path) -> None:
    change_json(folder / "transformer" / INDEX, weight_map={"head.modulation": "\ud800.safetensors"})


def empty_index(folder: Path) -> None:
    change_json(folder / "transformer" / INDEX, weight_map={})


def no_index(folder: Path) -> None:
    (folder / "transformer" / INDEX).unlink()


def no_json(folder: Path) -> None:
    (folder / "transformer" / INDEX).write_text("{")


@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        (drop_shard, f"transformer/{SHARD}"),
        (damage_shard, f"transformer/{SHARD}"),
        (move_weight, "blocks.0.modulation"),
        (climb, "weight_map"),
        (no_file_name, "weight_map"),
        (empty_index, "weight_map"),
        (no_index, "transformer/diffusion_pytorch_model.safetensors"),
        (no_json, f"transformer/{INDEX}"),
    ],
)
def test_damaged_weights_are_refused(folder: Path, spoil: Callable[[Path], None], field: str) -> None:
    spoil(folder)

    assert refused(lambda: list(Checkpoint(folder).weights("transformer"))).field == field


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("decoder.conv_in.bias", "missing"),
        ("decoder.conv_in.bias", "shape"),
        ("decoder.conv_in.bias", "row"),
        ("decoder.conv_out.gamma", "unknown"),
    ],
)
def test_names_and_shapes_are_strict(folder: Path, name: str, change: str) -> None:
    file = folder / "vae" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    if change == "missing":
        del weights[name]
    elif change == "row":
        weights[name] = weights[name].unsqueeze(0)  # as many numbers
    else:
        weights[name] = torch.zeros(3)
    save_file(weights, file)

    error = refused(
        lambda: fill_module(
            meta_vae(), Checkpoint(folder).weights("vae"), "the VAE", device=CPU, dtype=torch.float32
        )
    )

    assert error.field == name


@pytest.mark.parametrize("content", [None, "[]", "{", "\xff"])
def test_a_configuration_that_is_none_is_refused(folder: Path, content: str | None) -> None:
    file = folder / "vae" / "config.json"
    file.unlink()
    if content is not None:
        file.write_text(content, encoding="latin-1")

    assert refused(lambda: Checkpoint(folder).config("vae")).field == "vae/config.json"
