"""Ticks through an Omni engine: parameters, call, replicas, outputs, errors, metadata."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from contracts.errors import ChunkMetadataError, ConfigurationError, InvalidTypeError, ModelError
from contracts.events import ARDiffusionControlInput
from contracts.tick import ARDiffusionTickRequest
from gpu_worker.omni import ARDiffusionOmniTickConsumer
from support.omni_doubles import AsyncOmni, OmniDiffusionSamplingParams, SamplingParams, output_of

TICK = ARDiffusionTickRequest(
    "world-1",
    "chunk-request-7",
    7,
    (10, 11),
    "turn left",
    (ARDiffusionControlInput("camera", "poses.v1", {"poses": [[1, 2]]}),),
)


def consumer(omni: Any, **changes: Any) -> ARDiffusionOmniTickConsumer:
    values: dict[str, Any] = {
        "prompt_provider": lambda tick: {"prompt": tick.prompt},
        "sampling_params_list": [OmniDiffusionSamplingParams()],
        "diffusion_stage_id": 0,
    }
    return ARDiffusionOmniTickConsumer(omni, **(values | changes))


def answering(*outputs: Any, **options: Any) -> AsyncOmni:
    return AsyncOmni(lambda tick, params: outputs, **options)


# ---------------------------------------------------------------------------------------------------- construction


@pytest.mark.parametrize("stage_id", [-1, 1, True, "0", 0.0, None])
def test_the_stage_must_be_an_index_into_the_templates(stage_id: Any) -> None:
    with pytest.raises(ValueError, match="diffusion_stage_id") as caught:
        consumer(answering(), diffusion_stage_id=stage_id)
    assert isinstance(caught.value, ConfigurationError)


def test_there_must_be_a_template() -> None:
    with pytest.raises(ValueError, match="sampling_params_list must not be empty"):
        consumer(answering(), sampling_params_list=[])


@pytest.mark.parametrize("params", [SamplingParams(), {"extra_args": {}}, SimpleNamespace(extra_args={})])
def test_the_stages_template_must_be_that_of_a_diffusion_stage(params: Any) -> None:
    with pytest.raises(TypeError, match="OmniDiffusionSamplingParams") as caught:
        consumer(answering(), sampling_params_list=[params])
    assert isinstance(caught.value, InvalidTypeError)


def test_a_subclass_of_diffusion_parameters_will_do() -> None:
    class WithMore(OmniDiffusionSamplingParams):
        pass

    consumer(answering(), sampling_params_list=[SamplingParams(), WithMore()], diffusion_stage_id=1)


# ---------------------------------------------------------------------------------------------------- the call


async def test_templates_are_copied_and_the_tick_is_merged_into_their_extra_args() -> None:
    text, diffusion = (
        SamplingParams(),
        OmniDiffusionSamplingParams(480, extra_args={"deployment_option": "x"}),
    )
    omni = answering(output_of(TICK, stage_id=1), replicas=(2, 1))

    await consumer(omni, sampling_params_list=[text, diffusion], diffusion_stage_id=1).execute_tick(TICK)

    sent_text, sent = omni.generated[0]["sampling_params_list"]
    assert sent.extra_args == {"deployment_option": "x", **TICK.to_extra_args()}
    assert ARDiffusionTickRequest.from_extra_args(sent.extra_args) == TICK
    assert (sent.height, sent.seed) == (480, None)
    assert diffusion == OmniDiffusionSamplingParams(480, extra_args={"deployment_option": "x"})
    assert sent is not diffusion
    assert sent_text == text
    assert sent_text is not text


async def test_a_template_without_extra_args_gets_them() -> None:
    omni = answering(output_of(TICK))
    template = OmniDiffusionSamplingParams(extra_args=None)  # type: ignore[arg-type]

    await consumer(omni, sampling_params_list=[template]).execute_tick(TICK, seed=5)

    sent = omni.generated[0]["sampling_params_list"][0]
    assert (sent.extra_args, sent.seed) == (TICK.to_extra_args(), 5)
    assert (template.extra_args, template.seed) == (None, None)


@pytest.mark.parametrize("modalities", [None, ("image", "latents")])
async def test_generate_is_given_prompt_request_id_and_modalities(modalities: Any) -> None:
    omni = answering(output_of(TICK))

    await consumer(omni, output_modalities=modalities).execute_tick(TICK)

    (call,) = omni.generated
    assert (call["prompt"], call["request_id"]) == ({"prompt": "turn left"}, "chunk-request-7")
    assert call["output_modalities"] == (None if modalities is None else ["image", "latents"])


@pytest.mark.parametrize("replicas", [0, -1, True, "1", None])
async def test_a_number_of_replicas_must_be_told(replicas: Any) -> None:
    omni = answering(output_of(TICK), replicas=(replicas,))
    with pytest.raises(ValueError, match=r"stage_pools\[0\]\.num_replicas"):
        await consumer(omni).execute_tick(TICK)
    assert omni.generated == []


@pytest.mark.parametrize("pools", [None, [], {}, [SimpleNamespace()]])
async def test_an_engine_that_shows_no_stage_is_refused(pools: Any) -> None:
    omni = answering(output_of(TICK))
    omni.engine.stage_pools = pools
    with pytest.raises(ValueError, match="num_replicas"):
        await consumer(omni).execute_tick(TICK)
    assert omni.generated == []


async def test_more_than_one_replica_is_refused_before_anything_is_generated() -> None:
    omni = answering(output_of(TICK), replicas=(2,))
    with pytest.raises(ValueError, match=r"exactly one replica.*num_replicas=2") as caught:
        await consumer(omni).execute_tick(TICK)
    assert isinstance(caught.value, ConfigurationError)
    assert omni.generated == []


async def test_stages_may_stand_on_the_client_itself() -> None:
    omni = answering(output_of(TICK))
    omni.stage_pools = omni.engine.stage_pools  # type: ignore[attr-defined]
    del omni.engine
    await consumer(omni).execute_tick(TICK)
    assert len(omni.generated) == 1


# ---------------------------------------------------------------------------------------------------- outputs


async def test_the_last_finished_output_of_the_stage_counts() -> None:
    first, last = output_of(TICK, final_output_type="latents"), output_of(TICK)
    other, partial = output_of(TICK, stage_id=1), output_of(TICK, finished=False)

    assert await consumer(answering(first, last, other, partial)).execute_tick(TICK) is last


@pytest.mark.parametrize(
    "outputs",
    [[], [output_of(TICK, stage_id=1)], [output_of(TICK, finished=False)]],
    ids=["none", "other", "partial"],
)
async def test_no_final_output_is_an_error(outputs: list[Any]) -> None:
    with pytest.raises(RuntimeError, match="without a final output") as caught:
        await consumer(answering(*outputs)).execute_tick(TICK)
    assert isinstance(caught.value, ModelError)


async def test_an_error_of_the_output_comes_before_everything_else_that_is_wrong_with_it() -> None:
    broken = output_of(TICK, error="out of memory", request_id="other", multimodal_output=None)
    with pytest.raises(RuntimeError, match="out of memory") as caught:
        await consumer(answering(broken)).execute_tick(TICK)
    assert isinstance(caught.value, ModelError)


async def test_an_output_of_another_request_is_refused() -> None:
    with pytest.raises(ValueError, match="other-request") as caught:
        await consumer(answering(output_of(TICK, request_id="other-request"))).execute_tick(TICK)
    assert isinstance(caught.value, ChunkMetadataError)


async def test_what_the_engine_raises_passes_through() -> None:
    def fail(*_: Any) -> Any:
        raise ConnectionResetError("engine died")

    with pytest.raises(ConnectionResetError, match="engine died"):
        await consumer(AsyncOmni(fail)).execute_tick(TICK)


# ---------------------------------------------------------------------------------------------------- metadata


def test_metadata_is_read_from_the_multimodal_output() -> None:
    metadata = consumer(answering()).chunk_metadata(output_of(TICK))
    metadata.check_equals(TICK)


@pytest.mark.parametrize(
    "envelope",
    [None, [], {}, {"metadata": None}, {"metadata": []}, {"metadata": {}}, {"ar_diffusion": {}}],
    ids=repr,
)
def test_an_output_without_metadata_is_malformed(envelope: Any) -> None:
    with pytest.raises(ValueError, match=r"multimodal_output\.metadata.*'ar_diffusion'") as caught:
        consumer(answering()).chunk_metadata(output_of(TICK, multimodal_output=envelope))
    assert isinstance(caught.value, ChunkMetadataError)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"applied_event_ids": [8, 7]}, "unique and strictly increasing"),
        ({"applied_event_ids": "78"}, "applied_event_ids"),
        ({"chunk_index": True}, "chunk_index"),
        ({"chunk_index": "7"}, "chunk_index"),
        ({"session_id": " "}, "session_id"),
        ({"request_id": None}, "request_id"),
        ({"more": 1}, "more"),
    ],
)
def test_metadata_of_bad_types_is_malformed(changes: dict[str, Any], text: str) -> None:
    output = output_of(TICK)
    output.multimodal_output["metadata"]["ar_diffusion"].update(changes)
    with pytest.raises(ValueError, match=text) as caught:
        consumer(answering()).chunk_metadata(output)
    assert isinstance(caught.value, ChunkMetadataError)


# ---------------------------------------------------------------------------------------------------- light


def test_neither_the_engine_nor_torch_is_imported() -> None:
    code = (
        "import sys, gpu_worker.omni, gpu_worker.omni_engine, gpu_worker.omni_lifecycle, gpu_worker.omni_output;"
        "print([name for name in ('vllm', 'vllm_omni', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")
