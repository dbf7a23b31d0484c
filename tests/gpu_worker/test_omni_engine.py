"""`TickEngine` over an AsyncOmni engine: rooms, releases, setups and start-up, over doubles of the published shapes."""

import dataclasses
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from contracts.errors import (
    ChunkMetadataError,
    ConfigurationError,
    InvalidArgumentError,
    InvalidTypeError,
    KVStateError,
    ModelError,
    NotResidentError,
)
from contracts.tick import ARDiffusionTickRequest
from gpu_worker.__main__ import load_factory
from gpu_worker.omni_engine import OmniTickEngine, make_engine
from support.omni_doubles import (
    STAGE,
    AsyncOmniDouble,
    DiffusionParamsDouble,
    envelope,
    output_for,
    setup_for,
    started,
)

Start = Callable[..., OmniTickEngine]


@pytest.fixture
def omni() -> AsyncOmniDouble:
    return AsyncOmniDouble()


@pytest.fixture
def start(omni: AsyncOmniDouble) -> Iterator[Start]:
    """`engine = start(capacity=2)`; ended after the test."""
    engines: list[OmniTickEngine] = []

    def run(**changed: Any) -> OmniTickEngine:
        engines.append(started(omni, **changed))
        return engines[-1]

    yield run
    for engine in engines:
        engine.stop()


def tick(session_id: str, index: int = 0, **fields: Any) -> ARDiffusionTickRequest:
    return ARDiffusionTickRequest(session_id, f"ar-{session_id}-{index}", index, **fields)


def run(engine: OmniTickEngine, session_id: str, index: int = 0, **fields: Any) -> Any:
    return engine.execute_tick(tick(session_id, index, **fields), params={}, seed=0)


def calls(omni: AsyncOmniDouble) -> list[tuple[str, str]]:
    return omni.runner.calls


# --- ticks
def test_a_chunk_comes_back_as_payload_and_metadata(omni: AsyncOmniDouble, start: Start) -> None:
    output = run(start(), "a", applied_event_ids=(3, 4))
    assert output.error is None
    assert output.frames is None
    assert output.payload["latents"].shape == (1, 4, 2, 4)
    expected = {
        "session_id": "a",
        "request_id": "ar-a-0",
        "chunk_index": 0,
        "applied_event_ids": [3, 4],
    }
    assert output.metadata == {"ar_diffusion": expected}


def test_a_payload_that_is_one_value_gets_a_name(omni: AsyncOmniDouble, start: Start) -> None:
    omni.answers = lambda t: [output_for(t, multimodal_output=envelope(t) | {"payload": b"\1\2"})]
    assert run(start(), "a").payload == {"payload": b"\1\2"}


def test_frames_are_those_of_the_setups_provider(omni: AsyncOmniDouble, start: Start) -> None:
    frames = np.zeros((9, 2, 2, 3), np.uint8)
    assert run(start(frames_provider=lambda output: frames), "a").frames is frames


def test_everything_of_the_engine_runs_on_one_loop_in_another_thread(
    omni: AsyncOmniDouble, start: Start
) -> None:
    threads: set[str] = set()

    def provide(_: ARDiffusionTickRequest) -> str:
        threads.add(threading.current_thread().name)
        return "prompt"

    engine = start(prompt_provider=provide)
    run(engine, "a")
    run(engine, "a", 1)
    engine.reset_session("a")
    assert threads == {"omni"}
    assert len(omni.loops) == 1


def test_a_tick_beyond_chunk_0_of_a_session_that_is_not_here_touches_nothing(
    omni: AsyncOmniDouble, start: Start
) -> None:
    engine = start(capacity=1)
    run(engine, "a")
    for fields in ({}, {"reset": True}):
        with pytest.raises(NotResidentError) as caught:
            run(engine, "b", 1, **fields)
        assert caught.value.code == "not_resident"
    assert len(omni.generated) == 1
    assert calls(omni) == []
    assert engine.resident_sessions() == ("a",)


def test_a_tick_that_resets_keeps_its_room_and_one_that_closes_gives_it_back(
    omni: AsyncOmniDouble, start: Start
) -> None:
    engine = start(capacity=1)
    run(engine, "a")
    run(engine, "a", reset=True)
    assert engine.resident_sessions() == ("a",)
    assert omni.sent()["reset"] is True
    run(engine, "a", 1, close_session=True)
    assert engine.resident_sessions() == ()
    assert calls(omni) == [], "the engine does both by itself"


# --- rooms
def test_the_least_recently_used_session_makes_room_and_is_told(omni: AsyncOmniDouble, start: Start) -> None:
    engine = start(capacity=2)
    evicted: list[str] = []
    engine.on_evict = evicted.append
    run(engine, "a")
    run(engine, "b")
    run(engine, "a", 1)
    run(engine, "c")
    assert evicted == ["b"]
    assert calls(omni) == [("close", "b")]
    assert engine.resident_sessions() == ("a", "c")
    assert not engine.is_resident("b")
    with pytest.raises(NotResidentError):
        run(engine, "b", 1)


def test_a_failed_tick_releases_its_session_and_no_other(omni: AsyncOmniDouble, start: Start) -> None:
    engine = start()
    run(engine, "a")
    run(engine, "b")
    omni.answers = lambda t: [output_for(t, error="boom")]
    with pytest.raises(ModelError, match="boom"):
        run(engine, "a", 1)
    assert calls(omni) == [("close", "a")]
    assert engine.resident_sessions() == ("b",)


@pytest.mark.parametrize("exit_", [SystemExit(3), KeyboardInterrupt()])
def test_a_prompt_provider_that_exits_fails_its_tick_only(
    omni: AsyncOmniDouble, start: Start, exit_: BaseException
) -> None:
    def provide(one: ARDiffusionTickRequest) -> str:
        if one.session_id == "a":
            raise exit_
        return "prompt"

    engine = start(prompt_provider=provide)
    with pytest.raises(type(exit_)):
        run(engine, "a")
    assert engine.resident_sessions() == ()
    run(engine, "b")
    engine.check_integrity()


def test_malformed_metadata_fails_the_tick(omni: AsyncOmniDouble, start: Start) -> None:
    omni.answers = lambda t: [output_for(t, multimodal_output=envelope(t, applied_event_ids=[8, 7]))]
    with pytest.raises(ChunkMetadataError, match="strictly increasing"):
        run(start(), "a")
    assert calls(omni) == [("close", "a")]


def test_a_release_that_failed_keeps_its_room_until_it_succeeds(omni: AsyncOmniDouble, start: Start) -> None:
    engine = start(capacity=1)
    run(engine, "a")
    omni.runner.fails["close"] = 2
    for _ in range(2):
        with pytest.raises(RuntimeError, match="scripted failure"):
            engine.close_session("a")
        assert engine.is_resident("a")
        assert engine.memory() == {"capacity": 1, "resident": 1, "unreleased": 1}
    with pytest.raises(NotResidentError):
        run(engine, "a", 1)
    engine.close_session("a")
    assert engine.memory() == {"capacity": 1, "resident": 0, "unreleased": 0}
    engine.close_session("a")
    assert calls(omni) == [("close", "a")] * 3, "one that is not here is not closed"


def test_while_a_room_can_not_be_had_back_no_other_session_pays(omni: AsyncOmniDouble, start: Start) -> None:
    engine = start(capacity=2)
    evicted: list[str] = []
    engine.on_evict = evicted.append
    run(engine, "a")
    run(engine, "b")
    omni.runner.fails["close"] = 3
    with pytest.raises(RuntimeError):
        engine.close_session("a")
    for name in ("c", "d"):
        with pytest.raises(ModelError, match="no room: the engine does not release a"):
            run(engine, name)
    assert engine.resident_sessions() == ("a", "b")
    run(engine, "b", 1)

    run(engine, "c")
    assert engine.resident_sessions() == ("b", "c")
    assert evicted == []
    assert calls(omni) == [("close", "a")] * 4


def test_an_eviction_that_fails_is_told_all_the_same_and_its_room_stays_taken(
    omni: AsyncOmniDouble, start: Start
) -> None:
    engine = start(capacity=1)
    evicted: list[str] = []
    engine.on_evict = evicted.append
    run(engine, "a")
    omni.runner.fails["close"] = 1
    with pytest.raises(ModelError, match="no room"):
        run(engine, "b")
    assert evicted == ["a"]
    assert engine.resident_sessions() == ("a",)
    run(engine, "b")
    assert engine.resident_sessions() == ("b",)
    assert evicted == ["a"]


def test_a_failed_tick_whose_release_fails_raises_its_own_error_and_keeps_its_room(
    omni: AsyncOmniDouble, start: Start
) -> None:
    engine = start()
    omni.runner.fails["close"] = 1
    omni.answers = lambda t: [output_for(t, error="boom")]
    with pytest.raises(ModelError, match="boom"):
        run(engine, "a")
    assert engine.memory()["unreleased"] == 1


def test_a_session_whose_release_failed_begins_anew_only_once_it_is_released(
    omni: AsyncOmniDouble, start: Start
) -> None:
    engine = start()
    run(engine, "a")
    omni.runner.fails["close"] = 2
    with pytest.raises(RuntimeError, match="scripted"):
        engine.close_session("a")
    with pytest.raises(RuntimeError, match="scripted"):
        run(engine, "a")
    assert len(omni.generated) == 1
    run(engine, "a")
    assert len(omni.generated) == 2
    assert engine.memory()["unreleased"] == 0


def test_a_reset_gives_the_room_back_or_keeps_it_when_it_fails(omni: AsyncOmniDouble, start: Start) -> None:
    engine = start()
    run(engine, "a")
    omni.runner.fails["reset"] = 1
    with pytest.raises(RuntimeError, match="scripted failure of a reset"):
        engine.reset_session("a")
    assert engine.is_resident("a")
    engine.reset_session("a")
    assert not engine.is_resident("a")
    engine.reset_session("b")
    assert calls(omni) == [("reset", "a"), ("reset", "a"), ("reset", "b")]


def test_releases_go_to_the_stages_of_the_setup_within_its_time(omni: AsyncOmniDouble, start: Start) -> None:
    start().reset_session("a")
    start(stage_ids=[0, STAGE], rpc_timeout_s=2).reset_session("a")
    assert [(rpc["stage_ids"], rpc["timeout"]) for rpc in omni.rpcs] == [([1], 30.0), ([0, 1], 2.0)]


# --- what a session was created with
def test_a_session_with_parameters_needs_a_setup_that_follows_them(
    omni: AsyncOmniDouble, start: Start
) -> None:
    engine = start(capacity=1)
    run(engine, "a")
    with pytest.raises(InvalidArgumentError, match="for_session") as caught:
        engine.execute_tick(tick("b"), params={"image": "x"}, seed=0)
    assert caught.value.field == "params"
    assert engine.resident_sessions() == ("a",), "what refuses a session makes nobody go"


def test_a_setup_follows_parameters_and_seed_at_each_tick(omni: AsyncOmniDouble, start: Start) -> None:
    def for_session(params: Any, seed: int) -> Any:
        own = DiffusionParamsDouble({"seed": seed})
        return dataclasses.replace(
            setup_for(omni),
            sampling_params_list=[0, own],
            prompt_provider=lambda one: (one.prompt, params["image"]),
        )

    engine = start(for_session=for_session)
    for name, index, seed in (("a", 0, 1), ("b", 0, 2), ("a", 1, 1)):
        engine.execute_tick(tick(name, index, prompt="p"), params={"image": name}, seed=seed)
    assert [call["prompt"] for call in omni.generated] == [("p", "a"), ("p", "b"), ("p", "a")]
    seeds = [call["sampling_params_list"][STAGE].extra_args["seed"] for call in omni.generated]
    assert seeds == [1, 2, 1]


def test_a_for_session_that_returns_something_else_is_named(start: Start) -> None:
    with pytest.raises(InvalidTypeError, match="for_session returned dict"):
        run(start(for_session=lambda params, seed: {}), "a")


# --- start-up
@pytest.mark.parametrize("capacity", [0, -1, True, 1.5, None])
def test_the_capacity_is_a_positive_int(omni: AsyncOmniDouble, capacity: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        OmniTickEngine("m", lambda: setup_for(omni), capacity=capacity)
    assert caught.value.field == "capacity"


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"sampling_params_list": []}, "sampling_params_list"),
        ({"sampling_params_list": [0, 1]}, "sampling_params_list"),
        ({"diffusion_stage_id": 2}, "diffusion_stage_id"),
        ({"stage_ids": [True]}, "stage_ids"),
        ({"engine": object()}, "engine"),
        ({"rpc_timeout_s": 0}, "timeout_s"),
    ],
)
def test_an_unsuitable_engine_is_bad_configuration(
    omni: AsyncOmniDouble, changed: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigurationError, match="unsuitable") as caught:
        started(omni, **changed)
    assert caught.value.field == field
    assert "omni" not in {thread.name for thread in threading.enumerate()}, "its loop has ended"


def test_two_replicas_are_bad_configuration(omni: AsyncOmniDouble) -> None:
    omni.stage_pools[STAGE].num_replicas = 2
    with pytest.raises(ConfigurationError, match=r"exactly one replica.*num_replicas=2"):
        started(omni)


def test_a_connect_that_returns_no_setup_is_bad_configuration() -> None:
    with pytest.raises(ConfigurationError, match="must be an OmniSetup, got NoneType"):
        OmniTickEngine("m", lambda: None, capacity=1).start()  # type: ignore[arg-type, return-value]


def test_a_connect_may_be_asynchronous(omni: AsyncOmniDouble) -> None:
    async def connect() -> Any:
        return setup_for(omni)

    engine = OmniTickEngine("m", connect, capacity=1)
    engine.start()
    run(engine, "a")
    engine.stop()


def test_an_engine_whose_loop_has_ended_says_so(start: Start) -> None:
    engine = start()
    run(engine, "a")
    engine.check_integrity()
    engine.stop()
    with pytest.raises(KVStateError, match="event loop"):
        engine.check_integrity()
    with pytest.raises(KVStateError, match="event loop"):
        run(engine, "a", 1)


def test_an_engine_that_is_not_started_says_so(omni: AsyncOmniDouble) -> None:
    engine = OmniTickEngine("m", lambda: setup_for(omni), capacity=1)
    with pytest.raises(KVStateError, match=r"start\(\)"):
        engine.reset_session("a")


# --- --engine vllm-omni
SETUP = "support.omni_doubles:setup"


def settings(**changed: Any) -> Any:
    values = {"model": "omni-world", "session_capacity": None, "omni_setup": SETUP}
    return SimpleNamespace(**values | changed)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package of that name with the double in it."""
    module = ModuleType("vllm_omni")
    module.AsyncOmni = AsyncOmniDouble  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm_omni", module)
    return module


@pytest.mark.parametrize(("wanted", "capacity"), [(None, 1), (3, 3)])
def test_the_named_engine_is_built_with_the_models_name(
    package: ModuleType, wanted: int | None, capacity: int
) -> None:
    engine = load_factory("vllm-omni")(settings(session_capacity=wanted))
    engine.start()
    assert (engine.model, engine.capacity) == ("omni-world", capacity)
    assert run(engine, "a").payload["latents"].shape == (1, 4, 2, 4)  # type: ignore[arg-type]
    engine.stop()  # type: ignore[attr-defined]


def test_a_missing_package_is_bad_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm_omni", None)
    with pytest.raises(ConfigurationError, match=r"worldline\[vllm-omni\]") as caught:
        make_engine(settings())
    assert caught.value.field == "engine"


def test_a_package_without_the_engine_is_bad_configuration(package: ModuleType) -> None:
    del package.AsyncOmni
    with pytest.raises(ConfigurationError, match="AsyncOmni") as caught:
        make_engine(settings())
    assert caught.value.field == "engine"


@pytest.mark.parametrize(
    "name", [None, "", "nothing", "no.such.module:setup", "support.omni_doubles:nothing"]
)
def test_a_setup_that_can_not_be_loaded_is_bad_configuration(package: ModuleType, name: str | None) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make_engine(settings(omni_setup=name))
    assert caught.value.field == "omni_setup"


def test_a_model_that_the_engine_can_not_serve_is_bad_configuration(package: ModuleType) -> None:
    def refuse(model: str) -> None:
        raise OSError(f"no such model: {model}")

    package.AsyncOmni = refuse  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match="no such model: omni-world") as caught:
        make_engine(settings()).start()
    assert caught.value.field == "model"


def test_importing_any_of_it_needs_neither_the_package_nor_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = sys.modules['vllm_omni'] = None\n"
        "import gpu_worker.omni, gpu_worker.omni_rpc, gpu_worker.omni_setup, gpu_worker.omni_engine\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
