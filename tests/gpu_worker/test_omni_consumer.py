"""The consumer of an AsyncOmni engine: each line of its contract, over doubles of the published shapes."""

import copy
from typing import Any

import pytest

from contracts.errors import ChunkMetadataError, InvalidArgumentError, InvalidTypeError, ModelError
from contracts.events import ARDiffusionControlInput
from contracts.tick import ARDiffusionChunkMetadata, ARDiffusionTickRequest
from gpu_worker.omni import ARDiffusionOmniTickConsumer
from support.omni_doubles import (
    STAGE,
    AsyncOmniDouble,
    DiffusionParamsDouble,
    StagePoolDouble,
    TextParamsDouble,
    envelope,
    output_for,
)

TICK = ARDiffusionTickRequest(
    session_id="world-1",
    request_id="chunk-request-7",
    chunk_index=7,
    applied_event_ids=(7, 8),
    prompt="turn left",
    controls=(ARDiffusionControlInput("camera", "poses", {"poses": [[1.0]]}),),
)


@pytest.fixture
def engine() -> AsyncOmniDouble:
    return AsyncOmniDouble()


def consumer(engine: Any, **changed: Any) -> ARDiffusionOmniTickConsumer:
    arguments: dict[str, Any] = {
        "sampling_params_list": [TextParamsDouble(), DiffusionParamsDouble()],
        "diffusion_stage_id": STAGE,
        "prompt_provider": lambda tick: {"prompt": tick.prompt},
    }
    return ARDiffusionOmniTickConsumer(engine, **arguments | changed)


# --- 1: sampling params and stage
@pytest.mark.parametrize("templates", [[], (), None, "ab", 3])
def test_without_sampling_params_it_can_not_be_made(engine: AsyncOmniDouble, templates: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="sampling_params_list") as caught:
        consumer(engine, sampling_params_list=templates)
    assert isinstance(caught.value, ValueError)
    assert caught.value.field == "sampling_params_list"


@pytest.mark.parametrize("stage_id", [-1, 2, True, False, 1.0, "1", None])
def test_the_stage_is_an_int_inside_the_list_and_no_bool(engine: AsyncOmniDouble, stage_id: Any) -> None:
    params = [DiffusionParamsDouble(), DiffusionParamsDouble()]
    with pytest.raises(ValueError, match="diffusion_stage_id") as caught:
        consumer(engine, sampling_params_list=params, diffusion_stage_id=stage_id)
    assert caught.value.field == "diffusion_stage_id"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "params", [TextParamsDouble(), None, {}, {"extra_args": {}}, DiffusionParamsDouble(extra_args=[1])]
)
def test_the_stages_entry_must_be_diffusion_params(engine: AsyncOmniDouble, params: Any) -> None:
    with pytest.raises(InvalidTypeError, match="sampling params") as caught:
        consumer(engine, sampling_params_list=[DiffusionParamsDouble(), params])
    assert isinstance(caught.value, TypeError)
    assert caught.value.field == "sampling_params_list"


def test_where_the_class_of_diffusion_params_is_known_the_entry_must_be_one(engine: AsyncOmniDouble) -> None:
    class Other:
        extra_args = None

    with pytest.raises(TypeError, match="must be DiffusionParamsDouble, got Other"):
        consumer(engine, sampling_params_list=[0, Other()], diffusion_params_type=DiffusionParamsDouble)
    consumer(engine, diffusion_params_type=DiffusionParamsDouble)


@pytest.mark.parametrize("modalities", ["image", 3, [1]])
def test_output_modalities_are_a_list_of_names_or_none(engine: AsyncOmniDouble, modalities: Any) -> None:
    with pytest.raises(ValueError, match="output_modalities"):
        consumer(engine, output_modalities=modalities)


def test_an_engine_that_can_not_generate_is_refused() -> None:
    with pytest.raises(InvalidTypeError, match="object has no generate"):
        consumer(object())


# --- 2: replicas
@pytest.mark.parametrize("replicas", [0, -1, True, 1.0, "1", None])
def test_the_number_of_replicas_is_an_int_of_at_least_1(engine: AsyncOmniDouble, replicas: Any) -> None:
    engine.stage_pools[STAGE].num_replicas = replicas
    with pytest.raises(ValueError, match=r"stage_pools\[1\].num_replicas must be an integer") as caught:
        consumer(engine)
    assert caught.value.field == "num_replicas"  # type: ignore[attr-defined]


@pytest.mark.parametrize("pools", [None, [], [StagePoolDouble()], {}, [None, object()]])
def test_an_engine_that_does_not_expose_its_replicas_is_refused(engine: AsyncOmniDouble, pools: Any) -> None:
    engine.stage_pools = pools
    with pytest.raises(ValueError, match=r"must expose stage_pools\[1\].num_replicas"):
        consumer(engine)


def test_two_replicas_are_refused(engine: AsyncOmniDouble) -> None:
    engine.stage_pools = {STAGE: StagePoolDouble(2)}
    with pytest.raises(ValueError, match=r"exactly one replica.*num_replicas=2"):
        consumer(engine)


async def test_a_stage_that_was_scaled_up_since_generates_nothing_more(engine: AsyncOmniDouble) -> None:
    made = consumer(engine)
    engine.stage_pools[STAGE].num_replicas = 2
    with pytest.raises(ValueError, match=r"exactly one replica.*num_replicas=2"):
        await made.execute_tick(TICK)
    assert engine.generated == []


async def test_the_replicas_of_other_stages_do_not_matter(engine: AsyncOmniDouble) -> None:
    engine.stage_pools[0].num_replicas = 4
    assert (await consumer(engine).execute_tick(TICK)).metadata.chunk_index == 7


# --- 3: templates
@pytest.mark.parametrize("own", [None, {}, {"deployment_option": "kept", "more": [1]}])
async def test_templates_are_copied_and_their_extra_args_merged(
    engine: AsyncOmniDouble, own: dict[str, Any] | None
) -> None:
    templates = [TextParamsDouble(0.5), DiffusionParamsDouble(own, num_inference_steps=9)]
    before = copy.deepcopy(templates)

    await consumer(engine, sampling_params_list=templates).execute_tick(TICK)

    sent = engine.generated[0]["sampling_params_list"]
    assert sent[STAGE].extra_args == {**(own or {}), "ar_diffusion_tick": TICK.to_dict()}
    assert sent == [before[0], DiffusionParamsDouble(sent[STAGE].extra_args, num_inference_steps=9)]
    assert templates == before
    assert all(one is not other for one, other in zip(sent, templates, strict=True))


async def test_a_copy_is_shallow(engine: AsyncOmniDouble) -> None:
    weights = [1, 2]
    await consumer(
        engine, sampling_params_list=[0, DiffusionParamsDouble({"weights": weights})]
    ).execute_tick(TICK)
    assert engine.generated[0]["sampling_params_list"][STAGE].extra_args["weights"] is weights


async def test_a_tick_never_sees_the_one_before_nor_one_of_the_template(engine: AsyncOmniDouble) -> None:
    made = consumer(engine, sampling_params_list=[0, DiffusionParamsDouble({"ar_diffusion_tick": "stale"})])
    later = ARDiffusionTickRequest("world-1", "chunk-request-8", 8)
    await made.execute_tick(TICK)
    await made.execute_tick(later)
    assert [engine.sent(0), engine.sent(1)] == [TICK.to_dict(), later.to_dict()]


# --- 4: the call
@pytest.mark.parametrize("modalities", [None, ["image"], ("image", "latents"), []])
async def test_generate_gets_prompt_request_id_params_and_modalities(
    engine: AsyncOmniDouble, modalities: Any
) -> None:
    asked: list[ARDiffusionTickRequest] = []

    def provide(tick: ARDiffusionTickRequest) -> str:
        asked.append(tick)
        return "the prompt"

    await consumer(engine, prompt_provider=provide, output_modalities=modalities).execute_tick(TICK)

    (call,) = engine.generated
    assert set(call) == {"prompt", "request_id", "sampling_params_list", "output_modalities"}
    assert (call["prompt"], call["request_id"]) == ("the prompt", "chunk-request-7")
    assert call["output_modalities"] == (None if modalities is None else list(modalities))
    assert isinstance(call["sampling_params_list"], list)
    assert asked == [TICK]


# --- 5: which output
async def test_the_last_finished_output_of_the_stage_is_used(engine: AsyncOmniDouble) -> None:
    last = output_for(TICK)
    engine.answers = lambda tick: [
        output_for(tick, stage_id=0, error="of another stage"),
        output_for(tick, error="an earlier one"),
        last,
        output_for(tick, finished=False, error="unfinished"),
        output_for(tick, stage_id=2, error="of another stage"),
    ]
    chunk = await consumer(engine).execute_tick(TICK)
    assert chunk.output is last
    assert chunk.metadata == ARDiffusionChunkMetadata.from_tick(TICK)


@pytest.mark.parametrize("fields", [None, {"stage_id": 0}, {"finished": False}])
async def test_without_a_finished_output_of_the_stage_the_tick_fails(
    engine: AsyncOmniDouble, fields: dict[str, Any] | None
) -> None:
    engine.answers = lambda tick: [] if fields is None else [output_for(tick, **fields)]
    with pytest.raises(ModelError, match="without a final output") as caught:
        await consumer(engine).execute_tick(TICK)
    assert isinstance(caught.value, RuntimeError)


async def test_what_generate_raises_comes_out_unchanged(engine: AsyncOmniDouble) -> None:
    error = KeyError("engine is dead")

    def answers(_: ARDiffusionTickRequest) -> Any:
        yield output_for(TICK)
        raise error

    engine.answers = answers
    with pytest.raises(KeyError) as caught:
        await consumer(engine).execute_tick(TICK)
    assert caught.value is error


# --- 6 and 7: error before request id before metadata
async def test_an_error_of_the_output_comes_before_anything_else(engine: AsyncOmniDouble) -> None:
    engine.answers = lambda tick: [
        output_for(tick, error="CUDA out of memory", request_id="other", multimodal_output=None)
    ]
    with pytest.raises(RuntimeError, match="CUDA out of memory") as caught:
        await consumer(engine).execute_tick(TICK)
    assert caught.value.code == "model_error"  # type: ignore[attr-defined]


async def test_an_output_for_another_request_comes_before_its_metadata(engine: AsyncOmniDouble) -> None:
    engine.answers = lambda tick: [output_for(tick, request_id="other", multimodal_output=None)]
    with pytest.raises(ValueError, match=r"'other'.*'chunk-request-7'") as caught:
        await consumer(engine).execute_tick(TICK)
    assert (caught.value.code, caught.value.field) == ("metadata_mismatch", "request_id")  # type: ignore[attr-defined]


# --- 8: metadata
@pytest.mark.parametrize("output", [None, {}, [], "x", {"payload": {}}])
async def test_an_output_without_metadata_is_refused(engine: AsyncOmniDouble, output: Any) -> None:
    engine.answers = lambda tick: [output_for(tick, multimodal_output=output)]
    with pytest.raises(ChunkMetadataError, match=r"multimodal_output\.metadata") as caught:
        await consumer(engine).execute_tick(TICK)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("metadata", [None, {}, [], "ar_diffusion", {"other": {}}])
async def test_metadata_without_the_envelope_is_refused(engine: AsyncOmniDouble, metadata: Any) -> None:
    engine.answers = lambda tick: [output_for(tick, multimodal_output={"metadata": metadata})]
    with pytest.raises(ValueError, match="'ar_diffusion'"):
        await consumer(engine).execute_tick(TICK)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"session_id": ""}, "session_id"),
        ({"session_id": 3}, "session_id"),
        ({"request_id": None}, "request_id"),
        ({"chunk_index": "7"}, "chunk_index"),
        ({"chunk_index": True}, "chunk_index"),
        ({"chunk_index": -1}, "chunk_index"),
        ({"applied_event_ids": "78"}, "applied_event_ids"),
        ({"applied_event_ids": None}, "applied_event_ids"),
        ({"applied_event_ids": [True]}, "applied_event_ids"),
        ({"applied_event_ids": [8, 7]}, "unique and strictly increasing"),
        ({"applied_event_ids": [7, 7]}, "unique and strictly increasing"),
        ({"more": 1}, "more"),
    ],
)
async def test_metadata_of_a_wrong_type_is_refused(
    engine: AsyncOmniDouble, changed: dict[str, Any], said: str
) -> None:
    engine.answers = lambda tick: [output_for(tick, multimodal_output=envelope(tick, **changed))]
    with pytest.raises(ValueError, match=said) as caught:
        await consumer(engine).execute_tick(TICK)
    assert caught.value.code == "metadata_mismatch"  # type: ignore[attr-defined]


async def test_metadata_of_another_tick_is_returned_as_it_is_because_the_session_compares(
    engine: AsyncOmniDouble,
) -> None:
    engine.answers = lambda tick: [output_for(tick, multimodal_output=envelope(tick, chunk_index=6))]
    chunk = await consumer(engine).execute_tick(TICK)
    with pytest.raises(ChunkMetadataError, match="does not match"):
        chunk.metadata.check_equals(TICK)
