"""Pure Ulysses, or a refusal by name before anything is loaded."""

import subprocess
import sys
from typing import Any

import pytest

from contracts.config import load_settings
from contracts.errors import ConfigurationError
from gpu_worker import registry
from gpu_worker.config import WorkerSettings, launch
from gpu_worker.parallel.launch import Launch
from gpu_worker.parallel.modes import ParallelConfig, UnsupportedParallelismError
from support.processes import Processes


@pytest.mark.parametrize(
    "config",
    [{}, {"ulysses_degree": 4}, {"ulysses_degree": 2, "sequence_parallel_size": 2, "ulysses_mode": "strict"}],
)
def test_pure_ulysses_is_accepted(config: dict[str, Any]) -> None:
    ParallelConfig.from_mapping(config).check_started(config.get("ulysses_degree", 3))


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"ulysses_degree": 2, "sequence_parallel_size": 4}, "sequence_parallel_size"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size"),
        ({"ring_degree": 2}, "ring_degree"),
        ({"allgather_degree": 2}, "allgather_degree"),
        ({"ulysses_mode": "advanced_uaa"}, "ulysses_mode"),
        ({"ulysses_a2a_permute": True}, "ulysses_a2a_permute"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"data_parallel_size": 2}, "data_parallel_size"),
        ({"cfg_parallel_size": 2}, "cfg_parallel_size"),
        ({"vae_patch_parallel_size": 2}, "vae_patch_parallel_size"),
        ({"use_hsdp": True}, "use_hsdp"),
        ({"enable_expert_parallel": True}, "enable_expert_parallel"),
        ({"ring_degree": True}, "ring_degree"),
        ({"use_hsdp": 0}, "use_hsdp"),
    ],
)
def test_every_other_kind_is_refused_by_name(config: dict[str, Any], field: str) -> None:
    with pytest.raises(NotImplementedError, match="pure Ulysses") as caught:
        ParallelConfig.from_mapping(config)
    assert isinstance(caught.value, UnsupportedParallelismError)
    assert isinstance(caught.value, ConfigurationError)
    assert caught.value.field == field


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "2"])
def test_a_degree_is_an_integer_from_1(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="ulysses_degree"):
        ParallelConfig.from_mapping({"ulysses_degree": value})


def test_a_setting_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigurationError, match="ring_size") as caught:
        ParallelConfig.from_mapping({"ring_size": 1})
    assert caught.value.field == "ring_size"


def test_a_degree_needs_as_many_processes() -> None:
    with pytest.raises(ConfigurationError, match="torchrun --nproc-per-node 4") as caught:
        ParallelConfig.from_mapping({"ulysses_degree": 4}).check_started(2)
    assert caught.value.field == "ulysses_degree"


# ---------------------------------------------------------------------------------------------------- the environment


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLDLINE_ULYSSES_DEGREE", "2")
    monkeypatch.setenv("WORLDLINE_PARALLEL_CONFIG", '{"ring_degree": 1}')

    assert load_settings(WorkerSettings).parallel == ParallelConfig(ulysses_degree=2)


def test_without_a_launcher_there_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    assert launch() == Launch(0, 1)


def set_launch(monkeypatch: pytest.MonkeyPatch, rank: str, size: str, local: str, local_size: str) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    for name, value in zip(names, (rank, size, local, local_size), strict=True):
        monkeypatch.setenv(name, value)


def test_a_launcher_says_which_process_this_is(monkeypatch: pytest.MonkeyPatch) -> None:
    set_launch(monkeypatch, "3", "4", "3", "4")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")

    assert launch() == Launch(3, 4, attempt=2)
    assert (Launch(3, 4).device("cuda"), Launch(3, 4).device("cpu")) == ("cuda:3", "cpu")


@pytest.mark.parametrize(
    ("values", "field"), [(("2", "4", "0", "2"), "WORLD_SIZE"), (("x", "4", "0", "4"), "RANK")]
)
def test_processes_on_several_machines_are_refused(
    monkeypatch: pytest.MonkeyPatch, values: tuple[str, str, str, str], field: str
) -> None:
    set_launch(monkeypatch, *values)

    with pytest.raises(ConfigurationError) as caught:
        launch()
    assert caught.value.field == field


# ---------------------------------------------------------------------------------------------------- the process

BROKERLESS = {"REDIS_URL": "redis://127.0.0.1:1/0"}


@pytest.mark.parametrize(
    ("args", "env", "said"),
    [
        (["--ulysses-degree", "2"], {}, "torchrun --nproc-per-node 2"),
        ([], {"WORLDLINE_PARALLEL_CONFIG": '{"ring_degree": 2}'}, "pure Ulysses"),
        (["--ulysses-degree", "2"], {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, "4 run"),
        (
            ["--engine", "support.noop_engine:make"],
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            "one device only",
        ),
        (
            ["--engine", "vllm-omni"],
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
            "one device only",
        ),
    ],
)  # fmt: skip
def test_a_worker_says_so_with_78_before_it_looks_for_broker_or_weights(
    args: list[str], env: dict[str, str], said: str, processes: Processes
) -> None:
    worker = processes.module("gpu_worker", *args, env=BROKERLESS | {"PYTHONPATH": "tests"} | env)

    assert worker.wait() == 78
    assert said in worker.stderr
    assert "Traceback" not in worker.stderr


@pytest.mark.parametrize(
    ("device", "said"),
    [("cuda:0", "say cuda"), pytest.param("cuda", "1000 processes need as many", id="more than there are")],
)
def test_every_rank_needs_a_device_of_its_own(device: str, said: str) -> None:
    from gpu_worker.parallel.start import join

    with pytest.raises(ConfigurationError, match=said):
        join(WorkerSettings(device=device), lambda _settings, ranks: ranks, Launch(1, 1000))


def test_modes_are_decided_without_torch() -> None:
    program = "import sys, gpu_worker.config, gpu_worker.parallel.modes; print('torch' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)

    assert (done.stdout.strip(), done.stderr) == ("False", "")


def test_a_model_that_cannot_share_a_sequence_is_refused_before_it_is_built() -> None:
    from gpu_worker.engine import load_engine

    class Two:
        degree = 2

    assert registry.load_pipeline_factory("lingbot-world").shares_sequences is True
    with pytest.raises(ConfigurationError, match="model 'reference' runs on one device") as caught:
        load_engine("reference", available_bytes=1 << 28, ranks=Two())  # type: ignore[arg-type]
    assert caught.value.field == "ulysses_degree"
