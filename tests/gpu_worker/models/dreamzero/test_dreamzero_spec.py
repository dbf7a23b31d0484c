"""What a robot's session costs: the figures of the shipped geometry, and that planning needs no torch."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from contracts.capacity import MemoryModel
from contracts.errors import ConfigurationError
from contracts.kv_spec import resolve_kv_config
from gpu_worker.models.dreamzero.config import DreamZeroTopology
from gpu_worker.models.dreamzero.spec import (
    DreamZeroSpecSettings,
    dreamzero_kv_spec,
    kv_spec,
    owned_bytes,
)
from support.dreamzero_checkpoint import (
    deployment,
    published_config,
    statistics,
    write_checkpoint,
    write_json,
)
from support.dreamzero_model import TINY
from support.dreamzero_worlds import shared_checkpoint, tiny_pipeline

PUBLISHED_OWNED = 632_291_328
ENCODER_HISTORY = 632_586_240


def memory(spec: Any) -> MemoryModel:
    return MemoryModel.of(spec, resolve_kv_config(spec), itemsize=2)


def test_the_shipped_geometry() -> None:
    spec = kv_spec({})

    assert (spec.num_layers, spec.num_kv_heads, spec.head_size) == (40, 40, 128)
    assert (spec.tokens_per_frame, spec.frames_per_block) == (880, 2)
    assert (spec.window_frames, spec.sink_frames) == (9, 0)
    assert [(branch.name, branch.local_index) for branch in spec.kv_branches] == [
        ("positive", 0),
        ("negative", 1),
    ]
    assert [(cache.name, cache.num_tokens) for cache in spec.cross_attention] == [
        ("text", 512),
        ("image", 257),
    ]
    assert spec.max_scratch_tokens_per_branch == 24 + 1
    assert spec.session_capacity == 64


def test_workers_that_share_the_branches_have_one_slot_each() -> None:
    spec = kv_spec({"cfg_parallel": 2})

    assert [(branch.name, branch.local_index) for branch in spec.kv_branches] == [
        ("positive", 0),
        ("negative", 0),
    ]
    assert spec.num_local_kv_branches == 1


def test_a_model_without_an_image_has_no_cache_for_one() -> None:
    head = replace(TINY.head, transformer=replace(TINY.head.transformer, model_type="t2v"))
    topology = replace(TINY, head=head)

    spec = dreamzero_kv_spec(topology, owned=owned_bytes(topology))

    assert [cache.name for cache in spec.cross_attention] == ["text"]


def test_the_encoder_history_is_what_the_published_geometry_comes_to() -> None:
    owned = owned_bytes()

    assert owned.encoder_history == ENCODER_HISTORY
    assert owned.condition == 20 * 9 * 44 * 80 * 2
    assert owned.latents == 16 * 2 * 44 * 80 * 2
    assert owned.total == kv_spec({}).model_owned_state_bytes_per_session == 634_078_720


@pytest.mark.parametrize(
    ("cfg_parallel", "one", "two"),
    [(1, 23_519_100_928, 38_387_449_856), (2, 13_426_556_928, 21_806_841_856)],
)
def test_the_published_figures_with_the_published_owned_bytes(cfg_parallel: int, one: int, two: int) -> None:
    spec = replace(
        kv_spec({"cfg_parallel": cfg_parallel}), model_owned_state_bytes_per_session=PUBLISHED_OWNED
    )
    plan = memory(spec)

    assert plan.page_bytes == 720_896_000
    assert plan.scratch_blocks_per_branch == 3
    assert plan.cross_bytes_per_session == 1_259_929_600
    assert (plan.required_bytes(1), plan.required_bytes(2)) == (one, two)


@pytest.mark.parametrize(("cfg_parallel", "published"), [(1, 23_519_100_928), (2, 13_426_556_928)])
def test_the_honest_figures_are_those_of_what_is_really_kept(cfg_parallel: int, published: int) -> None:
    plan = memory(kv_spec({"cfg_parallel": cfg_parallel}))

    assert plan.required_bytes(1) == published + 634_078_720 - PUBLISHED_OWNED


def test_the_plan_is_made_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from actors.cli.main import run;"
        "status = run(['plan', '--model', 'dreamzero', '--memory', '141GB', '--set', 'dtype=bfloat16',"
        f"'--set', 'model_owned_state_bytes_per_session={PUBLISHED_OWNED}', '--json']);"
        "sys.exit('torch was imported' if 'torch' in sys.modules else status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )

    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["page_bytes"] == 720_896_000
    assert plan["required_bytes"]["1"] == 23_519_100_928


def test_the_plan_of_a_checkpoint_is_what_its_pipeline_costs() -> None:
    settings = {"checkpoint": str(shared_checkpoint()), "session_capacity": 3}

    assert kv_spec({**settings, "dtype": "float32"}) == (
        tiny_pipeline(session_capacity=3).ar_diffusion_kv_cache_spec()
    )


def test_a_published_checkpoint_is_planned_from_its_own_files(tmp_path: Path) -> None:
    published = DreamZeroTopology()
    raw = deployment(published)
    write_json(tmp_path / "worldline.json", raw)
    write_json(tmp_path / "config.json", published_config(published))
    write_json(tmp_path / raw["statistics"], statistics())

    assert raw["topology"] == {"head": {}, "clip": {}, "text": {}, "vae": {}}
    assert kv_spec({"checkpoint": str(tmp_path)}) == kv_spec({})


@pytest.mark.parametrize(
    ("field", "config"),
    [
        ("session_capacity", {"session_capacity": 0}),
        ("session_capacity", {"session_capacity": True}),
        ("cfg_parallel", {"cfg_parallel": 3}),
        ("cfg_parallel", {"cfg_parallel": 0}),
        ("dtype", {"dtype": "int8"}),
        ("checkpoint", {"checkpoint": 7}),
        ("checkpoint", {"checkpoint": "/nowhere/at/all"}),
        ("colour", {"colour": "red"}),
    ],
)
def test_a_setting_that_does_not_fit_is_named(field: str, config: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        kv_spec(config)
    assert caught.value.field == field


def test_settings_have_the_published_defaults() -> None:
    assert DreamZeroSpecSettings() == DreamZeroSpecSettings(None, 64, 1, "bfloat16")


def test_another_size_costs_in_proportion(tmp_path: Path) -> None:
    half = replace(
        TINY,
        height=TINY.height // 2,
        head=replace(TINY.head, transformer=replace(TINY.head.transformer, frame_seqlen=3)),
    )
    checkpoint = write_checkpoint(tmp_path, half)

    spec = kv_spec({"checkpoint": str(checkpoint)})

    assert spec.tokens_per_frame == 3
    assert 2 * spec.model_owned_state_bytes_per_session == owned_bytes(TINY).total
