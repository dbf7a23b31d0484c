"""What a chunk is made of, at rest: payloads and pixel frames, their URLs and their bytes.

A payload is the model's output: safetensors bytes of named tensors. Pixel frames are `.npy` bytes of one array, uint8
[F, H, W, 3]. Both lie behind a URL:

    redis:<key>                                        a string in the broker, which expires
    <base>/<session>/<life>/<chunk>.safetensors        below any fsspec URL (file:///dir, s3://bucket/dir, ...);
    <base>/<session>/<life>/<chunk>.frames.npy         nothing here ever deletes it: how long it stays is the operator's

The worker writes, viewers read. Nobody needs torch for it.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final
from urllib.parse import quote

import fsspec
import numpy as np
import numpy.typing as npt
import safetensors

from contracts.broker import Client, map_exceptions
from contracts.errors import (
    BrokerError,
    ConfigurationError,
    CorruptDataError,
    InvalidArgumentError,
    WorldlineError,
)
from contracts.identity import check_index, check_session_id, check_text_id
from contracts.keys import Keys

PAYLOAD_CONTENT_TYPE: Final = "application/vnd.safetensors"
FRAMES_CONTENT_TYPE: Final = "application/x-npy"
REDIS_SCHEME: Final = "redis:"
DEFAULT_TTL_MS: Final = 600_000

_DTYPES: Final = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "U64": np.uint64,
    "I64": np.int64,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
}


class PayloadNotFoundError(WorldlineError, LookupError):
    """Raised when a payload is not there: never written, or expired. `field` is its URL."""

    code = "payload_not_found"


class PayloadStoreError(WorldlineError, OSError):
    """Raised when a store can't be written or read; `field` is the URL."""

    code = "payload_store"


@dataclass(frozen=True, slots=True)
class Blob:
    """A string that is to be written to the broker."""

    key: str
    data: bytes
    ttl_ms: int


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """Where a chunk lies.

    Args:
        payload: URL of the payload.
        frames: URL of the pixel frames, or None.
        blobs: what the caller still has to write to the broker, so that it can do so together with what refers to it.
    """

    payload: str
    frames: str | None = None
    blobs: tuple[Blob, ...] = ()


class PayloadStore:
    """Reads payload URLs of any kind, and writes below one base.

    Args:
        client: the broker, where payloads lie in it; not for blocking reads.
        base: where to write: `redis:`, or an fsspec URL.
        keys: the key builder.
        ttl_ms: how long payloads in the broker live.

    Raises:
        ConfigurationError: `base` is no such URL.
    """

    def __init__(
        self,
        client: Client | None = None,
        *,
        base: str = REDIS_SCHEME,
        keys: Keys | None = None,
        ttl_ms: int = DEFAULT_TTL_MS,
    ) -> None:
        self.base = check_payload_base(base)
        self._client = client
        self._keys = keys or Keys()
        self._ttl_ms = ttl_ms

    async def write(
        self, session_id: str, life: str, chunk_index: int, output: bytes, frames: bytes | None = None
    ) -> tuple[str, str | None]:
        """Stores one chunk; writing it again replaces it.

        Args:
            session_id, life, chunk_index: name it.
            output: payload bytes, see `decode_payload`.
            frames: pixel frames, see `decode_frames`, or None.

        Returns:
            The URLs of payload and frames.

        Raises:
            BrokerError: the broker does not answer, or is full.
            PayloadStoreError: the other store refused.
        """
        stored = await self.store(session_id, life, chunk_index, output, frames)
        await self.write_blobs(stored.blobs)
        return stored.payload, stored.frames

    async def write_blobs(self, blobs: Sequence[Blob]) -> None:
        """Writes what `store` has left to the caller; BrokerError where the broker does not answer, or is full."""
        if not blobs:
            return
        pipeline = self._broker().pipeline(transaction=False)
        for blob in blobs:
            pipeline.set(blob.key, blob.data, px=blob.ttl_ms)
        with map_exceptions(blobs[0].key):
            await pipeline.execute()

    async def store(
        self, session_id: str, life: str, chunk_index: int, output: bytes, frames: bytes | None = None
    ) -> StoredChunk:
        """As `write`, but what belongs into the broker is left to the caller, as blobs.

        Raises PayloadStoreError where the other store refused.
        """
        check_session_id(session_id)
        check_text_id(life, "life")
        check_index(chunk_index, "chunk_index")
        if self.base == REDIS_SCHEME:
            return self._blobs(session_id, life, chunk_index, output, frames)
        folder = f"{self.base}/{_segment(session_id)}/{_segment(life)}"
        url = f"{folder}/{chunk_index}.safetensors"
        frames_url = None if frames is None else f"{folder}/{chunk_index}.frames.npy"
        await asyncio.to_thread(_write_files, [(url, output), (frames_url, frames)])
        return StoredChunk(url, frames_url)

    def _blobs(
        self, session_id: str, life: str, chunk_index: int, output: bytes, frames: bytes | None
    ) -> StoredChunk:
        session = self._keys.session(session_id)
        payload = Blob(session.payload(life, chunk_index), output, self._ttl_ms)
        if frames is None:
            return StoredChunk(REDIS_SCHEME + payload.key, None, (payload,))
        pixels = Blob(session.frames(life, chunk_index), frames, self._ttl_ms)
        return StoredChunk(REDIS_SCHEME + payload.key, REDIS_SCHEME + pixels.key, (payload, pixels))

    async def read(self, url: str) -> bytes:
        """The bytes behind a payload URL, whatever base this store writes to.

        Raises PayloadNotFoundError, PayloadStoreError or BrokerError.
        """
        if not url.startswith(REDIS_SCHEME) or url.startswith("redis://"):
            return await asyncio.to_thread(read_file, url)
        key = url.removeprefix(REDIS_SCHEME)
        with map_exceptions(key):
            data = await self._broker().get(key)
        if not isinstance(data, bytes):
            raise PayloadNotFoundError(f"no payload at {url}: it has expired or was never written", field=url)
        return data

    def _broker(self) -> Client:
        if self._client is None:
            raise BrokerError("payloads in the broker need a broker client", field="client")
        return self._client


def check_payload_base(base: str) -> str:
    """`base` without a trailing slash; ConfigurationError unless it is `redis:` or a plain fsspec URL."""
    if base == REDIS_SCHEME:
        return base
    protocol, separator, path = base.partition("://")
    relative = protocol in {"file", "local"} and not path.startswith("/")
    if not separator or "::" in base or protocol in {"redis", "rediss"} or relative:
        raise ConfigurationError(
            f"payload_url must be 'redis:' or a URL such as file:///dir, got {base!r:.200}",
            field="payload_url",
        )
    try:
        fsspec.get_filesystem_class(protocol)
    except (ValueError, ImportError) as error:
        raise ConfigurationError(f"payload_url {base!r:.200}: {error}", field="payload_url") from None
    return f"{protocol}://{path.rstrip('/')}"


def read_file(url: str) -> bytes:
    """The bytes behind an fsspec URL; blocks."""
    try:
        filesystem, path = fsspec.url_to_fs(url)
        data: bytes = filesystem.cat_file(path)
    except FileNotFoundError:
        raise PayloadNotFoundError(f"no payload at {url}", field=url) from None
    except (OSError, ValueError, ImportError) as error:
        raise PayloadStoreError(f"can't read {url}: {error}", field=url) from error
    return data


def _write_files(files: list[tuple[str | None, bytes | None]]) -> None:
    for url, data in files:
        if url is None or data is None:
            continue
        try:
            filesystem, path = fsspec.url_to_fs(url)
            filesystem.makedirs(str(PurePosixPath(path).parent), exist_ok=True)
            filesystem.pipe_file(path, data)
        except (OSError, ValueError) as error:
            raise PayloadStoreError(f"can't write {url}: {error}", field=url) from error


def _segment(text: str) -> str:
    """One path segment that can't climb: reversible, and as long as the id for every id of ours.

    Colons become tildes, because `::` chains file systems in fsspec URLs; a leading dot is escaped, so neither `.` nor
    `..` is left.
    """
    escaped = quote(text, safe=":").replace("~", "%7E").replace(":", "~")
    return f"%2E{escaped[1:]}" if escaped.startswith(".") else escaped


def decode_payload(data: bytes) -> dict[str, npt.NDArray[Any]]:
    """Tensors of a payload by name.

    bfloat16, which numpy lacks, comes as float32 (exact); 8-bit floats come as their bytes (uint8). Raises
    CorruptDataError.
    """
    try:
        entries = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
        return {name: _array(entry["dtype"], entry["shape"], entry["data"]) for name, entry in entries}
    except (safetensors.SafetensorError, ValueError) as error:
        raise CorruptDataError(f"not a payload: {error}", field="payload") from None


def _array(dtype: str, shape: list[int], data: bytes | bytearray) -> npt.NDArray[Any]:
    if dtype == "BF16":
        bits = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).reshape(shape)
    if dtype.startswith("F8"):
        return np.frombuffer(data, np.uint8).reshape(shape)
    if dtype not in _DTYPES:
        raise InvalidArgumentError(f"element type {dtype} has no numpy form", field="payload")
    return np.frombuffer(data, _DTYPES[dtype]).reshape(shape)


def decode_frames(data: bytes) -> npt.NDArray[np.uint8]:
    """Pixel frames, uint8 [F, H, W, 3]; CorruptDataError for anything else."""
    try:
        frames: Any = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise CorruptDataError(f"not pixel frames: {error}", field="frames") from None
    if (
        not isinstance(frames, np.ndarray)
        or frames.dtype != np.uint8
        or frames.ndim != 4
        or frames.shape[-1] != 3
    ):
        raise CorruptDataError("pixel frames are uint8 [F, H, W, 3]", field="frames")
    return np.asarray(frames, np.uint8)
