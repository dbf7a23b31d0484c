"""Whole lives through a real broker: a host, a worker, a tiny checkpoint, real images, prompts and trajectories."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis.asyncio
from PIL import Image

from contracts.payloads import PayloadStore
from gpu_worker.worker import Worker
from support.broker import RealBroker
from support.hosting import Caller
from support.lingbot_examples import examples_root
from support.lingbot_hosting import CREATE, along, chunk_of, keys, lingbot_stack

StartWorker = Callable[..., Awaitable[Worker]]


@pytest.fixture
async def start(broker: RealBroker) -> AsyncIterator[StartWorker]:
    """`await start(step_execution=True)`: a host that owns all, and a worker over the tiny checkpoint."""
    async with contextlib.AsyncExitStack() as stack:
        yield lambda **settings: stack.enter_async_context(lingbot_stack(broker.url, **settings))


def example(name: str) -> tuple[bytes, str, np.ndarray, np.ndarray]:
    """Image, prompt, poses, intrinsics."""
    folder = examples_root() / name
    return (
        (folder / "image.jpg").read_bytes(),
        (folder / "prompt.txt").read_text().strip(),
        np.load(folder / "poses.npy"),
        np.load(folder / "intrinsics.npy"),
    )


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
    create = CREATE | {"prompt": prompt}
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
    create = CREATE | {"prompt": prompt}
    await world.ok("create", **create, params={"images": ["01/image.jpg"]})

    made = []
    for index in range(3):
        await world.accept(index + 1, None, along(poses, intrinsics, index))
        made.append(await chunk_of(world, store, index))

    assert [frames.shape for _, frames in made] == [(9, 48, 32, 3), (12, 48, 32, 3), (12, 48, 32, 3)]
    await world.ok("close")
    assert worker.engine.figures.resident == 0
