"""Settings of the worker: each wrong one is refused by its name."""

import os

import pytest

from contracts.config import WORKER_NAMES, SharedSettings, load_settings
from contracts.errors import ConfigurationError
from gpu_worker.config import WorkerSettings


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("WORLDLINE_", "AR_DIFFUSION_")) or name == "REDIS_URL":
            monkeypatch.delenv(name)


def test_the_defaults_are_usable() -> None:
    settings = load_settings(WorkerSettings)

    assert (settings.worker_id, settings.model, settings.device) == ("gpu-0", "reference", "auto")
    assert settings.name_ttl_ms == 5_000


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("141GB", 141_000_000_000),
        ("80GiB", 80 * 1024**3),
        ("1.5 GB", 1_500_000_000),
        ("512mib", 512 * 1024**2),
        ("2T", 2 * 10**12),
        ("8192", 8192),
        ("7B", 7),
    ],
)
def test_memory_is_given_with_a_unit(text: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLDLINE_DEVICE_MEMORY", text)
    assert load_settings(WorkerSettings).device_memory == size


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("WORLDLINE_WORKER_ID", "a{b}"),
        ("WORLDLINE_WORKER_ID", ""),
        ("WORLDLINE_WORKER_ID", "x" * 65),
        ("WORLDLINE_MODEL", ""),
        ("WORLDLINE_DEVICE", "tpu"),
        ("WORLDLINE_DEVICE", "cuda:x"),
        ("WORLDLINE_DTYPE", "int8"),
        ("WORLDLINE_DEVICE_MEMORY", "much"),
        ("WORLDLINE_DEVICE_MEMORY", "0"),
        ("WORLDLINE_DEVICE_MEMORY", "-5GB"),
        ("WORLDLINE_DEVICE_MEMORY", "9" * 400),
        ("WORLDLINE_DEVICE_MEMORY", "12iB"),
        ("WORLDLINE_GPU_MEMORY_FRACTION", "0"),
        ("WORLDLINE_GPU_MEMORY_FRACTION", "1.5"),
        ("WORLDLINE_SESSION_CAPACITY", "0"),
        ("WORLDLINE_PAYLOAD_URL", "nowhere"),
        ("WORLDLINE_RECONCILE_MS", "0"),
        ("WORLDLINE_HEARTBEAT_MS", "-1"),
        ("WORLDLINE_LINGBOT_ACTION_ROOT", ""),
        ("WORLDLINE_CHECKPOINT", ""),
        ("WORLDLINE_AR_DIFFUSION_HEIGHT", "0"),
    ],
)
def test_a_wrong_setting_is_named(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigurationError) as caught:
        load_settings(WorkerSettings)
    assert caught.value.field == variable.removeprefix("WORLDLINE_").lower()


def test_trajectories_come_from_no_folder_unless_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings(WorkerSettings).lingbot_action_root is None
    monkeypatch.setenv("WORLDLINE_LINGBOT_ACTION_ROOT", "trajectories")
    assert load_settings(WorkerSettings).lingbot_action_root == "trajectories"


def test_the_pipeline_gets_to_see_what_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLDLINE_LINGBOT_ACTION_ROOT", "trajectories")
    assert load_settings(WorkerSettings).pipeline_config == {}
    monkeypatch.setenv("WORLDLINE_CHECKPOINT", "published")
    monkeypatch.setenv("WORLDLINE_AR_DIFFUSION_HEIGHT", "480")
    assert load_settings(WorkerSettings).pipeline_config == {
        "checkpoint": "published",
        "ar_diffusion_height": 480,
        "lingbot_action_root": "trajectories",
    }


def test_the_published_name_of_the_scratch_setting_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AR_DIFFUSION_KV_SCRATCH_BLOCKS_PER_BRANCH", "5")
    assert load_settings(WorkerSettings).scratch_blocks_per_branch == 5
    monkeypatch.setenv("AR_DIFFUSION_KV_SCRATCH_BLOCKS_PER_BRANCH", "-1")
    with pytest.raises(ConfigurationError, match="AR_DIFFUSION_KV_SCRATCH_BLOCKS_PER_BRANCH"):
        load_settings(WorkerSettings)


def test_an_option_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLDLINE_DEVICE", "cuda:1")
    assert load_settings(WorkerSettings, device="cpu", device_memory="1GB").device == "cpu"


def test_every_variable_of_the_worker_is_known_to_the_others() -> None:
    shared = set(SharedSettings.model_fields)
    own = (
        set(WorkerSettings.model_fields) - shared - {"scratch_blocks_per_branch"}
    )  # published without our prefix
    assert {name.upper() for name in own} == WORKER_NAMES


@pytest.mark.parametrize(
    "variable", ["WORLDLINE_MODEL_PARAMS", "WORLDLINE_KV_CONFIG", "WORLDLINE_PARALLEL_CONFIG"]
)
@pytest.mark.parametrize("value", ["x", "[]", "3", '{"a"', '{"a": NaN}'])
def test_an_object_of_settings_is_json(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigurationError, match=variable) as caught:
        load_settings(WorkerSettings)
    assert caught.value.field == variable.removeprefix("WORLDLINE_").lower()


def test_settings_of_the_model_reach_it_beside_those_that_have_a_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLDLINE_MODEL_PARAMS", '{"window_frames": 8, "quick": false}')
    monkeypatch.setenv("WORLDLINE_CHECKPOINT", "published")
    assert load_settings(WorkerSettings).pipeline_config == {
        "checkpoint": "published",
        "window_frames": 8,
        "quick": False,
    }
    assert load_settings(WorkerSettings, model_params={"a": 1}).model_params == {"a": 1}
    with pytest.raises(ConfigurationError, match="checkpoint is set, and again in model_params"):
        load_settings(WorkerSettings, model_params={"checkpoint": "other"})


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            {"num_layers": 3},
            "unknown key 'num_layers'; a deployment sets gpu_memory_fraction, reset_at_boundary",
        ),
        ({"sink_frames": -1}, "sink_chunks must be an integer >= 0"),
        ({"sink_frames": 1, "sink_chunks": 1}, "by both of its names"),
        ({"window_frames": 0}, "window_chunks"),
        ({"reset_at_boundary": 0}, "must be a bool"),
        ({"gpu_memory_fraction": 2}, "gpu_memory_fraction"),
    ],
)
def test_what_a_deployment_may_not_change_of_the_kv_is_refused(config: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text) as caught:
        load_settings(WorkerSettings, kv_config=config)
    assert caught.value.field == "kv_config"


def test_the_memory_fraction_is_given_once() -> None:
    with pytest.raises(ConfigurationError, match="gpu_memory_fraction is set, and again in kv_config"):
        load_settings(WorkerSettings, gpu_memory_fraction=0.5, kv_config={"gpu_memory_fraction": 0.5})
