"""Pluecker rays: exact values, and an oracle that goes pixel by pixel."""

from typing import Any

import numpy as np
import pytest
import torch

from contracts.errors import InvalidArgumentError
from gpu_worker.models.lingbot_world.actions import integrate
from gpu_worker.models.lingbot_world.rays import (
    fold,
    frame_steps,
    pluecker_rays,
    rigid_inverse,
    scaled_intrinsics,
)
from gpu_worker.models.lingbot_world.trajectories import CameraPath, load_trajectory
from gpu_worker.models.lingbot_world.trusted_root import TrustedRoot
from support.lingbot_examples import examples_root
from support.lingbot_oracles.rays import folded, pluecker

WALK, _ = integrate([("w", "l"), ("w", "d", "i"), (), ("s", "k"), ("a",)])


def still(intrinsics: tuple[float, ...] = (500.0, 500.0, 416.0, 240.0)) -> CameraPath:
    return CameraPath(np.eye(4)[None], np.array([intrinsics]))


def walking() -> CameraPath:
    return CameraPath(WALK, np.random.default_rng(0).uniform(200, 500, (len(WALK), 4)))


def proportional(ray: torch.Tensor, expected: tuple[float, ...]) -> None:
    torch.testing.assert_close(ray, torch.tensor(expected) / torch.tensor(expected).norm())


def test_the_centre_ray_of_a_camera_at_rest_looks_ahead_from_the_origin() -> None:
    rays = pluecker_rays(still(), 480, 832, rays_height=1, rays_width=1)

    assert rays.flatten().tolist() == [0, 0, 0, 0, 0, 1]


def test_the_corner_ray_of_a_small_picture_is_exact() -> None:
    rays = pluecker_rays(still((416, 240, 416, 240)), 4, 8)

    assert rays.shape == (1, 6, 4, 8)
    proportional(rays[0, 3:, 0, 0], (-0.875, -0.75, 1))


def test_fewer_rays_are_taken_from_the_middle_of_what_they_stand_for() -> None:
    rays = pluecker_rays(still((416, 240, 416, 240)), 6, 10, rays_height=2, rays_width=5)

    assert rays.shape == (1, 6, 2, 5)
    proportional(rays[0, 3:, 0, 0], (-0.8, -0.5, 1))


@pytest.mark.parametrize("scale", [None, 0.05])
@pytest.mark.parametrize("rays", [None, (3, 2)])
def test_rays_equal_the_formulas(scale: float | None, rays: tuple[int, int] | None) -> None:
    path = walking()
    rows, columns = rays or (None, None)

    found = pluecker_rays(
        path, 9, 6, rays_height=rows, rays_width=columns, translation_scale=scale, dtype=torch.float64
    )

    expected = pluecker(path.poses, path.intrinsics, 9, 6, rays=rays, scale=scale)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-9)


@pytest.mark.parametrize("name", ["00", "01"])
def test_rays_of_a_real_trajectory_equal_the_formulas(name: str) -> None:
    whole = load_trajectory(name, TrustedRoot(examples_root()))
    path = CameraPath(whole.poses[100:400:100], whole.intrinsics[100:400:100])

    found = pluecker_rays(path, 8, 16)

    # The files are float32, so their rotations are not quite orthogonal: transposed is not quite inverted.
    np.testing.assert_allclose(found.numpy(), pluecker(path.poses, path.intrinsics, 8, 16), atol=1e-4)


def test_float32_rays_are_as_good_as_float32_can_be() -> None:
    path = walking()

    found = pluecker_rays(path, 16, 16)

    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), pluecker(path.poses, path.intrinsics, 16, 16), atol=1e-6)


def test_directions_have_unit_length_whatever_the_rotation_was() -> None:
    poses = np.tile(np.eye(4), (2, 1, 1))
    poses[1, :3, :3] *= 3

    rays = pluecker_rays(CameraPath(poses, np.full((2, 4), 400.0)), 4, 8)

    torch.testing.assert_close(rays[:, 3:].norm(dim=1), torch.ones(2, 4, 8))


def test_lower_precision_is_a_cast_at_the_end() -> None:
    exact = pluecker_rays(walking(), 8, 8)

    assert torch.equal(pluecker_rays(walking(), 8, 8, dtype=torch.bfloat16), exact.bfloat16())


def test_the_first_frame_moves_by_nothing_and_every_other_from_the_one_before() -> None:
    steps = frame_steps(WALK, translation_scale=1.0)

    assert np.array_equal(steps[0], np.eye(4))
    for before, step, after in zip(WALK[:-1], steps[1:], WALK[1:], strict=True):
        np.testing.assert_allclose(before @ step, after, atol=1e-12)


def test_a_rigid_inverse_undoes_its_pose() -> None:
    np.testing.assert_allclose(rigid_inverse(WALK) @ WALK, np.tile(np.eye(4), (5, 1, 1)), atol=1e-12)


def test_the_longest_step_becomes_one_and_standing_still_divides_by_nothing() -> None:
    lengths = np.linalg.norm(frame_steps(WALK)[:, :3, 3], axis=-1)

    assert lengths.max() == pytest.approx(1)
    assert np.array_equal(frame_steps(np.tile(np.eye(4), (3, 1, 1))), np.tile(np.eye(4), (3, 1, 1)))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), True])
def test_a_given_scale_must_be_positive(scale: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="translation_scale"):
        frame_steps(WALK, scale)


def test_intrinsics_scale_with_the_picture() -> None:
    assert scaled_intrinsics(np.array([[832.0, 480, 416, 240]]), 240, 416).tolist() == [[416, 240, 208, 120]]


@pytest.mark.parametrize(
    "intrinsics",
    [
        (0.0, 1.0, 0.0, 0.0),
        (1.0, 0.0, 0.0, 0.0),
        (0.0, 1.0, -8.0, 0.0),
        (1e-40, 1.0, 0.0, 0.0),
        (1.0, -1e-30, 0.0, 0.0),
        (1.0, 1.0, 3e38, 0.0),
    ],
)
def test_a_focal_length_of_nothing_is_refused(intrinsics: tuple[float, ...]) -> None:
    with pytest.raises(InvalidArgumentError, match="fx and fy") as caught:
        pluecker_rays(still(intrinsics), 8, 8)
    assert caught.value.field == "intrinsics"


@pytest.mark.parametrize("focal", [1e-14, -1e-14, 1e30])
def test_whatever_focal_length_is_taken_gives_unit_directions(focal: float) -> None:
    rays = pluecker_rays(still((focal, focal, 416.0, 240.0)), 8, 8)

    assert torch.allclose(rays[:, 3:].norm(dim=1), torch.ones(1))


def test_folding_puts_eight_by_eight_pixels_into_the_channels() -> None:
    rays = torch.randn(3, 6, 16, 16)

    found = fold(rays)

    assert found.shape == (1, 384, 3, 2, 2)
    assert np.array_equal(found.numpy(), folded(rays.numpy()).astype(np.float32))


@pytest.mark.parametrize("shape", [(3, 5, 16, 16), (3, 6, 12, 16), (3, 6, 16, 9), (6, 16, 16)])
def test_only_rays_of_whole_latent_pixels_fold(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgumentError, match="rays"):
        fold(torch.zeros(shape))
