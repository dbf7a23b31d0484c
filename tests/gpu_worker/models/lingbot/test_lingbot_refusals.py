"""Everything that is refused, sent through a real broker: by the door, or by the model in that one session."""

import json
import os
import struct
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis.asyncio
from PIL import Image
from structlog.testing import capture_logs

from contracts.payloads import PayloadStore
from support.broker import RealBroker
from support.hosting import Caller
from support.lingbot_hosting import CREATE, actions, along, chunk_of, keys, lingbot_stack, stored

GREY = Image.new("RGB", (64, 40), "grey")
EYES, LENSES = np.tile(np.eye(4), (9, 1, 1)), np.full((9, 4), 400.0)
HELD_FRAMES: list[list[str]] = [["w"], [], []]


def with_data(control: dict[str, Any], **data: Any) -> dict[str, Any]:
    return control | {"data": control["data"] | data}


def huge_png() -> bytes:
    """A header that claims 5000 x 5000 pixels; there is nothing to decode behind it."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", 5000, 5000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))


# ---------------------------------------------------------------------------------------------------- at the door

AT_THE_DOOR: list[tuple[dict[str, Any], str]] = [
    (keys("x"), "W/A/S/D/I/J/K/L"),
    (keys("ww"), "W/A/S/D/I/J/K/L"),
    (actions(mode="state", transitions=[{"actions": [1]}]), "W/A/S/D/I/J/K/L"),
    (actions(mode="state", transitions=[{"actions": "w"}]), "must be a list"),
    (actions(mode="dance"), '"state" or "script"'),
    (actions(), '"state" or "script"'),
    (actions(mode="frames", frames=HELD_FRAMES), '"state" or "script"'),
    (actions(mode="state", transitions=[]), "must not be empty"),
    (actions(mode="state"), "transitions must be a list"),
    (actions(mode="state", transitions=["w"]), "must be an object"),
    (actions(mode="state", transitions=[{"actions": ["w"], "client_ts_ms": -1}]), "client_ts_ms"),
    (actions(mode="state", transitions=[{"actions": ["w"], "client_ts_ms": True}]), "client_ts_ms"),
    (
        actions(mode="state", transitions=[{"actions": [], "client_ts_ms": at} for at in (5, 4)]),
        "must not decrease",
    ),
    (actions(mode="state", transitions=[{"actions": []}], more=1), "unknown field 'more'"),
    (actions(mode="script", frames=[]), "1 to 4096"),
    (actions(mode="script", frames=[[]] * 4097), "1 to 4096"),
    (actions(mode="script", frames=["w"]), "must be a list"),
    (actions(mode="script", frames=[["q"]]), "W/A/S/D/I/J/K/L"),
    ({"track": "camera", "schema": "lingbot.camera_actions.v2", "data": {}}, "lingbot.camera_actions.v1"),
    (with_data(along(EYES, LENSES), poses=[]), "equal, positive length"),
    (along(EYES, LENSES[:8]), "equal, positive length"),
    (along(EYES[:, :3], LENSES), "must have 4 items"),
    (along(EYES, LENSES[:, :3]), "must have 4 items"),
    (with_data(along(EYES, LENSES), intrinsics=[["500", 500, 416, 240]] * 9), "numbers only"),
    (with_data(along(EYES, LENSES), intrinsics=[[True, 500, 416, 240]] * 9), "numbers only"),
    (with_data(along(EYES, LENSES), poses="none"), "must be a list"),
    (with_data(along(EYES, LENSES), fps=16), "unknown field 'fps'"),
    (along(EYES[:3], LENSES[:3]), "at least 9 poses a chunk, got 3"),
    (along(EYES, 0 * LENSES), "fx and fy must not be 0"),
    (along(EYES * 1e39, LENSES), "must hold finite float32 numbers"),
]


async def test_what_a_schema_forbids_is_rejected_and_nothing_else_happens(
    broker: RealBroker, real: redis.asyncio.Redis
) -> None:
    async with lingbot_stack(broker.url):
        await real.set("grey", stored(GREY))
        world = Caller(real)
        await world.ok("create", **CREATE, params={"images": ["redis:grey"]})
        for event_id, (control, _) in enumerate(AT_THE_DOOR):
            await world.event(event_id, controls=[control])
        await world.event(100, controls=[keys("w")])

        await chunk_of(world, PayloadStore(real), 0)

        rejected = await world.rejected()
        assert [(e["event_id"], e["reason"]) for e in rejected] == [
            (str(event_id), "invalid_control") for event_id in range(len(AT_THE_DOOR))
        ]
        for entry, (control, words) in zip(rejected, AT_THE_DOOR, strict=True):
            assert words in entry["message"], control
        (chunk,) = await world.chunks()
        assert json.loads(chunk["applied_event_ids"]) == [100]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
async def test_numbers_that_json_does_not_have_are_no_event(
    broker: RealBroker, real: redis.asyncio.Redis, number: str
) -> None:
    async with lingbot_stack(broker.url):
        await real.set("grey", stored(GREY))
        world = Caller(real)
        await world.ok("create", **CREATE, params={"images": ["redis:grey"]})
        control = json.dumps([along(EYES, LENSES)]).replace("400.0", number, 1)
        await world.event(1, controls=control)
        await world.accept(2, None, keys("w"))

        await chunk_of(world, PayloadStore(real), 0)

        (entry,) = await world.rejected()
        assert entry["event_id"] == "1"
        assert entry["reason"] in {"invalid", "invalid_control"}


# ---------------------------------------------------------------------------------------------------- by the model

IMAGE = {"images": ["redis:grey"]}
WALK = [keys("w")]

BY_THE_MODEL: list[tuple[str, dict[str, Any], list[dict[str, Any]], str]] = [
    ("no image", {}, WALK, "images must hold exactly one"),
    ("no images", {"images": []}, WALK, "images must hold exactly one"),
    ("two images", {"images": ["redis:grey"] * 2}, WALK, "images must hold exactly one"),
    ("an image that is no list", {"images": "redis:grey"}, WALK, "images must be a list"),
    ("a list in the list", {"images": [["redis:grey"]]}, WALK, "image must not be a list"),
    ("a number", {"images": [7]}, WALK, "an image must be a picture"),
    ("an absent image", {"images": ["redis:absent"]}, WALK, "the image is not there"),
    ("no picture", {"images": ["redis:text"]}, WALK, "the image can't be read"),
    ("half a picture", {"images": ["redis:half"]}, WALK, "the image can't be read"),
    ("a huge picture", {"images": ["redis:huge"]}, WALK, "the image can't be read"),
    ("another format", {"images": ["redis:gif"]}, WALK, "the image can't be read"),
    ("a foreign URL", {"images": ["https://example.org/x.png"]}, WALK, "redis:<key>"),
    ("a foreign file", {"images": ["file:///etc/hostname"]}, WALK, "redis:<key>"),
    ("a path without a folder", {"images": ["x.png"]}, WALK, "lingbot_action_root"),
    ("no camera", IMAGE, [], "exactly one camera control"),
    ("steps", IMAGE | {"num_inference_steps": 8}, WALK, "num_inference_steps must be 4"),
    ("steps as text", IMAGE | {"num_inference_steps": "4"}, WALK, "num_inference_steps must be 4"),
    ("length", IMAGE | {"max_sequence_length": 256}, WALK, "max_sequence_length must be 512"),
    ("length as a bool", IMAGE | {"max_sequence_length": True}, WALK, "max_sequence_length must be 512"),
    ("outputs", IMAGE | {"num_outputs": 2}, WALK, "num_outputs must be 1"),
    ("half a size", IMAGE | {"height": 32}, WALK, "width"),
    ("no whole tokens", IMAGE | {"height": 32, "width": 40}, WALK, "width must be a multiple of 16"),
    ("another size", IMAGE | {"height": 480, "width": 832}, WALK, "height must be 32"),
    ("a large size", IMAGE | {"height": 4096, "width": 4096}, WALK, "height * width"),
    ("frames of a clip", IMAGE | {"num_frames": 21}, WALK, "num_frames must be 9"),
    ("frames of no block", IMAGE | {"num_frames": 10}, WALK, "num_frames"),
    *(
        (f"shift {value!r:.20}", IMAGE | {"flow_shift": value}, WALK, "flow_shift must be a positive")
        for value in (True, 0, -1, "5", [5])
    ),
    ("kind of output", IMAGE | {"output_type": "pil"}, WALK, "output_type is latent or pixel"),
    ("reuse as a number", IMAGE | {"lingbot_reuse_last_step_kv": 1}, WALK, "lingbot_reuse_last_step_kv"),
    ("latents", IMAGE | {"latents": [0]}, WALK, "latents can't be given"),
    ("a misspelt name", IMAGE | {"heigth": 32}, WALK, "no parameter 'heigth'"),
    (
        "the former place",
        IMAGE | {"additional_information": {"action_path": "00"}},
        WALK,
        "sampling_params.extra_args.action_path",
    ),
    ("a script", IMAGE | {"camera_action_script": [HELD_FRAMES]}, WALK, "camera_action_script does not"),
    ("a directory", IMAGE | {"action_path": "00"}, WALK, "action_path does not"),
]

WITHOUT_THE_DOOR: list[tuple[str, dict[str, Any], str]] = [
    ("two frames", actions(mode="frames", frames=HELD_FRAMES[:2]), "exactly one action list"),
    ("held, not frames", keys("w"), "mode='frames'"),
    ("another key", actions(mode="frames", frames=[["x"], [], []]), "W/A/S/D/I/J/K/L"),
    ("another schema", {"track": "camera", "schema": "other.v1", "data": {}}, "lingbot.camera_actions.v1"),
    ("unequal lengths", along(EYES, LENSES[:8]), "equal, positive length"),
    ("too few poses", along(EYES[:3], LENSES[:3]), "at least 9 poses, got 3"),
    ("no focal length", along(EYES, 0 * LENSES), "fx and fy"),
    ("hardly a focal length", along(EYES, 1e-40 * LENSES), "fx and fy"),
    ("beyond float32", along(EYES * 1e39, LENSES), "poses must be finite float32"),
    ("another track", {"track": "joystick", "schema": "any.v1", "data": {}}, "exactly one camera control"),
]


@pytest.fixture
async def good(broker: RealBroker, real: redis.asyncio.Redis) -> AsyncIterator["Neighbour"]:
    """A world that goes on beside those that fail."""
    images = {
        "grey": stored(GREY),
        "text": b"no picture",
        "half": stored(Image.effect_noise((64, 40), 90))[:1000],
        "huge": huge_png(),
        "gif": stored(GREY, "GIF"),
    }
    # Dozens of tracebacks, with the values in them, would take longer to print than all the rest.
    with capture_logs():
        async with lingbot_stack(broker.url):
            for name, value in images.items():
                await real.set(name, value)
            neighbour = Neighbour(real)
            await neighbour.begin()
            yield neighbour
            await neighbour.check_bits()


class Neighbour:
    """A good world, which makes a chunk after each failure of another one."""

    def __init__(self, real: redis.asyncio.Redis) -> None:
        self.real = real
        self.world, self.store = Caller(real, "good"), PayloadStore(real)
        self.made: list[np.ndarray] = []

    async def begin(self) -> None:
        await self.world.ok("create", **CREATE, params=IMAGE)
        await self.world.accept(1, None, keys("w"))

    async def next_chunk(self) -> None:
        self.made.append((await chunk_of(self.world, self.store, len(self.made)))[0])

    async def check_bits(self) -> None:
        """The same world, alone, has the same chunks."""
        compared = self.made[:12]
        await self.world.ok("reset")
        await self.world.accept(2, CREATE["prompt"], keys("w"))
        for index, latents in enumerate(compared):
            again, _ = await chunk_of(self.world, self.store, index)
            assert np.array_equal(again, latents), index

    async def sees_fail(
        self, case: str, create: dict[str, Any], controls: list[dict[str, Any]], words: str
    ) -> None:
        """Another world fails for that reason, and this one goes on."""
        bad = Caller(self.real, "bad")
        await bad.ok("create", **create)
        for event_id, control in enumerate(controls):
            await bad.accept(event_id, None, control)
        error = await bad.refused("next_chunk")
        assert error["code"] == "model_error", (case, error)
        assert words in error["message"], (case, error)
        state = await bad.until("FAILED")
        assert state["failure_message"] == error["message"], case
        await bad.ok("close")
        await self.next_chunk()


async def test_what_only_the_model_can_see_fails_that_session_alone(good: Neighbour) -> None:
    for case, params, controls, words in BY_THE_MODEL:
        await good.sees_fail(case, CREATE | {"params": params}, controls, words)


async def test_what_no_reducer_has_checked_is_refused_by_the_model(good: Neighbour) -> None:
    create = CREATE | {"reducer": "latest", "params": IMAGE}
    for case, control, words in WITHOUT_THE_DOOR:
        await good.sees_fail(case, create, [control], words)
    nothing_said = {name: value for name, value in create.items() if name != "prompt"}
    frames = actions(mode="frames", frames=HELD_FRAMES)
    await good.sees_fail("no prompt", nothing_said, [frames], "prompt must be a non-empty text")
    await good.sees_fail("a blank prompt", create | {"prompt": " \n"}, [frames], "prompt")
    assert good.made


async def test_paths_out_of_the_trusted_folder_fail_and_are_never_told(
    broker: RealBroker, real: redis.asyncio.Redis, tmp_path: Path
) -> None:
    root, secret = tmp_path / "root", tmp_path / "secret.png"
    (root / "sub").mkdir(parents=True)
    secret.write_bytes(stored(GREY))
    (root / "fine.png").write_bytes(stored(GREY))
    (root / "link.png").symlink_to(secret)
    (root / "inside.png").symlink_to(root / "fine.png")
    (root / "out").symlink_to(tmp_path)
    os.mkfifo(root / "fifo.png")
    with (root / "large.png").open("wb") as large:
        large.truncate((64 << 20) + 1)
    paths = [
        "../secret.png",
        str(secret),
        "link.png",
        "out/secret.png",
        "fifo.png",
        "large.png",
        "sub",
        "sub/../fine.png",
    ]
    with capture_logs():
        await _try_paths(broker, real, root, paths)


async def _try_paths(broker: RealBroker, real: redis.asyncio.Redis, root: Path, paths: list[str]) -> None:
    async with lingbot_stack(broker.url, lingbot_action_root=str(root)):
        for path in [*paths, "absent.png", ""]:
            bad = Caller(real, "bad")
            await bad.ok("create", **CREATE, params={"images": [path]})
            await bad.accept(1, None, keys("w"))
            error = await bad.refused("next_chunk")
            assert error["code"] == "model_error", (path, error)
            assert "images" in error["message"], (path, error)
            assert all(word not in error["message"] for word in (str(root.parent), "secret", "out/")), error
            await bad.ok("close")
        for path in ("fine.png", str(root / "fine.png"), "inside.png"):
            fine = Caller(real, "fine")
            await fine.ok("create", **CREATE, params={"images": [path]})
            await fine.accept(1, None, keys("w"))
            await chunk_of(fine, PayloadStore(real), 0)
            await fine.ok("close")
