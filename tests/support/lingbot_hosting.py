"""A host and a worker over the tiny LingBot checkpoint, in the loop of a test, and what one says to them."""

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from PIL import Image

from contracts.lingbot import CAMERA_ACTIONS_SCHEMA, CAMERA_TRACK, CAMERA_TRAJECTORY_SCHEMA
from contracts.payloads import PayloadStore, decode_frames, decode_payload
from gpu_worker.config import WorkerSettings
from gpu_worker.worker import Worker
from support.hosting import Caller, running_host
from support.lingbot_engine import MODEL, make
from support.lingbot_worlds import shared_checkpoint
from support.worker_runner import QUICK

POSES_PER_CHUNK = 9

CREATE: dict[str, Any] = {"model": MODEL, "reducer": "lingbot-camera", "seed": 7, "prompt": "rain"}


@contextlib.asynccontextmanager
async def lingbot_stack(url: str, **settings: Any) -> AsyncIterator[Worker]:
    """A host that owns all, and a worker of small pictures; `settings` are the worker's."""
    values: dict[str, Any] = QUICK | {
        "model": MODEL,
        "redis_url": url,
        "checkpoint": str(shared_checkpoint()),
    }
    loaded = WorkerSettings(**(values | {"ar_diffusion_height": 32, "ar_diffusion_width": 48} | settings))
    engine = make(loaded)  # here: its imports would take a first worker longer than its heartbeats may
    ready = asyncio.Event()
    worker = Worker(loaded, lambda: engine, on_ready=lambda _: ready.set())
    async with running_host(url):
        task = asyncio.create_task(worker.run())
        await asyncio.wait_for(ready.wait(), 20)
        yield worker
        worker.stop()
        await asyncio.wait_for(task, 20)


def actions(**data: Any) -> dict[str, Any]:
    """A control of camera actions, whatever it says."""
    return {"track": CAMERA_TRACK, "schema": CAMERA_ACTIONS_SCHEMA, "data": data}


def keys(*held: str) -> dict[str, Any]:
    """The control that holds these keys from now on."""
    return actions(mode="state", transitions=[{"actions": list(held)}])


def along(poses: Any, intrinsics: Any, chunk: int = 0) -> dict[str, Any]:
    """The control that takes a chunk along its part of a trajectory."""
    part = slice(POSES_PER_CHUNK * chunk, POSES_PER_CHUNK * (chunk + 1))
    data = {
        "poses": np.asarray(poses)[part].tolist(),
        "intrinsics": np.asarray(intrinsics)[part].tolist(),
    }
    return {"track": CAMERA_TRACK, "schema": CAMERA_TRAJECTORY_SCHEMA, "data": data}


def stored(image: Image.Image, kind: str = "PNG") -> bytes:
    """The bytes of an image's file."""
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


async def chunk_of(world: Caller, store: PayloadStore, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Makes the next chunk; its latents and pictures, once all that is said of it is true."""
    made = await world.ok("next_chunk")
    entry = (await world.chunks())[-1]
    assert (made["chunk_index"], int(entry["chunk_index"])) == (index, index)
    assert made["request_id"] == entry["request_id"]
    assert made["applied_event_ids"] == json.loads(entry["applied_event_ids"])
    latents = decode_payload(await store.read(entry["payload"]))["latents"]
    assert np.isfinite(latents).all()
    return latents, decode_frames(await store.read(entry["frames"]))
