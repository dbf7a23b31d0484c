"""The camera of a tick: anchors, tails, scales."""

from typing import Any

import numpy as np
import pytest
import torch

from contracts.errors import InvalidArgumentError
from contracts.events import ARDiffusionControlInput
from contracts.lingbot import CAMERA_TRACK, CAMERA_TRAJECTORY_SCHEMA, HeldKeys, actions_control
from gpu_worker.models.lingbot_world.actions import CameraState, action_intrinsics, integrate
from gpu_worker.models.lingbot_world.camera import (
    LIVE_SCALE,
    CameraTail,
    PictureSize,
    action_camera,
    tick_camera,
    trajectory_camera,
)
from gpu_worker.models.lingbot_world.trajectories import CameraPath, interpolate
from support.lingbot_oracles.rays import folded, pluecker

SIZE = PictureSize(16, 32)
EXACT: dict[str, Any] = {"device": "cpu", "dtype": torch.float64}
WALK: tuple[HeldKeys, ...] = (("w",), ("w", "l"), ("d", "i"))
LONG, _ = integrate(WALK * 6)


def trajectory(poses: np.ndarray) -> ARDiffusionControlInput:
    intrinsics = np.tile([500.0, 490.0, 410.0, 230.0], (len(poses), 1))
    data = {"poses": poses.tolist(), "intrinsics": intrinsics.tolist()}
    return ARDiffusionControlInput(CAMERA_TRACK, CAMERA_TRAJECTORY_SCHEMA, data)


def tick(control: ARDiffusionControlInput, tail: CameraTail | None = None) -> tuple[np.ndarray, CameraTail]:
    camera, left = tick_camera([control], tail or CameraTail(), SIZE, **EXACT)
    return camera.numpy(), left


def expected(
    poses: np.ndarray, intrinsics: np.ndarray, *, drop: int, scale: float | None = None
) -> np.ndarray:
    rays = pluecker(poses, np.tile(intrinsics, (len(poses), 1)), SIZE.height, SIZE.width, scale=scale)
    return folded(rays[drop:])


KEYS_LENS = action_intrinsics(SIZE.width, SIZE.height)
FILE_LENS = np.array([500.0, 490.0, 410.0, 230.0])


def test_keys_of_a_new_session_are_anchored_at_the_origin() -> None:
    camera, left = tick(actions_control(WALK))

    poses, state = integrate(WALK)
    assert camera.shape == (1, 384, 3, 2, 4)
    np.testing.assert_allclose(camera, expected(np.stack([np.eye(4), *poses]), KEYS_LENS, drop=1), atol=1e-9)
    assert np.array_equal(left.moved_by_keys.pose, state.pose)
    assert left.trajectory_pose is None


def test_keys_go_on_from_the_pose_and_pitch_of_the_chunk_before() -> None:
    _, tail = tick(actions_control(WALK))
    camera, left = tick(actions_control(WALK), tail)

    poses, state = integrate(WALK * 2)
    np.testing.assert_allclose(camera, expected(poses[2:], KEYS_LENS, drop=1), atol=1e-9)
    assert np.array_equal(left.moved_by_keys.pose, state.pose)
    assert left.moved_by_keys.pitch_deg == state.pitch_deg == 8


def test_a_trajectory_of_a_new_session_begins_at_rest() -> None:
    camera, left = tick(trajectory(LONG[:9]))

    latent = interpolate(CameraPath(LONG[:9], np.ones((9, 4))), 3).poses
    np.testing.assert_allclose(camera, expected(latent, FILE_LENS, drop=0), atol=1e-9)
    assert left.trajectory_pose is not None
    np.testing.assert_allclose(left.trajectory_pose, LONG[8], atol=1e-9)


def test_a_trajectory_behind_another_gets_the_true_step_into_its_first_frame() -> None:
    _, tail = tick(trajectory(LONG[:9]))
    camera, _ = tick(trajectory(LONG[9:]), tail)

    latent = interpolate(CameraPath(LONG[9:], np.ones((9, 4))), 3).poses
    poses = np.stack([LONG[8], *latent])
    np.testing.assert_allclose(camera, expected(poses, FILE_LENS, drop=1), atol=1e-9)


def test_poses_beyond_the_ninth_do_not_matter() -> None:
    assert np.array_equal(tick(trajectory(LONG))[0], tick(trajectory(LONG[:9]))[0])


def test_keys_behind_a_trajectory_start_level_from_a_new_origin() -> None:
    # The trajectory's world may have its ground anywhere: only the camera's own axes mean the same in both.
    tilted = np.array([[1.0, 0, 0, 5], [0, 0, 1, 6], [0, -1, 0, 7], [0, 0, 0, 1]])
    _, tail = tick(trajectory(tilted @ LONG[:9]))

    after, left = tick(actions_control(WALK), tail)
    fresh, _ = tick(actions_control(WALK))

    assert np.array_equal(after, fresh)
    assert left.trajectory_pose is None


def test_a_trajectory_behind_keys_begins_at_rest() -> None:
    _, tail = tick(actions_control(WALK))

    assert np.array_equal(tick(trajectory(LONG[:9]), tail)[0], tick(trajectory(LONG[:9]))[0])


def test_a_tail_is_not_changed_by_the_chunk_that_starts_from_it() -> None:
    _, tail = tick(actions_control(WALK))
    pose, pitch = tail.moved_by_keys.pose.copy(), tail.moved_by_keys.pitch_deg

    with pytest.raises(InvalidArgumentError):
        tick(trajectory(LONG[:8]), tail)
    once, _ = tick(actions_control(WALK), tail)
    twice, _ = tick(actions_control(WALK), tail)

    assert np.array_equal(once, twice)
    assert np.array_equal(tail.moved_by_keys.pose, pose)
    assert tail.moved_by_keys.pitch_deg == pitch


def test_a_tick_with_too_few_poses_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="at least 9 poses, got 8") as caught:
        tick(trajectory(LONG[:8]))
    assert caught.value.field == "poses"


def test_a_tick_needs_exactly_one_camera_control() -> None:
    for controls in ([], [actions_control(WALK)] * 2):
        with pytest.raises(InvalidArgumentError, match="exactly one camera control"):
            tick_camera(controls, CameraTail(), SIZE, **EXACT)


@pytest.mark.parametrize("frames", [WALK[:2], WALK * 2])
def test_a_tick_needs_keys_for_exactly_three_frames(frames: tuple[HeldKeys, ...]) -> None:
    with pytest.raises(InvalidArgumentError, match="exactly one action list") as caught:
        tick(actions_control(frames))
    assert caught.value.field == "frames"


def test_a_whole_script_shares_one_scale_and_live_keys_have_a_fixed_one() -> None:
    frames = (("w",), ("w", "d"), (), ("s",), ("l",), ("a",))
    poses, _ = integrate(frames)
    anchored = np.stack([np.eye(4), *poses])

    script, left = action_camera(frames, CameraState(), SIZE, translation_scale=None, **EXACT)
    live, _ = action_camera(frames[:3], CameraState(), SIZE, translation_scale=LIVE_SCALE, **EXACT)

    np.testing.assert_allclose(script.numpy(), expected(anchored, KEYS_LENS, drop=1), atol=1e-9)
    np.testing.assert_allclose(live.numpy(), expected(anchored[:4], KEYS_LENS, drop=1, scale=0.05), atol=1e-9)
    assert np.array_equal(left.pose, poses[-1])


def test_a_whole_trajectory_is_embedded_at_once() -> None:
    poses, _ = integrate(WALK * 7)
    path = CameraPath(poses, np.tile(FILE_LENS, (len(poses), 1)))

    camera = trajectory_camera(path, 21, SIZE, **EXACT).numpy()

    np.testing.assert_allclose(camera, expected(poses[::4], FILE_LENS, drop=0), atol=1e-9)


@pytest.mark.parametrize("num_frames", [0, 8, 13, True, "9"])
def test_a_whole_trajectory_is_whole_blocks(num_frames: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="num_frames"):
        trajectory_camera(CameraPath(LONG, np.ones((len(LONG), 4))), num_frames, SIZE, **EXACT)
