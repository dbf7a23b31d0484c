"""The engine over AsyncOmni: residency, eviction, failures, seeds, outputs, loading."""

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from contracts.errors import (
    ChunkMetadataError,
    ConfigurationError,
    InvalidArgumentError,
    KVStateError,
    NotResidentError,
    SessionError,
)
from contracts.tick import metadata_from_envelope
from gpu_worker import omni_engine
from gpu_worker.__main__ import load_factory
from gpu_worker.config import WorkerSettings
from gpu_worker.engine import ARDiffusionEngine, TickEngine
from gpu_worker.omni_engine import OmniSetup, OmniTickEngine, chunk_seed, connect, text_prompt
from support.kv_pipeline import make_tick
from support.omni_doubles import (
    AsyncOmni,
    OmniDiffusionSamplingParams,
    SamplingParams,
    omni_over_runner,
    output_of,
)


class Rig:
    """An engine, its double of AsyncOmni, and who was evicted."""

    def __init__(self) -> None:
        self.omni = AsyncOmni(lambda tick, params: [output_of(tick)])
        self.setup: dict[str, Any] = {}
        self.engine = OmniTickEngine("omni-world", self.connect, capacity=2)
        self.evicted: list[str] = []
        self.engine.on_evict = self.evicted.append

    def connect(self) -> OmniSetup:
        return OmniSetup(self.omni, self.omni.default_sampling_params_list, 0, **self.setup)

    def tick(self, session_id: str = "w", chunk_index: int = 0, *, seed: int = 5, **changes: Any) -> Any:
        params = changes.pop("params", {})
        return self.engine.execute_tick(
            make_tick(session_id, chunk_index, **changes), params=params, seed=seed
        )

    def rpcs(self) -> list[tuple[str, str]]:
        return [(call["method"].partition("_")[0], *call["args"]) for call in self.omni.called]


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    rig.engine.start()
    yield rig
    rig.engine.close()


# ---------------------------------------------------------------------------------------------------- sessions


def test_it_is_a_tick_engine(rig: Rig) -> None:
    engine: TickEngine = rig.engine
    assert (engine.model, engine.capacity, engine.memory()) == (
        "omni-world",
        2,
        {"capacity": 2, "resident": 0},
    )
    engine.check_integrity()


def test_a_tick_beyond_chunk_0_of_a_session_that_is_not_here_is_never_sent(rig: Rig) -> None:
    with pytest.raises(NotResidentError):
        rig.tick("w", 1)
    rig.tick("w", 0)
    rig.tick("w", 1)
    rig.engine.close_session("w")
    with pytest.raises(NotResidentError):
        rig.tick("w", 2)
    assert [call["request_id"] for call in rig.omni.generated] == ["w-0", "w-1"]


def test_the_least_recently_used_session_makes_room_before_the_engine_has_to(rig: Rig) -> None:
    rig.tick("a")
    rig.tick("b")
    rig.tick("a", 1)
    rig.tick("c")
    assert (rig.evicted, rig.rpcs()) == (["b"], [("close", "b")])
    assert rig.engine.resident_sessions() == ("a", "c")
    assert not rig.engine.is_resident("b")


def test_reset_and_close_reach_the_workers(rig: Rig) -> None:
    rig.tick("a")
    rig.engine.reset_session("a")
    rig.engine.close_session("a")
    rig.tick("b")
    rig.engine.close_session("b")
    rig.engine.close_session("b")
    assert rig.rpcs() == [("reset", "a"), ("close", "b")]
    assert rig.engine.resident_sessions() == ()


def test_the_flags_of_a_tick_are_carried_out(rig: Rig) -> None:
    rig.tick("a")
    rig.tick("a", reset=True)
    rig.tick("a", 1, close_session=True)
    assert rig.rpcs() == [("reset", "a"), ("close", "a")]
    assert not rig.engine.is_resident("a")


@pytest.mark.parametrize("what", ["reset", "close"])
def test_a_release_that_a_worker_refused_is_told_and_can_be_repeated(rig: Rig, what: str) -> None:
    rig.tick("a")
    rig.omni.rpc = lambda method, session_id: [False]
    with pytest.raises(SessionError, match="not supported by every selected worker"):
        getattr(rig.engine, f"{what}_session")("a")
    rig.omni.rpc = lambda method, session_id: [True]
    rig.engine.close_session("a")
    assert rig.rpcs() == [(what, "a"), ("close", "a")]
    assert rig.engine.resident_sessions() == ()


# ---------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"error": "boom"}, SessionError),
        ({"request_id": "other"}, ChunkMetadataError),
        ({"multimodal_output": {"latents": torch.zeros(1)}}, ChunkMetadataError),
    ],
    ids=["error", "request", "metadata"],
)
def test_a_failed_tick_releases_the_session(
    rig: Rig, changes: dict[str, Any], error: type[Exception]
) -> None:
    rig.tick("a")
    rig.omni.respond = lambda tick, params: [output_of(tick, **changes)]
    with pytest.raises(error):
        rig.tick("a", 1)
    assert (rig.rpcs(), rig.engine.resident_sessions(), rig.evicted) == ([("close", "a")], (), [])


def test_what_could_not_be_released_is_released_before_another_session_gets_its_room(rig: Rig) -> None:
    rig.tick("a")
    rig.omni.respond = lambda tick, params: [output_of(tick, error="boom")]
    rig.omni.rpc = lambda method, session_id: [False]
    with pytest.raises(SessionError, match="boom"):
        rig.tick("a", 1)
    rig.omni.respond = lambda tick, params: [output_of(tick)]

    with pytest.raises(SessionError, match="not supported"):
        rig.tick("b")
    assert len(rig.omni.generated) == 2, "nothing was generated while the worker may still hold the session"
    rig.omni.rpc = lambda method, session_id: [True]
    rig.tick("b")

    assert rig.rpcs() == [("close", "a"), ("close", "a"), ("close", "a")]
    rig.engine.close_session("a")
    assert len(rig.rpcs()) == 3, "it is released by now"


def test_a_session_that_could_not_be_released_is_not_simply_begun_again(rig: Rig) -> None:
    rig.tick("a")
    rig.omni.respond = lambda tick, params: [output_of(tick, error="boom")]
    rig.omni.rpc = lambda method, session_id: [False]
    with pytest.raises(SessionError, match="boom"):
        rig.tick("a", 1)
    with pytest.raises(SessionError, match="not supported"):
        rig.tick("a")
    with pytest.raises(SessionError, match="not supported"):
        rig.engine.close_session("a")


def test_an_engine_with_two_replicas_does_not_start() -> None:
    rig = Rig()
    rig.omni.engine.stage_pools[0].num_replicas = 2
    with pytest.raises(ConfigurationError, match="num_replicas=2"):
        rig.engine.start()
    rig.engine.close()


def test_an_engine_that_was_closed_says_so(rig: Rig) -> None:
    rig.engine.close()
    rig.engine.close()
    assert rig.omni.ended
    with pytest.raises(KVStateError, match="loop"):
        rig.engine.check_integrity()
    with pytest.raises(KVStateError, match="loop"):
        rig.tick("a")


# ---------------------------------------------------------------------------------------------------- what is sent


def test_each_chunk_has_a_seed_of_its_own_that_follows_from_the_sessions() -> None:
    seeds = [chunk_seed(seed, index) for seed in range(20) for index in range(20)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert chunk_seed(7, 3) == chunk_seed(7, 3)


def test_seed_and_prompt_reach_the_engine(rig: Rig) -> None:
    rig.tick("a", prompt="a lake", params={"images": ["a.png"]}, seed=7)
    rig.tick("a", 1, seed=7)
    first, second = rig.omni.generated
    assert first["prompt"] == {"prompt": "a lake", "multi_modal_data": {"image": ["a.png"]}}
    assert second["prompt"] == {"prompt": "", "multi_modal_data": {"image": ["a.png"]}}
    assert [call["sampling_params_list"][0].seed for call in (first, second)] == [
        chunk_seed(7, 0),
        chunk_seed(7, 1),
    ]
    assert text_prompt(make_tick(prompt="x"), {"fov": 60}) == {"prompt": "x"}


def test_a_prompt_of_ones_own_and_a_limit_of_the_calls() -> None:
    rig = Rig()
    rig.setup = {"prompt_of": lambda tick, params: [tick.chunk_index, params["fov"]], "rpc_timeout_s": 2.5}
    rig.engine.start()
    rig.tick("a", params={"fov": 60})
    rig.engine.close_session("a")
    rig.engine.close()
    assert rig.omni.generated[0]["prompt"] == [0, 60]
    assert rig.omni.called[0]["timeout"] == 2.5


# ---------------------------------------------------------------------------------------------------- what comes back


def test_tensors_arrays_and_bytes_become_the_payload(rig: Rig) -> None:
    latents, array = torch.ones(3), np.ones(2)
    rig.omni.respond = lambda tick, params: [
        output_of(
            tick,
            latents=latents,
            multimodal_output=output_of(tick).multimodal_output
            | {"array": array, "raw": b"x", "fps": 12, "text": "x", "latents": torch.zeros(1)},
        )
    ]
    output = rig.tick("a", applied_event_ids=(3,))
    assert set(output.payload) == {"array", "raw", "latents"}
    assert output.payload["latents"] is latents
    metadata_from_envelope(output.metadata).check_equals(make_tick("a", applied_event_ids=(3,)))
    assert output.frames is None


@pytest.mark.parametrize("nested", [False, True])
def test_pictures_become_pixel_frames(rig: Rig, nested: bool) -> None:
    pictures: list[Any] = [Image.new("RGBA", (4, 2), colour) for colour in ("red", "blue")]
    rig.omni.respond = lambda tick, params: [output_of(tick, images=[pictures] if nested else pictures)]
    frames = rig.tick("a").frames
    assert (frames.shape, frames.dtype) == ((2, 2, 4, 3), np.uint8)
    assert frames[1, 0, 0].tolist() == [0, 0, 255]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"images": [Image.new("RGB", (4, 2)), Image.new("RGB", (2, 2))]}, "frames"),
        ({"images": [np.zeros((2, 2, 3), np.float32)]}, "frames"),
        ({"multimodal_output": {}}, "payload"),
    ],
    ids=["sizes", "floats", "nothing"],
)
def test_an_output_that_holds_nothing_usable_is_refused(
    rig: Rig, changes: dict[str, Any], field: str
) -> None:
    def respond(tick: Any, params: Any) -> list[Any]:
        output = output_of(tick, **changes)
        if not output.multimodal_output:
            output.multimodal_output = {"metadata": output_of(tick).multimodal_output["metadata"]}
        return [output]

    rig.omni.respond = respond
    with pytest.raises(InvalidArgumentError) as caught:
        rig.tick("a")
    assert caught.value.field == field
    assert not rig.engine.is_resident("a")


def test_through_the_engine_a_runner_yields_what_it_yields_without() -> None:
    omni, worker = omni_over_runner()
    engine = OmniTickEngine(
        "sketch", lambda: OmniSetup(omni, omni.default_sampling_params_list, 0), capacity=1
    )
    engine.start()
    through = [engine.execute_tick(make_tick("w", index), params={}, seed=3) for index in range(3)]
    engine.close_session("w")
    assert worker.model_runner.session_ids == ()
    engine.close()

    alone = ARDiffusionEngine("sketch", worker.model_runner)
    for index, output in enumerate(through):
        same = alone.execute_tick(make_tick("w", index), params={}, seed=chunk_seed(3, 0))
        assert torch.equal(output.payload["latents"], same.payload["latents"])


# ---------------------------------------------------------------------------------------------------- loading


def test_the_engine_is_chosen_by_its_name_and_missed_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    factory = load_factory("vllm-omni")
    monkeypatch.setattr(omni_engine, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'worldline\[vllm-omni\]'") as caught:
        factory(WorkerSettings(model="org/world"))
    assert caught.value.field == "engine"


@pytest.mark.parametrize(("settings", "capacity"), [({}, 1), ({"session_capacity": 3}, 3)])
def test_the_named_engine_loads_the_model_with_its_defaults(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], capacity: int
) -> None:
    omni = AsyncOmni(
        lambda tick, params: [output_of(tick, stage_id=1)],
        replicas=(1, 1),
        templates=(SamplingParams(), OmniDiffusionSamplingParams()),
    )
    asked: list[str] = []

    def load(*, model: str) -> AsyncOmni:
        asked.append(model)
        return omni

    module = ModuleType("vllm_omni.entrypoints.async_omni")
    module.AsyncOmni = load  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(omni_engine, "find_spec", lambda name: object())

    engine = load_factory("vllm-omni")(WorkerSettings(model="org/world", **settings))
    engine.start()
    engine.execute_tick(make_tick("w"), params={}, seed=0)
    engine.close_session("w")

    assert (asked, engine.model, engine.capacity) == (["org/world"], "org/world", capacity)
    assert omni.called[0]["stage_ids"] == [1]
    engine.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "templates", [(SamplingParams(),), (OmniDiffusionSamplingParams(),) * 2], ids=["none", "two"]
)
def test_a_model_must_have_one_diffusion_stage(monkeypatch: pytest.MonkeyPatch, templates: Any) -> None:
    module = ModuleType("vllm_omni.entrypoints.async_omni")
    module.AsyncOmni = lambda model: AsyncOmni(lambda tick, params: [], templates=templates)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(ConfigurationError, match=f"it has {len(templates) if len(templates) > 1 else 0}"):
        connect("org/world")
