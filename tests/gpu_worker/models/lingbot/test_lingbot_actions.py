"""Held keys to camera poses, against exact values and an oracle of their formulas."""

import math
import random

import numpy as np
import pytest

from contracts.errors import InvalidArgumentError
from contracts.lingbot import CAMERA_KEYS, HeldKeys
from gpu_worker.models.lingbot_world.actions import (
    CameraState,
    action_intrinsics,
    check_pose,
    integrate,
    moved,
)
from gpu_worker.models.lingbot_world.rays import scaled_intrinsics
from support.lingbot_oracles.integrator import walk


def held(*frames: str) -> list[HeldKeys]:
    return [tuple(key for key in CAMERA_KEYS if key in keys) for keys in frames]


def test_random_keys_lead_where_the_formulas_say() -> None:
    rng = random.Random(3)
    keys = ["".join(rng.sample("wasdijkl", rng.randint(0, 4))) for _ in range(200)]

    poses, left = integrate(held(*keys))
    expected, pitch = walk(keys)

    np.testing.assert_allclose(poses, expected, rtol=0, atol=1e-12)
    assert poses.dtype == np.float64
    assert left.pitch_deg == pitch
    assert np.array_equal(left.pose, poses[-1])


def test_a_script_in_chunks_equals_the_script_at_once() -> None:
    keys = held("w", "wl", "i", "ik", "dl", "si")

    at_once, _ = integrate(keys)
    first, left = integrate(keys[:3])
    second, _ = integrate(keys[3:], left)

    assert np.array_equal(np.concatenate((first, second)), at_once)


def test_a_second_chunk_to_the_right_keeps_the_way_ahead_of_the_first() -> None:
    ahead, left = integrate(held("w", "w", "w"))
    right, _ = integrate(held("d", "d", "d"), left)

    assert ahead[:, 2, 3] == pytest.approx([0.05, 0.1, 0.15], abs=1e-6)
    assert right[:, 2, 3] == pytest.approx([ahead[-1, 2, 3]] * 3)
    assert (np.diff(right[:, 0, 3]) > 0).all()


def test_a_frame_turns_before_it_walks() -> None:
    turned = moved(CameraState(), ("w", "l"))

    angle = math.radians(6)
    assert turned.pose[:3, 3] == pytest.approx([0.05 * math.sin(angle), 0, 0.05 * math.cos(angle)], abs=1e-6)


def test_looking_up_raises_the_view_and_walking_stays_level() -> None:
    poses, _ = integrate(held("i", "i", "w"))

    assert poses[1, 1, 2] == pytest.approx(-math.sin(math.radians(8)))  # y points down
    assert poses[2, 1, 3] == 0


def test_a_pitch_step_beyond_85_degrees_is_dropped_not_shortened() -> None:
    _, left = integrate(held(*["i"] * 21))
    assert left.pitch_deg == 84

    stuck, left = integrate(held("i", "i"), left)
    assert left.pitch_deg == 84
    assert np.array_equal(stuck[0], stuck[1])

    _, left = integrate(held("k"), left)
    assert left.pitch_deg == 80


@pytest.mark.parametrize(("start", "key", "left"), [(81, "i", 85), (81.5, "i", 81.5), (-81, "k", -85)])
def test_a_pitch_of_85_degrees_is_just_allowed(start: float, key: str, left: float) -> None:
    assert moved(CameraState(pitch_deg=start), (key,)).pitch_deg == left


def test_opposite_keys_cancel() -> None:
    poses, left = integrate(held("wsadikjl", "ws"))

    assert np.array_equal(poses, np.tile(np.eye(4), (2, 1, 1)))
    assert left.pitch_deg == 0


def test_stored_intrinsics_become_500_pixels_at_any_size() -> None:
    stored = action_intrinsics(416, 240)

    assert stored.tolist() == [500 * 832 / 416, 500 * 480 / 240, 416, 240]
    assert scaled_intrinsics(stored[None], 240, 416).tolist() == [[500, 500, 208, 120]]


@pytest.mark.parametrize(
    ("width", "height", "field"), [(0, 240, "width"), (416, -1, "height"), (True, 1, "width")]
)
def test_a_resolution_must_be_positive(width: int, height: int, field: str) -> None:
    with pytest.raises(InvalidArgumentError, match="resolution must be positive") as caught:
        action_intrinsics(width, height)
    assert caught.value.field == field


def test_a_walk_needs_frames() -> None:
    with pytest.raises(InvalidArgumentError, match="frames"):
        integrate([])


@pytest.mark.parametrize(
    "pose", [np.eye(3), np.full((4, 4), np.nan), np.eye(4).tolist()[:3], "a pose", [[1], [2, 3]]]
)
def test_an_initial_pose_is_a_finite_4x4_matrix(pose: object) -> None:
    with pytest.raises(InvalidArgumentError, match="finite 4x4"):
        check_pose(pose)
    with pytest.raises(InvalidArgumentError, match="finite 4x4"):
        CameraState(pose)  # type: ignore[arg-type]


def test_an_initial_pitch_is_finite() -> None:
    with pytest.raises(InvalidArgumentError, match="pitch"):
        CameraState(pitch_deg=math.nan)
