"""A checkpoint's configuration: what is read, what follows from it, what is refused by name."""

import copy
from dataclasses import fields, replace
from typing import Any

import pytest

from contracts.errors import ConfigurationError
from gpu_worker.models.dreamzero.config import (
    ClipGeometry,
    DreamZeroConfig,
    DreamZeroTopology,
    DreamZeroTransformerConfig,
)
from support.dreamzero_checkpoint import published_config
from support.dreamzero_model import TINY

STORED: dict[str, Any] = {
    "action_head_cfg": {
        "_target_": "of.another.package",
        "config": {
            "num_frames": 33,
            "num_frame_per_block": 2,
            "action_horizon": 24,
            "action_dim": 32,
            "max_action_dim": 32,
            "max_state_dim": 64,
            "video_inference_final_noise": 0.8,
            "decouple_inference_noise": False,
            "some_training_option": [1, 2],
            "diffusion_model_cfg": {
                "_target_": "of.another.package",
                "model_type": "i2v",
                "dim": 5120,
                "num_heads": 40,
                "num_layers": 40,
                "ffn_dim": 13824,
                "in_dim": 36,
                "out_dim": 16,
                "freq_dim": 256,
                "eps": 1e-06,
                "frame_seqlen": 880,
                "text_len": 512,
                "num_action_per_block": 24,
                "num_state_per_block": 1,
                "max_chunk_size": 4,
                "hidden_size": 1024,
            },
        },
    }
}
CHOICES = ("decouple_inference_noise", "video_inference_final_noise")
HEAD_FIELDS = [f.name for f in fields(DreamZeroConfig) if f.name not in (*CHOICES, "transformer")]


def changed(name: str, value: Any, *, model: bool = False) -> dict[str, Any]:
    config = copy.deepcopy(STORED)
    head = config["action_head_cfg"]["config"]
    (head["diffusion_model_cfg"] if model else head)[name] = value
    return config


def refused(config: Any, pinned: DreamZeroConfig | None = None) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as caught:
        DreamZeroConfig.from_checkpoint(config, pinned)
    return caught.value


def test_the_published_configuration_and_the_sizes_that_follow() -> None:
    config = DreamZeroConfig.from_checkpoint(STORED)

    assert config == DreamZeroConfig()
    assert (config.latent_frames, config.local_attention_frames, config.window_frames) == (9, 9, 9)
    assert config.max_attention_tokens == 7920
    assert (config.transformer.head_dim, config.transformer.registers) == (128, 25)
    assert DreamZeroTopology().latent_size == (44, 80)
    assert (ClipGeometry().tokens, ClipGeometry().layers_run) == (257, 31)


def test_a_rollout_without_a_limit_attends_to_21_frames() -> None:
    pinned = replace(DreamZeroConfig(), transformer=DreamZeroTransformerConfig(max_chunk_size=-1))

    config = DreamZeroConfig.from_checkpoint(changed("max_chunk_size", -1, model=True), pinned)

    assert (config.local_attention_frames, config.window_frames) == (-1, 21)
    assert config.max_attention_tokens == 18_480


def test_a_tiny_checkpoint_s_configuration_is_its_own() -> None:
    assert DreamZeroConfig.from_checkpoint(published_config(), TINY.head) == TINY.head
    assert refused(published_config()).field == "dim"


@pytest.mark.parametrize("name", HEAD_FIELDS)
@pytest.mark.parametrize("value", [7, None, True, "2"])
def test_an_action_head_that_drifts_is_refused_by_the_field(name: str, value: Any) -> None:
    error = refused(changed(name, value))

    assert error.field == name
    assert name in error.message


@pytest.mark.parametrize("name", [f.name for f in fields(DreamZeroTransformerConfig)])
@pytest.mark.parametrize("value", [7, None, True, "t2v"])
def test_a_transformer_that_drifts_is_refused_by_the_field(name: str, value: Any) -> None:
    assert refused(changed(name, value, model=True)).field == name


@pytest.mark.parametrize(("name", "value"), [("sink_size", 0), ("text_dim", 4096)])
def test_absent_fields_have_the_published_values(name: str, value: int) -> None:
    assert getattr(DreamZeroConfig.from_checkpoint(STORED).transformer, name) == value


@pytest.mark.parametrize(("decoupled", "noise"), [(True, 0.8), (True, 0.5), (False, 0), (False, 1)])
def test_noise_settings_are_the_checkpoint_s_choice(decoupled: bool, noise: float) -> None:
    config = published_config(decouple_inference_noise=decoupled, video_inference_final_noise=noise)

    found = DreamZeroConfig.from_checkpoint(config, TINY.head)

    assert (found.decouple_inference_noise, found.video_inference_final_noise) == (decoupled, noise)
    assert found.transformer is TINY.head.transformer


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("decouple_inference_noise", 1),
        ("decouple_inference_noise", None),
        ("video_inference_final_noise", -0.1),
        ("video_inference_final_noise", 1.1),
        ("video_inference_final_noise", float("nan")),
        ("video_inference_final_noise", True),
        ("video_inference_final_noise", "0.8"),
    ],
)
def test_a_noise_setting_of_another_kind_is_refused(name: str, value: Any) -> None:
    assert refused(changed(name, value)).field == name


@pytest.mark.parametrize("noise", [0.999, 1, 1.0])
def test_a_decoupled_video_that_would_begin_and_end_with_noise_is_refused(noise: float) -> None:
    config = published_config(decouple_inference_noise=True, video_inference_final_noise=noise)

    with pytest.raises(ConfigurationError, match=r"below 0\.999") as caught:
        DreamZeroConfig.from_checkpoint(config, TINY.head)
    assert caught.value.field == "video_inference_final_noise"


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (None, "config.json"),
        ([], "config.json"),
        ({}, "action_head_cfg"),
        ({"action_head_cfg": []}, "action_head_cfg"),
        ({"action_head_cfg": {}}, "action_head_cfg.config"),
        ({"action_head_cfg": {"config": {}}}, "diffusion_model_cfg"),
    ],
)
def test_a_configuration_of_another_shape_is_refused(config: Any, field: str) -> None:
    assert refused(config).field == field


def test_pictures_must_have_the_tokens_that_the_transformer_expects() -> None:
    with pytest.raises(ConfigurationError, match="880") as caught:
        DreamZeroTopology(height=352, width=624)
    assert caught.value.field == "frame_seqlen"
