"""Whole lives of robots through a real broker: a host, a worker over the tiny checkpoint, pictures as payloads."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import redis.asyncio
from PIL import Image

from contracts.dreamzero import OBSERVATION_SCHEMA, OBSERVATION_TRACK
from contracts.payloads import PayloadStore, decode_frames, decode_payload
from gpu_worker.__main__ import load_installed_model
from gpu_worker.config import WorkerSettings
from gpu_worker.worker import Worker
from support.broker import RealBroker
from support.dreamzero_worlds import OTHER_LANGUAGE, VIEWS, arm, cameras, observed, png, shared_checkpoint
from support.hosting import Caller, running_host
from support.worker_runner import QUICK

MODEL, REDUCER = "dreamzero", "dreamzero-observation"
CREATE = {"model": MODEL, "reducer": REDUCER, "params": {"num_inference_steps": 1}}

StartWorker = Callable[..., Awaitable[Worker]]


@pytest.fixture
async def start(broker: RealBroker) -> AsyncIterator[StartWorker]:
    """`await start()`: a host that owns all, and a worker of the installed model over the tiny checkpoint."""
    running: list[tuple[Worker, asyncio.Task[None]]] = []

    async def start_worker(**settings: Any) -> Worker:
        values = QUICK | {"model": MODEL, "redis_url": broker.url, "checkpoint": str(shared_checkpoint())}
        loaded = WorkerSettings(
            **(values | {"device_memory": "1GiB", "device": "cpu", "dtype": "float32"} | settings)
        )
        engine = load_installed_model(loaded)  # here: its imports would take longer than its heartbeats may
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


class Robot:
    """A session, its cameras and its producer."""

    def __init__(self, client: redis.asyncio.Redis, session_id: str = "robot") -> None:
        self.client, self.world, self.store = client, Caller(client, session_id), PayloadStore(client)
        self.events = 0

    async def show(self, number: int) -> None:
        """Puts the pictures of observation `number` where its URLs point to."""
        for view, picture in cameras(number).items():
            await self.client.set(f"camera:{number}:{view}", png(picture))

    async def say(self, control: dict[str, Any], prompt: str | None = None) -> None:
        self.events += 1
        await self.world.accept(self.events, prompt, control)

    async def observe(self, number: int, **changes: Any) -> None:
        await self.show(number)
        control = observed(number, **changes).to_dict()
        await self.say(control)

    async def act(self) -> tuple[dict[str, Any], np.ndarray]:
        """The next chunk and its actions."""
        made = await self.world.ok("next_chunk")
        actions = decode_payload(await self.store.read(made["payload"]))["actions"]
        assert actions.shape == (4, 8)
        assert np.isfinite(actions).all()
        return made, actions


async def test_a_whole_life_over_two_rollouts_a_repeated_observation_another_task_and_a_reset(
    start: StartWorker, real: redis.asyncio.Redis
) -> None:
    await start()
    robot = Robot(real)
    await robot.world.ok("create", **CREATE)

    found = []
    for number in range(6):
        await robot.observe(number)
        made, actions = await robot.act()
        assert made["applied_event_ids"] == [number + 1]
        found.append(actions)
    made, repeated = await robot.act()
    assert made["applied_event_ids"] == [], "a tick without a new observation says so"
    assert np.isfinite(repeated).all()

    await robot.observe(7, language=OTHER_LANGUAGE)
    _, other = await robot.act()
    assert not np.array_equal(other, repeated)

    await robot.world.ok("reset")
    for number in range(6):
        await robot.observe(number)
        _, again = await robot.act()
        assert np.array_equal(again, found[number]), (
            "the same observations from the same seed: the same actions"
        )
    await robot.world.ok("close")
    assert await real.hlen("wl:{w:gpu-0}:sessions") == 0


async def test_of_several_observations_the_newest_is_acted_on(
    start: StartWorker, real: redis.asyncio.Redis
) -> None:
    await start()
    late, early = Robot(real, "late"), Robot(real, "early")
    for robot in (late, early):
        await robot.world.ok("create", **CREATE)
    await late.observe(1)
    await late.observe(2)
    await late.observe(3)
    await early.observe(3)

    made, actions = await late.act()

    assert made["applied_event_ids"] == [1, 2, 3]
    assert np.array_equal(actions, (await early.act())[1])


async def test_imagined_pictures_come_with_the_chunk_where_they_are_asked_for(
    start: StartWorker, real: redis.asyncio.Redis
) -> None:
    await start()
    robot = Robot(real)
    await robot.world.ok(
        "create", **(CREATE | {"params": {"output_type": "pixel", "num_inference_steps": 1}})
    )
    shapes = []
    for number in range(2):
        await robot.observe(number)
        made, _ = await robot.act()
        shapes.append(decode_frames(await robot.store.read(made["frames"])).shape)

    assert shapes == [(9, 32, 48, 3), (8, 32, 48, 3)]


async def test_a_session_without_a_seed_has_the_published_one(
    start: StartWorker, real: redis.asyncio.Redis
) -> None:
    await start()
    answers = {}
    for seed in (None, 1140, 0):
        robot = Robot(real, f"seed-{seed}")
        await robot.world.ok("create", **(CREATE if seed is None else CREATE | {"seed": seed}))
        await robot.observe(0)
        answers[seed] = (await robot.act())[1]

    assert np.array_equal(answers[None], answers[1140])
    assert not np.array_equal(answers[None], answers[0])


# ---------------------------------------------------------------------------------------------------- at the door


def control(**changes: Any) -> dict[str, Any]:
    """An observation with some fields changed; `...` leaves one out."""
    data = observed(0).to_dict()["data"] | changes
    data = {name: value for name, value in data.items() if value is not ...}
    return {"track": OBSERVATION_TRACK, "schema": OBSERVATION_SCHEMA, "data": data}


DOOR: list[tuple[str, str, dict[str, Any]]] = [
    ("invalid_control", "language", control(language=...)),
    ("invalid_control", "language", control(language=" ")),
    ("invalid_control", "state", control(state=...)),
    ("invalid_control", "state", control(state={})),
    ("invalid_control", "images", control(images={})),
    ("invalid_control", "images", control(images=...)),
    ("invalid_control", "images.left", control(images={"left": "a.png"})),
    ("invalid_control", "images.left", control(images={"left": ["redis:a", "redis:b"]})),
    ("invalid_control", "state.arm", control(state={"arm": [None]})),
    ("invalid_control", "state.arm", control(state={"arm": [True]})),
    ("invalid", "controls", control(state={"arm": [float("nan")]})),
    ("invalid", "controls", control(state={"arm": [float("-inf")]})),
    ("invalid_control", "schema", control() | {"schema": "dreamzero.observation.v9"}),
]


async def test_what_the_host_can_see_is_refused_at_the_door_and_the_session_goes_on(
    start: StartWorker, real: redis.asyncio.Redis
) -> None:
    await start()
    robot = Robot(real)
    await robot.world.ok("create", **CREATE)
    await robot.observe(0)
    for number, (_, _, said) in enumerate(DOOR):
        await robot.world.event(2 + number, controls=json.dumps([said]))
    robot.events = 1 + len(DOOR)

    made, _ = await robot.act()
    assert made["applied_event_ids"] == [1]
    await robot.observe(1)
    made, _ = await robot.act()
    assert made["applied_event_ids"] == [2 + len(DOOR)]

    entries = await robot.world.rejected()
    expected = [(str(2 + number), reason) for number, (reason, _, _) in enumerate(DOOR)]
    assert [(entry["event_id"], entry["reason"]) for entry in entries] == expected
    for entry, (_, field, _) in zip(entries, DOOR, strict=True):
        assert field in entry["message"]


# ---------------------------------------------------------------------------------------------------- at the model


def flat_png(height: int, width: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("1", (width, height)).save(buffer, format="PNG")
    return buffer.getvalue()


BAD: dict[str, tuple[dict[str, Any], dict[str, bytes | None], str]] = {
    "no observation yet": ({}, {}, "observation"),
    "a view is missing": (control(images={"left": "redis:ok", "right": "redis:ok"}), {}, "images.wrist"),
    "a view too many": (
        control(images=dict.fromkeys((*VIEWS, "above"), "redis:ok")),
        {},
        "images.above",
    ),
    "a state of the wrong length": (
        control(state=arm(0) | {"joint_position": [0.0] * 6}),
        {},
        "state.joint_position",
    ),
    "a part of the state is missing": (
        control(state={"joint_position": [0.0] * 7}),
        {},
        "state.gripper_position",
    ),
    "an image that does not decode": (control(), {"camera:0:right": b"no picture"}, "images.right"),
    "an image that is cut off": (
        control(),
        {"camera:0:right": png(cameras(0)["right"])[:99]},
        "images.right",
    ),
    "an image that is too large": (control(), {"camera:0:left": flat_png(5000, 5000)}, "images.left"),
    "an image that is too small": (control(), {"camera:0:left": flat_png(1, 5000)}, "images.left"),
    "an observation payload that has expired": (control(), {"camera:0:wrist": None}, "images.wrist"),
    "an image elsewhere": (control(images=dict.fromkeys(VIEWS, "file:///etc/hostname")), {}, "images.left"),
}


async def test_what_only_the_model_can_see_fails_that_session_alone_and_is_named(
    start: StartWorker, real: redis.asyncio.Redis
) -> None:
    await start()
    await real.set("ok", png(cameras(0)["left"]))
    good = Robot(real, "good")
    await good.world.ok("create", **CREATE)
    for number, (case, (said, stored, field)) in enumerate(BAD.items()):
        bad = Robot(real, f"bad-{number}")
        await bad.world.ok("create", **CREATE)
        await good.observe(1)
        await good.act()
        await bad.show(0)
        if said:
            await bad.say(said)
        for key, data in stored.items():
            await (real.delete(key) if data is None else real.set(key, data))

        error = await bad.world.refused("next_chunk")

        assert (error["code"], error["field"]) == ("model_error", field), case
        assert field in error["message"], case
        state = await bad.world.until("FAILED")
        assert (state["failure_code"], state["failure_message"]) == ("model_error", error["message"])
        await good.observe(2)
        made, _ = await good.act()
        assert made["chunk_index"] == 2 * number + 1
        await bad.world.ok("reset")
        await bad.observe(3)
        assert (await bad.act())[0]["chunk_index"] == 0
        await bad.world.ok("close")


async def test_a_repeated_observation_whose_payload_has_expired_is_named(
    start: StartWorker, real: redis.asyncio.Redis
) -> None:
    await start()
    robot = Robot(real)
    await robot.world.ok("create", **CREATE)
    await robot.observe(0)
    await robot.act()
    await real.delete("camera:0:left")

    error = await robot.world.refused("next_chunk")

    assert error["field"] == "images.left"
    assert "expired" in error["message"]


async def test_creation_parameters_that_can_not_be_followed_are_named(
    start: StartWorker, real: redis.asyncio.Redis
) -> None:
    await start()
    for field, create in (
        ("cfg_scale", {"params": {"cfg_scale": 0.1}}),
        ("num_inference_steps", {"params": {"num_inference_steps": 0}}),
        ("output_type", {"params": {"output_type": "video"}}),
        ("colour", {"params": {"colour": "red"}}),
        ("prompt", {"prompt": "something else"}),
    ):
        robot = Robot(real, field)
        await robot.world.ok("create", **(CREATE | create))
        await robot.observe(0)
        error = await robot.world.refused("next_chunk")
        assert (error["code"], error["field"]) == ("model_error", field)
        await robot.world.ok("close")
