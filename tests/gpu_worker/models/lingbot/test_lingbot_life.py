"""Whole lives through a real broker: a host, a worker, a tiny checkpoint, real images, prompts and trajectories."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis.asyncio
from PIL import Image

from contracts.lingbot import CAMERA_ACTIONS_SCHEMA, CAMERA_TRACK, CAMERA_TRAJECTORY_SCHEMA
from contracts.payloads import PayloadStore, decode_frames, decode_payload
from gpu_worker.config import WorkerSettings
from gpu_worker.worker import Worker
from support.broker import RealBroker
from support.hosting import Caller, running_host
from support.lingbot_engine import MODEL, make
from support.lingbot_examples import examples_root
from support.lingbot_worlds import shared_checkpoint
from support.worker_runner import QUICK

POSES_PER_CHUNK = 9

StartWorker = Callable[..., Awaitable[Worker]]


@pytest.fixture
async def start(broker: RealBroker) -> AsyncIterator[StartWorker]:
    """`await start(height=32, width=48)`: a host that owns all, and a worker over the tiny checkpoint."""
    running: list[tuple[Worker, asyncio.Task[None]]] = []

    async def start_worker(**settings: Any) -> Worker:
        values = QUICK | {"model": MODEL, "redis_url": broker.url, "checkpoint": str(shared_checkpoint())}
        loaded = WorkerSettings(**(values | {"ar_diffusion_height": 32, "ar_diffusion_width": 48} | settings))
        engine = make(loaded)  # here: its imports would take a first worker longer than its heartbeats may
        ready = asyncio.Event()
        worker = Worker(loaded, lambda: engine, on_ready=lambda _: ready.set())
        running.append((worker, asyncio.create_task(worker.run())))
        await asyncio.wait_for(ready.wait(), 20)
        return worker

    async with running_host(broker.url):
        yield start_worker
        for worker, task in running:
            worker.stop()
            await asyncio.wait_for(task, 20)


def example(name: str) -> tuple[bytes, str, np.ndarray, np.ndarray]:
    """Image, prompt, poses, intrinsics."""
    folder = examples_root() / name
    return (
        (folder / "image.jpg").read_bytes(),
        (folder / "prompt.txt").read_text().strip(),
        np.load(folder / "poses.npy"),
        np.load(folder / "intrinsics.npy"),
    )


def along(poses: np.ndarray, intrinsics: np.ndarray, chunk: int) -> dict[str, Any]:
    """The control that takes a chunk along its part of a trajectory."""
    part = slice(POSES_PER_CHUNK * chunk, POSES_PER_CHUNK * (chunk + 1))
    data = {"poses": poses[part].tolist(), "intrinsics": intrinsics[part].tolist()}
    return {"track": CAMERA_TRACK, "schema": CAMERA_TRAJECTORY_SCHEMA, "data": data}


def keys(*held: str) -> dict[str, Any]:
    data = {"mode": "state", "transitions": [{"actions": list(held)}]}
    return {"track": CAMERA_TRACK, "schema": CAMERA_ACTIONS_SCHEMA, "data": data}


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


def write_contact_sheet(pictures: list[np.ndarray], path: Path) -> None:
    """The first picture of each chunk, in rows of four."""
    height, width = pictures[0].shape[1:3]
    rows = -(-len(pictures) // 4)
    sheet = Image.new("RGB", (4 * width, rows * height))
    for index, frames in enumerate(pictures):
        sheet.paste(Image.fromarray(frames[0]), (width * (index % 4), height * (index // 4)))
    sheet.save(path)


async def test_a_whole_life_of_the_first_example(
    start: StartWorker, real: redis.asyncio.Redis, tmp_path: Path
) -> None:
    image, prompt, poses, intrinsics = example("00")
    await start()
    await real.set("first-image", image)
    world, store = Caller(real), PayloadStore(real)
    create = {"model": MODEL, "reducer": "lingbot-camera", "seed": 7, "prompt": prompt}
    await world.ok("create", **create, params={"images": ["redis:first-image"]})
    event_id = 0

    async def say(prompt: str | None, *controls: dict[str, Any]) -> None:
        nonlocal event_id
        event_id += 1
        await world.accept(event_id, prompt, *controls)

    latents, pictures = [], []
    for index in range(12):
        if index == 4:
            await say("snow falls over the river")
        if index < 6:
            await say(None, along(poses, intrinsics, index))
        elif index in {6, 9}:
            await say(None, keys("w") if index == 6 else keys("w", "l"))
        made, frames = await chunk_of(world, store, index)
        latents.append(made)
        pictures.append(frames)

    assert [frames.shape for frames in pictures] == [(9, 32, 48, 3)] + [(12, 32, 48, 3)] * 11
    assert {made.shape for made in latents} == {(1, 16, 3, 4, 6)}
    sheet = tmp_path / "contact-sheet.png"
    write_contact_sheet(pictures, sheet)
    with Image.open(sheet) as written:
        assert written.size == (4 * 48, 3 * 32)

    await world.ok("reset")
    again = []
    for index in range(3):
        await say(prompt if index == 0 else None, along(poses, intrinsics, index))
        again.append(await chunk_of(world, store, index))
    # The same seed, image, prompt and path: the same world.
    for index, (made, frames) in enumerate(again):
        assert np.array_equal(made, latents[index])
        assert np.array_equal(frames, pictures[index])
    await world.ok("close")
    assert (await world.state())["status"] == "CLOSED"


async def test_another_example_at_another_size_from_a_trusted_folder(
    start: StartWorker, real: redis.asyncio.Redis
) -> None:
    _, prompt, poses, intrinsics = example("01")
    worker = await start(
        ar_diffusion_height=48,
        ar_diffusion_width=32,
        lingbot_action_root=str(examples_root()),
        step_execution=True,
    )
    world, store = Caller(real), PayloadStore(real)
    create = {"model": MODEL, "reducer": "lingbot-camera", "seed": 7, "prompt": prompt}
    await world.ok("create", **create, params={"images": ["01/image.jpg"]})

    made = []
    for index in range(3):
        await world.accept(index + 1, None, along(poses, intrinsics, index))
        made.append(await chunk_of(world, store, index))

    assert [frames.shape for _, frames in made] == [(9, 48, 32, 3), (12, 48, 32, 3), (12, 48, 32, 3)]
    await world.ok("close")
    assert worker.engine.figures.resident == 0


@pytest.mark.parametrize(
    ("params", "controls", "named"),
    [
        pytest.param({}, [keys("w")], "images must hold exactly one", id="no image"),
        pytest.param(
            {"images": ["redis:absent"]},
            [keys("w")],
            "the image is not there",
            id="an image that is not there",
        ),
        pytest.param(
            {"images": ["redis:text"]}, [keys("w")], "the image can't be read", id="an image that is none"
        ),
        pytest.param({"images": ["x.png"]}, [keys("w")], "lingbot_action_root", id="a path without a root"),
        pytest.param({"images": ["redis:grey"]}, [], "exactly one camera control", id="no camera"),
        pytest.param(
            {"images": ["redis:grey"]},
            [along(np.tile(np.eye(4), (3, 1, 1)), np.ones((3, 4)), 0)],
            "poses",
            id="a trajectory that is too short",
        ),
        pytest.param(
            {"images": ["redis:grey"], "num_inference_steps": 8}, [keys("w")], "num_inference_steps"
        ),
        pytest.param({"images": ["redis:grey"], "height": 480, "width": 832}, [keys("w")], "height"),
        pytest.param({"images": ["redis:grey"], "flow_shift": -1}, [keys("w")], "flow_shift"),
        pytest.param({"images": ["redis:grey"], "output_type": "pil"}, [keys("w")], "output_type"),
    ],
)
async def test_what_only_the_model_can_see_fails_that_session_alone(  # noqa: PLR0917 - fixtures come by name
    start: StartWorker,
    real: redis.asyncio.Redis,
    tmp_path: Path,
    params: dict[str, Any],
    controls: list[dict[str, Any]],
    named: str,
) -> None:
    await start()
    Image.new("RGB", (64, 40), "grey").save(tmp_path / "grey.png")
    await real.set("grey", (tmp_path / "grey.png").read_bytes())
    await real.set("text", "no picture")
    create = {"model": MODEL, "reducer": "lingbot-camera", "seed": 7, "prompt": "rain"}
    bad, good = Caller(real, "bad"), Caller(real, "good")
    await good.ok("create", **create, params={"images": ["redis:grey"]})
    await good.accept(1, None, keys("w"))
    await good.ok("next_chunk")
    await bad.ok("create", **create, params=params)
    for control in controls:
        await bad.accept(1, None, control)

    error = await bad.refused("next_chunk")

    assert error["code"] == "model_error"
    assert named in error["message"]
    assert str(tmp_path) not in error["message"]
    assert (await bad.until("FAILED"))["failure_message"] == error["message"]
    await chunk_of(good, PayloadStore(real), 1)
