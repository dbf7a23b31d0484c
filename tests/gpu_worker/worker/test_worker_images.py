"""Images of creation parameters, read once, and of observations, read for their tick: from the worker's own stores only."""

from pathlib import Path
from typing import Any

import pytest

from contracts.dreamzero import observation_control
from contracts.events import ARDiffusionControlInput
from gpu_worker.capability import DiffusionOutput
from support.fake_host import FakeHost
from support.noop_engine import NoopEngine
from support.worker_runner import WorkerRunner


class Seeing(NoopEngine):
    """Remembers the images of each tick."""

    def __init__(self) -> None:
        super().__init__()
        self.images: list[Any] = []

    def execute_tick(self, tick: Any, *, params: Any, seed: int) -> DiffusionOutput:
        self.images.append(params.get("images"))
        return super().execute_tick(tick, params=params, seed=seed)


async def test_an_image_in_the_broker_comes_with_the_first_chunk_as_bytes(
    host: FakeHost, start_worker: WorkerRunner
) -> None:
    engine = Seeing()
    await start_worker(engine=engine)
    await host.client.set("picture", b"\x89PNG")
    world = await host.create("world-1", images=["redis:picture", "00/image.jpg"])

    world.committed(await host.run(world.tick()))
    await host.client.delete("picture")
    world.committed(await host.run(world.tick()))

    assert engine.images[0] == [b"\x89PNG", "00/image.jpg"]
    assert list(engine.images[1]) == ["redis:picture", "00/image.jpg"], "later chunks read nothing"


async def test_an_image_below_the_payload_url_is_read(
    host: FakeHost, start_worker: WorkerRunner, tmp_path: Path
) -> None:
    engine = Seeing()
    await start_worker(engine=engine, payload_url=f"file://{tmp_path}")
    (tmp_path / "first").write_bytes(b"jpeg")
    world = await host.create("world-1", images=[f"file://{tmp_path}/first"])

    world.committed(await host.run(world.tick()))

    assert engine.images == [[b"jpeg"]]


@pytest.mark.parametrize(
    "url",
    [
        "redis:missing",
        "redis:a-list",
        "redis://elsewhere/0",
        "file:///etc/hostname",
        "http://localhost/picture",
        "file://{folder}/../secret",
        "file://{folder}/absent",
        "file://{folder}/a::file:///etc/hostname",
    ],
)
async def test_an_image_that_may_not_or_can_not_be_read_fails_its_session_alone(
    host: FakeHost, start_worker: WorkerRunner, tmp_path: Path, url: str
) -> None:
    engine = Seeing()
    await host.client.rpush("a-list", "x")
    (tmp_path / "store").mkdir()
    (tmp_path / "secret").write_bytes(b"secret")
    await start_worker(engine=engine, payload_url=f"file://{tmp_path}/store")
    world = await host.create("world-1", images=[url.format(folder=tmp_path / "store")])
    neighbour = await host.create("world-2")

    reply = await host.run(world.tick())

    assert reply.error is not None
    assert (reply.error.code, reply.error.field) == ("model_error", "images")
    assert str(tmp_path) not in reply.error.message
    neighbour.committed(await host.run(neighbour.tick()))
    assert engine.images == [None]


# ---------------------------------------------------------------------------------------------------- observations


def seen(**urls: str) -> tuple[ARDiffusionControlInput, ...]:
    return (observation_control(urls, {"arm": [0.0]}, "open the drawer"),)


async def test_images_of_an_observation_come_with_every_tick_in_order_of_their_views(
    host: FakeHost, start_worker: WorkerRunner
) -> None:
    engine = Seeing()
    await start_worker(engine=engine)
    for name in ("left", "wrist", "later"):
        await host.client.set(name, name.encode())
    world = await host.create("world-1", images=["redis:absent"])

    world.committed(await host.run(world.tick(controls=seen(wrist="redis:wrist", left="redis:left"))))
    world.committed(await host.run(world.tick(controls=seen(wrist="redis:later"))))

    assert engine.images == [[b"left", b"wrist"], [b"later"]], "in place of the session's own"


async def test_an_observation_that_can_not_be_understood_is_left_to_the_model(
    host: FakeHost, start_worker: WorkerRunner
) -> None:
    engine = Seeing()
    await start_worker(engine=engine)
    await host.client.set("own", b"own")
    world = await host.create("world-1", images=["redis:own"])
    odd = ARDiffusionControlInput("observation", "another.schema.v1", {"images": {"wrist": "redis:absent"}})

    world.committed(await host.run(world.tick(controls=(odd,))))

    assert engine.images == [[b"own"]]


@pytest.mark.parametrize("url", ["redis:expired", "file:///etc/hostname", "http://localhost/picture"])
async def test_an_image_of_an_observation_that_is_not_there_is_named_by_its_view(
    host: FakeHost, start_worker: WorkerRunner, url: str
) -> None:
    engine = Seeing()
    await start_worker(engine=engine)
    world, neighbour = await host.create("world-1"), await host.create("world-2")

    reply = await host.run(world.tick(controls=seen(wrist=url)))

    assert reply.error is not None
    assert (reply.error.code, reply.error.field) == ("model_error", "images.wrist")
    assert "images.wrist" in reply.error.message
    neighbour.committed(await host.run(neighbour.tick()))
    assert engine.images == [None]
