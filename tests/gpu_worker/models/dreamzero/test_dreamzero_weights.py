"""A checkpoint directory: names, what is loaded from it, and what is refused by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from contracts.errors import ConfigurationError
from gpu_worker.models.dreamzero.checkpoint import PREFIXES, DreamZeroCheckpoint
from gpu_worker.models.dreamzero.parts import DreamZeroParts, empty_parts, load_parts
from gpu_worker.models.dreamzero.text import DreamZeroText
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


def load(folder: Path, dtype: torch.dtype = torch.float32) -> DreamZeroParts:
    return load_parts(DreamZeroCheckpoint(folder), TINY, device=CPU, dtype=dtype)


def refused(action: Callable[[], object]) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as caught:
        action()
    assert "/tmp" not in caught.value.message
    return caught.value


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


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e4m3fn])
def test_a_weight_of_another_type_is_refused_by_its_published_name(folder: Path, dtype: torch.dtype) -> None:
    weights, name = published_weights(), f"{MODEL}blocks.1.ffn.0.weight"
    weights[name] = torch.zeros(weights[name].shape).to(dtype)
    write_shards(folder, "model", weights, 2)

    error = refused(lambda: load(folder))

    assert error.field == name
    assert "floating point" in error.message


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


def control_characters(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    change_json(folder / INDEX, weight_map=index | {f"{MODEL}head.modulation": "x\0.safetensors"})


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
        (control_characters, "weight_map"),
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
