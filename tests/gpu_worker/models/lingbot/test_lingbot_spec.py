"""What a session costs: the figures of the shipped geometry, and the formulas at other sizes."""

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from actors.cli.main import run
from contracts.capacity import MemoryModel, plan_capacity
from contracts.errors import ConfigurationError, InvalidArgumentError
from contracts.kv_spec import resolve_kv_config
from gpu_worker.models.lingbot_world.config import LingBotTransformerConfig
from gpu_worker.models.lingbot_world.pipeline import LingBotWorldPipeline
from gpu_worker.models.lingbot_world.spec import (
    LingBotSpecSettings,
    VaeGeometry,
    kv_spec,
    lingbot_kv_spec,
    owned_bytes,
)
from support.lingbot_model import TINY

GIB = 1024**3
SHIPPED = (480, 832)


def memory(spec: Any) -> MemoryModel:
    return MemoryModel.of(spec, resolve_kv_config(spec), itemsize=2)


def test_the_shipped_geometry() -> None:
    spec = kv_spec({})

    assert (spec.num_layers, spec.num_kv_heads, spec.head_size) == (40, 40, 128)
    assert (spec.tokens_per_frame, spec.frames_per_block) == (1560, 3)
    assert (spec.window_frames, spec.sink_frames) == (9, 9)
    assert spec.branch_names == ("main",)
    assert [(cache.name, cache.num_tokens) for cache in spec.cross_attention] == [("text", 512)]
    assert spec.session_capacity == 2


def test_the_shipped_bytes() -> None:
    spec, owned = kv_spec({}), owned_bytes(*SHIPPED)

    assert owned.condition == 748_800
    assert owned.camera_modulation == 3_833_856_000
    assert owned.encoder_histories == 2 * 1_121_402_880
    assert owned.decoder_history == 1_888_573_440
    assert owned.total == spec.model_owned_state_bytes_per_session == 7_965_984_000
    assert memory(spec).page_bytes == 1_277_952_000
    assert memory(spec).cross_bytes_per_session == 419_430_400
    assert memory(spec).required_bytes(1) == 41_612_166_400
    assert memory(spec).required_bytes(2) == 73_000_716_800


def test_a_hundred_gib_at_a_tenth_hold_one_session() -> None:
    spec = replace(kv_spec({}), model_owned_state_bytes_per_session=7_488_000)
    plan = plan_capacity(
        spec,
        resolve_kv_config(spec, {"gpu_memory_fraction": 0.1}),
        available_bytes=100 * GIB,
        itemsize=2,
    )

    assert plan.memory.required_bytes(1) == 33_653_670_400
    assert plan.capacity == 1


@pytest.mark.parametrize(
    ("degree", "modulation", "owned", "required"),
    [(2, 1_916_928_000, 5_104_769_280, 21_927_860_480), (4, 958_464_000, 3_674_161_920, 12_085_707_520)],
)
def test_workers_that_share_a_sequence_share_pages_text_and_camera(
    degree: int, modulation: int, owned: int, required: int
) -> None:
    latent_columns = -(-104 // degree)
    shared = owned_bytes(*SHIPPED, degree=degree, decoder_width=8 * latent_columns)
    spec = lingbot_kv_spec(*SHIPPED, owned=shared, degree=degree)

    assert shared.camera_modulation == modulation
    assert shared.total == owned
    assert memory(spec).page_bytes == 1_277_952_000 // degree
    assert memory(spec).required_bytes(1) == required


def test_a_decoder_that_is_not_shared_stays_whole_on_each_worker() -> None:
    assert owned_bytes(*SHIPPED, degree=2).total == 6_049_056_000
    assert owned_bytes(*SHIPPED, degree=8, decoder_width=104).total == 2_958_858_240
    assert kv_spec({"ulysses_degree": 2}).model_owned_state_bytes_per_session == 6_049_056_000


def test_the_encoder_s_history_counts_twice_and_in_its_own_type() -> None:
    half, full = owned_bytes(*SHIPPED), owned_bytes(*SHIPPED, vae_itemsize=4)

    assert full.encoder_histories == 2 * half.encoder_histories
    assert full.decoder_history == 2 * half.decoder_history
    assert full.camera_modulation == half.camera_modulation


@pytest.mark.parametrize("degree", [1, 7])
def test_the_camera_s_bytes_grow_with_the_layers(degree: int) -> None:
    one = LingBotTransformerConfig(num_layers=1)

    difference = (
        owned_bytes(*SHIPPED, degree=degree).camera_modulation
        - owned_bytes(*SHIPPED, transformer=one, degree=degree).camera_modulation
    )

    assert difference == 2 * 39 * -(-4680 // degree) * 5120 * 2


def test_the_published_vae_keeps_1404_elements_a_pixel_to_encode_and_2364_and_a_half_to_decode() -> None:
    vae = VaeGeometry()

    assert vae.encoder_elements(*SHIPPED) == 1404 * 480 * 832
    assert 2 * vae.decoder_elements(*SHIPPED) == 4729 * 480 * 832


def test_a_tiny_vae_keeps_what_was_counted_by_hand() -> None:
    vae = VaeGeometry(base=4, mult=(1, 1, 1, 1), z=16, res_blocks=1)

    assert vae.encoder_elements(16, 16) == 7_216
    assert vae.decoder_elements(16, 16) == 12_000


def test_other_sizes_and_models_scale() -> None:
    spec = lingbot_kv_spec(
        32, 48, owned=owned_bytes(32, 48, transformer=TINY), transformer=TINY, text_tokens=5
    )

    assert (spec.tokens_per_frame, spec.num_kv_heads, spec.head_size, spec.num_layers) == (6, 2, 12, 2)
    assert spec.cross_attention[0].num_tokens == 5
    assert kv_spec({"ar_diffusion_height": 464}).tokens_per_frame == 29 * 52


@pytest.mark.parametrize("degree", [3, 16, 80])
def test_a_degree_must_divide_heads_and_tokens(degree: int) -> None:
    with pytest.raises(InvalidArgumentError, match="ulysses_degree") as caught:
        kv_spec({"ulysses_degree": degree})
    assert caught.value.field == "ulysses_degree"


def test_a_degree_that_divides_the_heads_must_divide_the_tokens_as_well() -> None:
    small = {"ar_diffusion_height": 32, "ar_diffusion_width": 48}  # 18 tokens a chunk

    assert kv_spec({**small, "ulysses_degree": 2}).num_kv_heads == 20
    with pytest.raises(InvalidArgumentError, match="18 tokens of a block must be divisible") as caught:
        kv_spec({**small, "ulysses_degree": 4})
    assert caught.value.field == "ulysses_degree"


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"heigth": 480}, "heigth"),
        ({"ar_diffusion_height": 481}, "ar_diffusion_height"),
        ({"ar_diffusion_height": None}, "ar_diffusion_height"),
        ({"ar_diffusion_width": True}, "ar_diffusion_width"),
        ({"ar_diffusion_width": 1024}, "ar_diffusion_height"),
        ({"session_capacity": 0}, "session_capacity"),
        ({"session_capacity": True}, "session_capacity"),
        ({"ulysses_degree": "2"}, "ulysses_degree"),
        ({"dtype": "int8"}, "dtype"),
        ({"dtype": []}, "dtype"),
    ],
)
def test_a_bad_setting_is_named(config: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        LingBotSpecSettings.from_mapping(config)
    assert caught.value.field == field


def test_settings_change_the_spec() -> None:
    spec = kv_spec({"session_capacity": 5, "dtype": "float32"})

    assert spec.session_capacity == 5
    assert spec.model_owned_state_bytes_per_session == 2 * 7_965_984_000


@pytest.mark.parametrize(
    ("arguments", "required"),
    [
        (("--set", "model_owned_state_bytes_per_session=7488000"), 33_653_670_400),
        ((), 41_612_166_400),
        (("--set", "dtype=float32"), 2 * (41_612_166_400)),
        (("--param", 'dtype="float32"'), 2 * (41_612_166_400)),
    ],
    ids=str,
)
def test_a_plan_by_name_is_in_the_type_that_the_worker_runs_in(
    arguments: tuple[str, ...], required: int, capfd: pytest.CaptureFixture[str]
) -> None:
    assert LingBotWorldPipeline.default_dtype == kv_spec.default_dtype == "bfloat16"

    status = run(["plan", "--model", "lingbot-world", "--memory", "100GiB", *arguments, "--json"])

    plan = json.loads(capfd.readouterr().out)
    assert (status, plan["capacity"]) == (0, 1)
    assert plan["required_bytes"]["1"] == required


def test_planning_brings_in_no_torch() -> None:
    program = "import sys, gpu_worker.models.lingbot_world.spec; print('torch' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)

    assert (done.stdout.strip(), done.stderr) == ("False", "")
