"""Payload URLs: where chunks lie, who can read them, and that nobody climbs out."""

from pathlib import Path

import numpy as np
import pytest
import redis.asyncio
import safetensors.numpy

from contracts.errors import BrokerError, ConfigurationError, CorruptDataError, InvalidArgumentError
from contracts.payloads import (
    PayloadNotFoundError,
    PayloadStore,
    PayloadStoreError,
    check_payload_base,
    decode_frames,
    decode_payload,
)

LEGAL_IDS = ["world-1", ".", "..", "...", "a::b", ":", "a.b", ":" * 128, "." * 128, "A" * 128, "-._:"]


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


async def test_a_chunk_in_the_broker_is_read_back_and_expires(broker_client: redis.asyncio.Redis) -> None:
    store = PayloadStore(broker_client, ttl_ms=5_000)
    url, frames_url = await store.write("world-1", "life", 3, b"payload", b"frames")

    assert url.startswith("redis:")
    assert (await store.read(url), await store.read(frames_url)) == (b"payload", b"frames")
    for one in (url, frames_url):
        assert 0 < await broker_client.pttl(one.removeprefix("redis:")) <= 5_000


@pytest.mark.parametrize("session_id", LEGAL_IDS)
async def test_a_chunk_in_a_folder_stays_below_it_whatever_the_id(session_id: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    store = PayloadStore(base=f"file://{base}/")
    life = f"ar-{session_id}-create-{'0' * 32}"
    url, frames_url = await store.write(session_id, life, 0, b"payload", b"frames")

    files = files_below(tmp_path)
    assert len(files) == 2
    assert all(len(path.relative_to(base).parts) == 3 for path in files)
    assert (await store.read(url), await store.read(frames_url)) == (b"payload", b"frames")


async def test_a_life_that_is_a_path_does_not_climb(tmp_path: Path) -> None:
    store = PayloadStore(base=f"file://{tmp_path}/base")
    for life in ("../../etc", "..", "a/b", "a~b", "%2E%2E", "a\\b"):
        await store.write("world-1", life, 0, b"x")

    files = files_below(tmp_path)
    assert {path.parent.parent for path in files} == {tmp_path / "base" / "world-1"}
    assert len(files) == 6


async def test_ids_never_share_a_place(tmp_path: Path) -> None:
    store = PayloadStore(base=f"file://{tmp_path}")
    urls = [(await store.write(session_id, "life", 0, b"x"))[0] for session_id in LEGAL_IDS]

    assert len(set(urls)) == len(LEGAL_IDS)


async def test_any_fsspec_url_will_do() -> None:
    store = PayloadStore(base="memory://worlds")
    url, frames_url = await store.write("world-1", "life", 0, b"payload")

    assert frames_url is None
    assert await PayloadStore().read(url) == b"payload"


async def test_writing_a_chunk_again_replaces_it(tmp_path: Path) -> None:
    store = PayloadStore(base=f"file://{tmp_path}")
    await store.write("world-1", "life", 0, b"once")
    url, _ = await store.write("world-1", "life", 0, b"twice")

    assert await store.read(url) == b"twice"


@pytest.mark.parametrize(
    "url", ["redis:wl:{x}:payload:y:0", "file:///nowhere/at/all.safetensors", "memory://no"]
)
async def test_a_payload_that_is_not_there_is_named(url: str, fake: redis.asyncio.Redis) -> None:
    with pytest.raises(PayloadNotFoundError) as caught:
        await PayloadStore(fake).read(url)

    assert url in str(caught.value)
    assert caught.value.field == url


@pytest.mark.parametrize("url", ["what://ever", "redis://host/0", "file:///"])
async def test_a_url_that_can_not_be_read_is_a_typed_error(url: str, fake: redis.asyncio.Redis) -> None:
    with pytest.raises((PayloadStoreError, PayloadNotFoundError)):
        await PayloadStore(fake).read(url)


async def test_a_key_of_the_wrong_type_is_named(fake: redis.asyncio.Redis) -> None:
    await fake.hset("some-key", "a", "b")
    with pytest.raises(CorruptDataError, match="some-key"):
        await PayloadStore(fake).read("redis:some-key")


async def test_a_folder_that_can_not_be_written_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "base").write_text("a file")
    with pytest.raises(PayloadStoreError):
        await PayloadStore(base=f"file://{tmp_path}/base").write("world-1", "life", 0, b"x")


async def test_the_broker_needs_a_client() -> None:
    with pytest.raises(BrokerError):
        await PayloadStore().read("redis:x")
    with pytest.raises(BrokerError):
        await PayloadStore().write("world-1", "life", 0, b"x")


@pytest.mark.parametrize(
    "wrong",
    [{"session_id": "a/b"}, {"session_id": ""}, {"life": " "}, {"chunk_index": -1}, {"chunk_index": True}],
)
async def test_what_is_no_identity_is_refused(wrong: dict, tmp_path: Path) -> None:
    names = {"session_id": "world-1", "life": "life", "chunk_index": 0} | wrong
    with pytest.raises(InvalidArgumentError) as caught:
        await PayloadStore(base=f"file://{tmp_path}").write(**names, output=b"x")
    assert caught.value.field in wrong


@pytest.mark.parametrize(
    "base",
    [
        "",
        "nothing",
        "/a/path",
        "file://relative",
        "file:x",
        "simplecache::file:///x",
        "redis://h/0",
        "what://x",
    ],
)
def test_a_base_that_is_no_url_is_bad_configuration(base: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_payload_base(base)
    assert caught.value.field == "payload_url"


# ------------------------------------------------------------------------------------------------ bytes
@pytest.mark.parametrize("data", [b"", b"x", b"\xff" * 100, (10**9).to_bytes(8, "little") + b"{}"])
def test_bytes_that_are_no_payload_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptDataError):
        decode_payload(data)


def test_a_payload_of_the_common_library_is_read() -> None:
    arrays = {"a": np.arange(6, dtype=np.float16).reshape(2, 3), "b": np.array([True])}
    decoded = decode_payload(safetensors.numpy.save(arrays))

    assert {name: (value.dtype, value.tolist()) for name, value in decoded.items()} == {
        name: (value.dtype, value.tolist()) for name, value in arrays.items()
    }


@pytest.mark.parametrize("data", [b"", b"x" * 10, b"\x93NUMPY"])
def test_bytes_that_are_no_frames_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptDataError):
        decode_frames(data)


@pytest.mark.parametrize("array", [np.zeros((2, 3), np.uint8), np.zeros((1, 2, 2, 3), np.float32)])
def test_arrays_that_are_no_frames_are_refused(array: np.ndarray, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", array)
    with pytest.raises(CorruptDataError, match="uint8"):
        decode_frames((tmp_path / "x.npy").read_bytes())


def test_frames_are_never_unpickled(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(CorruptDataError):
        decode_frames((tmp_path / "x.npy").read_bytes())
