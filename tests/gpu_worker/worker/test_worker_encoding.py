"""Outputs of pipelines as bytes."""

import hashlib
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy
import torch

from contracts.errors import ChunkMetadataError, InvalidArgumentError, ModelError
from contracts.payloads import decode_frames, decode_payload
from contracts.tick import METADATA_KEY
from gpu_worker.capability import DiffusionOutput
from gpu_worker.encoding import encode_frames, encode_output, encode_payload


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3), (1, 2, 3, 4)])
def test_a_torch_tensor_comes_back_the_same(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.rand(shape) * 9).to(dtype)
    decoded = decode_payload(encode_payload({"x": tensor}))["x"]

    assert decoded.shape == shape
    assert np.array_equal(decoded, tensor.numpy())


def test_bfloat16_comes_back_as_the_same_numbers_in_float32() -> None:
    tensor = torch.randn(5, 7).to(torch.bfloat16)
    decoded = decode_payload(encode_payload({"x": tensor}))["x"]

    assert decoded.dtype == np.float32
    assert np.array_equal(decoded, tensor.float().numpy())


def test_a_view_is_encoded_as_what_it_shows() -> None:
    tensor = torch.arange(12).reshape(3, 4)
    array = np.arange(12).reshape(3, 4)
    decoded = decode_payload(
        encode_payload({"t": tensor.T[1:], "n": array[::-1, ::2], "big": array.astype(">i4")})
    )

    assert np.array_equal(decoded["t"], tensor.T[1:].numpy())
    assert np.array_equal(decoded["n"], array[::-1, ::2])
    assert np.array_equal(decoded["big"], array)


def test_bytes_become_a_row_of_bytes() -> None:
    assert decode_payload(encode_payload({"x": b"abc"}))["x"].tolist() == [97, 98, 99]


def test_the_common_library_reads_it() -> None:
    encoded = encode_payload({"é": np.ones((2, 2), np.float32), "empty": np.zeros((0,), np.int64)})

    assert sorted(safetensors.numpy.load(encoded)) == ["empty", "é"]


def test_the_same_tensors_give_the_same_bytes() -> None:
    assert encode_payload({"x": torch.ones(3)}) == encode_payload({"x": np.ones(3, np.float32)})


@pytest.mark.parametrize(
    "value", ["text", 3, None, [1.0], np.array(["a"]), np.array([1j]), torch.zeros(1, dtype=torch.complex64)]
)
def test_a_value_that_is_no_tensor_is_named(value: object) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        encode_payload({"latents": value})
    assert caught.value.field == "payload.latents"


@pytest.mark.parametrize("payload", [None, [1], {1: np.zeros(1)}, {"__metadata__": np.zeros(1)}])
def test_a_payload_that_is_no_mapping_of_names_is_refused(payload: object) -> None:
    with pytest.raises(InvalidArgumentError):
        encode_payload(payload)


@pytest.mark.parametrize("make", [np.zeros, torch.zeros])
def test_frames_come_back_the_same(make) -> None:
    dtype = np.uint8 if make is np.zeros else torch.uint8
    frames = make((2, 4, 6, 3), dtype=dtype) + 7

    assert np.array_equal(decode_frames(encode_frames(frames)), np.full((2, 4, 6, 3), 7))


@pytest.mark.parametrize(
    "frames",
    [np.zeros((2, 4, 6, 3)), np.zeros((4, 6, 3), np.uint8), np.zeros((1, 3, 4, 4), np.uint8), [1], b""],
)
def test_frames_of_another_kind_are_refused(frames: object) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        encode_frames(frames)
    assert caught.value.field == "frames"


def test_an_output_is_encoded_whole() -> None:
    output = DiffusionOutput(
        {"x": torch.ones(2)}, None, {METADATA_KEY: {"applied_event_ids": (1, 2)}, "own": object()}
    )
    chunk = encode_output(output)

    assert chunk.sha256 == hashlib.sha256(chunk.payload).hexdigest()
    assert chunk.frames is None
    assert chunk.metadata == {METADATA_KEY: {"applied_event_ids": [1, 2]}}


@pytest.mark.parametrize("metadata", [None, {}, [], {"other": 1}])
def test_an_output_without_an_envelope_is_left_to_the_host_to_judge(metadata: object) -> None:
    assert encode_output(DiffusionOutput({}, None, metadata)).metadata == {}


@pytest.mark.parametrize("value", [float("inf"), object(), {1: 2}, 2**53, "\ud800"])
def test_metadata_that_json_would_change_is_refused(value: object) -> None:
    with pytest.raises(ChunkMetadataError):
        encode_output(DiffusionOutput({}, None, {METADATA_KEY: {"chunk_index": value}}))


def test_an_output_with_an_error_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="no camera"):
        encode_output(DiffusionOutput(error="no camera"))


def test_an_engine_without_torch_is_served_without_torch() -> None:
    program = (
        "import sys, numpy\n"
        "import gpu_worker.__main__, support.noop_engine\n"
        "from gpu_worker.encoding import encode_output\n"
        "from gpu_worker.capability import DiffusionOutput\n"
        "encode_output(DiffusionOutput({'x': numpy.zeros(2)}, numpy.zeros((1, 2, 2, 3), numpy.uint8)))\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run(
        [sys.executable, "-c", program], check=True, timeout=60, env={"PYTHONPATH": ":".join(sys.path)}
    )
