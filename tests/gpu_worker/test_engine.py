"""The engine that the worker loop drives, and how it finds its model."""

import subprocess
import sys
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch

import gpu_worker
from contracts.config import load_settings
from contracts.errors import ConfigurationError, InvalidArgumentError, NotResidentError
from gpu_worker import registry
from gpu_worker.__main__ import load_installed_model
from gpu_worker.config import WorkerSettings
from gpu_worker.engine import ARDiffusionEngine, TickEngine, load_engine
from gpu_worker.kv.state import ARDiffusionKVState
from support.kv_pipeline import RecordingPipeline, make_runner, make_tick


@pytest.fixture
def pipeline() -> RecordingPipeline:
    return RecordingPipeline()


@pytest.fixture
def engine(pipeline: RecordingPipeline) -> TickEngine:
    engine = ARDiffusionEngine("recording", make_runner(pipeline))
    engine.start()
    return engine


def test_a_tick_reaches_the_pipeline_with_prompt_params_and_images(
    engine: TickEngine, pipeline: RecordingPipeline
) -> None:
    tick = make_tick(prompt="a lake")
    engine.execute_tick(tick, params={"images": ["x"], "fps": 8}, seed=3)
    request = pipeline.requests[0]
    assert (request.tick, request.prompt, request.images) == (tick, "a lake", ("x",))
    assert request.params["fps"] == 8
    assert request.generator is not None


def test_images_must_be_a_list(engine: TickEngine) -> None:
    with pytest.raises(InvalidArgumentError, match=r"params\.images"):
        engine.execute_tick(make_tick(), params={"images": "x.png"}, seed=0)


def test_residency_is_told(engine: TickEngine, pipeline: RecordingPipeline) -> None:
    evicted: list[str] = []
    engine.on_evict = evicted.append
    assert engine.on_evict is not None
    for session_id in ("a", "b", "c"):
        engine.execute_tick(make_tick(session_id), params={}, seed=0)
    assert (engine.model, engine.capacity) == ("recording", 2)
    assert engine.resident_sessions() == ("b", "c")
    assert evicted == ["a"]
    assert not engine.is_resident("a")
    engine.close_session("a")
    assert pipeline.hooks() == [("close", "a")], "closing what is not here does nothing"
    engine.close_session("b")
    engine.reset_session("c")
    assert pipeline.hooks() == [("close", "a"), ("close", "b"), ("reset", "c")]
    assert engine.resident_sessions() == ()
    engine.check_integrity()
    with pytest.raises(NotResidentError):
        engine.execute_tick(make_tick("c", 1), params={}, seed=0)


def test_memory_is_told_in_bytes_and_pages(engine: TickEngine) -> None:
    before = engine.memory()
    engine.execute_tick(make_tick(), params={}, seed=0)
    after = engine.memory()
    assert before["blocks_free"] == before["blocks_total"]
    assert after["blocks_free"] == after["blocks_total"] - 1
    assert (before["resident"], after["resident"], after["capacity"]) == (0, 1, 2)
    assert (
        before["allocated_bytes"]
        < after["allocated_bytes"]
        <= after["planned_bytes"]
        <= after["budget_bytes"]
    )


# ---------------------------------------------------------------------------------------------------- loading


@pytest.fixture
def _entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = {
        "recording": "support.kv_pipeline:build_recording",
        "text": "support.kv_pipeline:__name__",
        "gone": "no_such_module_of_ours:Pipeline",
    }

    def entry_points(*, group: str) -> list[EntryPoint]:
        return [EntryPoint(name, value, group) for name, value in targets.items()]

    monkeypatch.setattr(registry, "entry_points", entry_points)


@pytest.mark.usefixtures("_entry_points")
def test_a_model_is_found_by_its_entry_point() -> None:
    engine = load_engine(
        "recording",
        available_bytes=1 << 20,
        gpu_memory_fraction=0.5,
        session_capacity=3,
        scratch_blocks_per_branch=7,
        kv={"gpu_memory_fraction": 0.2, "sink_chunks": 1},
        pipeline_config={"session_capacity": 5},
    )
    engine.start()
    assert (engine.model, engine.capacity) == ("recording", 3)
    assert engine.memory()["budget_bytes"] == 1 << 19
    assert engine.execute_tick(make_tick(), params={}, seed=0).error is None


@pytest.mark.parametrize(
    ("own", "asked", "used"),
    [
        (None, None, torch.float32),
        ("bfloat16", None, torch.bfloat16),
        ("bfloat16", "float32", torch.float32),
    ],
)
def test_a_model_may_say_what_it_runs_in_where_nobody_else_does(
    monkeypatch: pytest.MonkeyPatch, own: str | None, asked: str | None, used: torch.dtype
) -> None:
    built: list[torch.dtype] = []

    class Factory:
        def __call__(self, *, dtype: torch.dtype, **_: Any) -> RecordingPipeline:
            built.append(dtype)
            return RecordingPipeline()

    factory = Factory()
    if own is not None:
        factory.default_dtype = own  # type: ignore[attr-defined]
    monkeypatch.setattr("gpu_worker.engine.load_pipeline_factory", lambda _: factory)

    engine = load_engine("recording", available_bytes=1 << 20, dtype=asked)

    assert built == [used]
    assert engine._runner.dtype == used


@pytest.mark.usefixtures("_entry_points")
def test_an_unknown_model_is_told_the_known_ones() -> None:
    assert registry.pipeline_names() == ("gone", "recording", "text")
    with pytest.raises(ConfigurationError, match=r"'nope'.*gone, recording, text") as caught:
        load_engine("nope")
    assert caught.value.field == "model"


@pytest.mark.usefixtures("_entry_points")
@pytest.mark.parametrize(("model", "text"), [("gone", "no_such_module_of_ours"), ("text", "not callable")])
def test_a_model_that_cannot_be_loaded_says_why(model: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        load_engine(model)


@pytest.mark.usefixtures("_entry_points")
@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"device": "no such device"}, "device"),
        ({"device": "cuda:99"}, "device"),
        ({"dtype": "int8"}, "dtype"),
        ({"dtype": "no such type"}, "dtype"),
        ({"kv": {"windw": 1}}, "windw"),
        ({"gpu_memory_fraction": 0.0}, "gpu_memory_fraction"),
    ],
)
def test_a_bad_setting_is_named(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field) as caught:
        load_engine("recording", **arguments)
    assert caught.value.field == field  # type: ignore[attr-defined]


@pytest.mark.usefixtures("_entry_points")
@pytest.mark.parametrize(
    ("arguments", "field"),
    [({"step_execution": True}, "step_execution"), ({"attention_backend": "flex"}, "attention_backend")],
)
def test_a_setting_that_model_or_device_cannot_follow_is_named(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigurationError, match=field) as caught:
        load_engine("recording", available_bytes=1 << 20, **arguments)
    assert caught.value.field == field


def test_the_workers_settings_reach_the_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLDLINE_STEP_EXECUTION", "true")
    monkeypatch.setenv("WORLDLINE_ATTENTION_BACKEND", "sdpa")
    settings = load_settings(WorkerSettings, device="cpu", device_memory=1 << 28)
    engine = load_installed_model(settings)
    assert isinstance(engine, ARDiffusionEngine)
    options = engine._runner._options
    assert (options.step_execution, options.attention_backend) == (True, "sdpa")
    engine.start()
    assert engine.execute_tick(make_tick(), params={}, seed=0).error is None
    with pytest.raises(ConfigurationError, match="WORLDLINE_ATTENTION_BACKEND") as caught:
        load_settings(WorkerSettings, attention_backend="xformers")
    assert caught.value.field == "attention_backend"


def test_settings_of_model_and_kv_reach_them_from_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings(
        WorkerSettings,
        device="cpu",
        device_memory=1 << 28,
        model_params={"window_frames": 9, "session_capacity": 3},
        kv_config={"sink_frames": 0, "reset_at_boundary": False},
    )
    engine = load_installed_model(settings)
    assert isinstance(engine, ARDiffusionEngine)
    runner = engine._runner
    assert (runner.spec.window_frames, runner.config.window_chunks, engine.capacity) == (9, 9, 3)
    assert (runner.spec.sink_frames, runner.config.sink_chunks) == (3, 0), "a zero is a value"


@pytest.mark.usefixtures("_entry_points")
@pytest.mark.parametrize(
    ("config", "text", "field"),
    [
        ({"num_layers": 0}, "model 'recording': KV spec: num_layers must be", "num_layers"),
        ({"heads": 3}, "model 'recording' can't be built: TypeError: .*heads", "model"),
    ],
)
def test_a_model_that_cannot_follow_its_settings_says_so_with_its_name(
    config: dict[str, Any], text: str, field: str
) -> None:
    with pytest.raises(ConfigurationError, match=text) as caught:
        load_engine("recording", available_bytes=1 << 20, pipeline_config=config)
    assert caught.value.field == field


@pytest.mark.usefixtures("_entry_points")
def test_a_model_without_a_usable_spec_says_so_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordingPipeline, "ar_diffusion_kv_cache_spec", lambda _self: {"num_layers": 1})
    with pytest.raises(ConfigurationError, match=r"model 'recording': ar_diffusion_kv_cache_spec\(\)"):
        load_engine("recording", available_bytes=1 << 20)


# ---------------------------------------------------------------------------------------------------- light imports


def test_the_package_exports_the_seam() -> None:
    for name in gpu_worker.__all__:
        assert getattr(gpu_worker, name) is not None
    assert set(gpu_worker.__all__) <= set(dir(gpu_worker))
    assert gpu_worker.ARDiffusionKVState is ARDiffusionKVState
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = gpu_worker.no_such_name


@pytest.mark.parametrize(
    "module", ["gpu_worker", "gpu_worker.engine", "gpu_worker.capability", "gpu_worker.models.reference.spec"]
)
def test_importing_the_light_modules_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
