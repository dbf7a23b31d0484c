"""Trajectory files, their limits, and interpolation."""

import io
import math
import pickle
import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import ConfigurationError, InvalidArgumentError
from contracts.lingbot import CameraTrajectory
from gpu_worker.models.lingbot_world.npy import MAX_HEADER_BYTES, parse_npy
from gpu_worker.models.lingbot_world.trajectories import (
    MAX_FRAMES,
    CameraPath,
    interpolate,
    latent_path,
    load_trajectory,
    quaternion_of,
    rotation_of,
    slerp,
)
from gpu_worker.models.lingbot_world.trusted_root import TrustedRoot
from support.lingbot_examples import examples_root
from support.lingbot_oracles.rays import between


def npy(array: np.ndarray, version: tuple[int, int] | None = None) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version=version, allow_pickle=False)
    return file.getvalue()


def with_header(header: str, payload: bytes = b"", length: int | None = None) -> bytes:
    raw = header.encode("latin-1")
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(raw) if length is None else length) + raw + payload


def random_rotation(rng: np.random.Generator) -> np.ndarray:
    q, r = np.linalg.qr(rng.normal(size=(3, 3)))
    q *= np.sign(np.diag(r))
    if np.linalg.det(q) < 0:
        q[:, 0] = -q[:, 0]
    return q


def random_path(frames: int, seed: int = 0) -> CameraPath:
    rng = np.random.default_rng(seed)
    poses = np.tile(np.eye(4), (frames, 1, 1))
    for pose in poses:
        pose[:3, :3], pose[:3, 3] = random_rotation(rng), rng.normal(size=3)
    return CameraPath(poses, rng.uniform(100, 600, (frames, 4)))


def write(folder: Path, poses: np.ndarray | bytes, intrinsics: np.ndarray | bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("poses", poses), ("intrinsics", intrinsics)):
        (folder / f"{name}.npy").write_bytes(content if isinstance(content, bytes) else npy(content))


# ---------------------------------------------------------------------------------------------------- NPY


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
@pytest.mark.parametrize("dtype", ["<f4", "<f8", ">f8", "<f2", "<i8", "<u1", ">i2"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_numbers_of_either_format_order_and_endianness_are_read(
    version: tuple[int, int], dtype: str, order: Any
) -> None:
    array = np.asarray(np.arange(24).reshape(2, 3, 4), dtype=dtype, order=order)

    assert np.array_equal(parse_npy(npy(array, version), "poses.npy"), array)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x93NUMP",
        npy(np.zeros(3), (3, 0)),
        npy(np.zeros(3)).replace(b"\x93NUMPY", b"\x92NUMPY"),
        npy(np.zeros(3))[:-1],
        npy(np.zeros(3)) + b"\0",
        npy(np.zeros(3, "<c16")),
        npy(np.zeros(3, "?")),
        npy(np.zeros(3, np.longdouble)),
        npy(np.zeros(3, "<M8[s]")),
        npy(np.zeros(3, [("a", "<f4")])),
        npy(np.array(["text"])),
        pickle.dumps([1, 2]),
        with_header("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", b"\0" * 8),
        with_header("{'descr': '<f1', 'fortran_order': False, 'shape': (1,)}", b"\0"),
        with_header("{'descr': '<f4', 'fortran_order': 0, 'shape': (1,)}", b"\0" * 4),
        with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (True,)}", b"\0" * 4),
        with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}", b"\0" * 4),
        with_header("{'descr': '<f4', 'fortran_order': False, 'shape': 1}", b"\0" * 4),
        with_header("{'descr': '<f4', 'fortran_order': False}"),
        with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (0,), 'more': 1}"),
        with_header(f"{{'descr': '<f4', 'fortran_order': False, 'shape': {(1,) * 100}}}", b"\0" * 4),
        with_header(f"{{'descr': '<f4', 'fortran_order': False, 'shape': (0, {10**30})}}"),
        with_header("__import__('os')"),
        with_header("'\\d'"),
        with_header("(" * 5000),
        with_header("-" * 9000 + "1"),
        with_header("{[]: 1}"),
        with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (0,)}", length=60_000),
    ],
)
def test_anything_else_is_refused_by_the_file_s_name(data: bytes) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_npy(data, "poses.npy")
    assert caught.value.field == "poses.npy"


HEADER = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 4, 4), }"


@given(
    at=st.integers(0, len(HEADER)),
    cut=st.integers(0, 12),
    put=st.text(st.characters(max_codepoint=255), max_size=12),
    payload=st.integers(0, 160),
)
def test_a_damaged_file_is_read_or_refused_and_nothing_else(
    at: int, cut: int, put: str, payload: int
) -> None:
    data = with_header(HEADER[:at] + put + HEADER[at + cut :], b"\0" * payload)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of odd literals, which are refused all the same
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            found = parse_npy(data, "poses.npy")
        except InvalidArgumentError:
            return
    assert found.nbytes == payload


def test_a_header_may_have_ten_thousand_bytes_and_no_more() -> None:
    header = "{'descr': '<f4', 'fortran_order': False, 'shape': (0,)}"

    assert parse_npy(with_header(header.ljust(MAX_HEADER_BYTES)), "poses.npy").shape == (0,)
    with pytest.raises(InvalidArgumentError, match="header"):
        parse_npy(with_header(header.ljust(MAX_HEADER_BYTES + 1)), "poses.npy")


# ---------------------------------------------------------------------------------------------------- directories


def test_a_trajectory_is_its_two_files_as_float32_and_others_do_not_matter(tmp_path: Path) -> None:
    path = random_path(5)
    write(tmp_path / "walk", path.poses, path.intrinsics)
    (tmp_path / "walk" / "image.jpg").write_bytes(b"no picture")

    loaded = load_trajectory("walk", TrustedRoot(tmp_path))

    assert loaded.poses.dtype == loaded.intrinsics.dtype == np.float32
    assert np.array_equal(loaded.poses, path.poses.astype(np.float32))
    assert np.array_equal(loaded.intrinsics, path.intrinsics.astype(np.float32))


def test_whole_numbers_are_read_as_float32(tmp_path: Path) -> None:
    write(tmp_path, np.tile(np.eye(4, dtype=np.int64), (2, 1, 1)), np.ones((2, 4), np.uint8))

    assert load_trajectory(".", TrustedRoot(tmp_path)).poses.dtype == np.float32


@pytest.mark.parametrize(
    ("poses", "intrinsics", "field"),
    [
        (np.zeros((3, 4, 4)), np.zeros((2, 4)), "intrinsics"),
        (np.zeros((0, 4, 4)), np.zeros((0, 4)), "poses"),
        (np.zeros((MAX_FRAMES + 1, 4, 4), np.int8), np.zeros((MAX_FRAMES + 1, 4), np.int8), "poses"),
        (np.zeros((3, 3, 4)), np.zeros((3, 4)), "poses"),
        (np.zeros((3, 4)), np.zeros((3, 4)), "poses"),
        (np.zeros(()), np.zeros((3, 4)), "poses"),
        (np.zeros((3, 4, 4)), np.zeros((3, 3)), "intrinsics"),
        (np.full((1, 4, 4), np.inf), np.zeros((1, 4)), "poses"),
        (np.full((1, 4, 4), 1e300), np.zeros((1, 4)), "poses"),
        (np.zeros((1, 4, 4)), np.full((1, 4), np.nan), "intrinsics"),
        (b"", np.zeros((1, 4)), "poses.npy"),
        (np.zeros((1, 4, 4)), b"\0" * 200_000, "intrinsics.npy"),
    ],
)
def test_files_that_are_no_trajectory_are_refused_by_name(
    tmp_path: Path, poses: np.ndarray | bytes, intrinsics: np.ndarray | bytes, field: str
) -> None:
    write(tmp_path / "walk", poses, intrinsics)

    with pytest.raises(InvalidArgumentError) as caught:
        load_trajectory("walk", TrustedRoot(tmp_path))
    assert caught.value.field == field
    assert str(tmp_path) not in caught.value.message


def test_a_missing_file_is_named_without_its_path(tmp_path: Path) -> None:
    write(tmp_path / "walk", np.zeros((1, 4, 4)), np.zeros((1, 4)))
    (tmp_path / "walk" / "intrinsics.npy").unlink()

    with pytest.raises(InvalidArgumentError, match=r"intrinsics\.npy") as caught:
        load_trajectory("walk", TrustedRoot(tmp_path))
    assert str(tmp_path) not in caught.value.message


def test_without_a_root_no_directory_is_read() -> None:
    with pytest.raises(ConfigurationError, match="lingbot_action_root"):
        load_trajectory("walk", None)


def test_what_was_read_does_not_change_with_the_file(tmp_path: Path) -> None:
    path = random_path(2)
    write(tmp_path, path.poses, path.intrinsics)
    loaded = load_trajectory(".", TrustedRoot(tmp_path))

    write(tmp_path, np.zeros((2, 4, 4)), np.zeros((2, 4)))

    assert np.array_equal(loaded.poses, path.poses.astype(np.float32))


def test_an_inline_trajectory_is_kept_in_float64() -> None:
    row = (0.1, 0.2, 0.3, 0.4)

    path = CameraPath.of_inline(CameraTrajectory(((row,) * 4,), (row,)))

    assert path.poses.shape == (1, 4, 4)
    assert path.intrinsics.tolist() == [list(row)]


@pytest.mark.parametrize(("name", "frames"), [("00", 961), ("01", 561)])
def test_a_real_trajectory_loads_and_interpolates_to_rotations(name: str, frames: int) -> None:
    loaded = load_trajectory(name, TrustedRoot(examples_root()))
    assert len(loaded) == frames

    latents = latent_path(loaded, 129, 33)

    rotations = latents.poses[:, :3, :3]
    np.testing.assert_allclose(
        rotations @ rotations.transpose(0, 2, 1), np.tile(np.eye(3), (33, 1, 1)), atol=1e-6
    )
    np.testing.assert_allclose(latents.poses, loaded.poses[:129:4], rtol=1e-6, atol=1e-5)


# ---------------------------------------------------------------------------------------------------- interpolation


def test_rotations_take_the_shortest_arc_and_the_rest_goes_straight() -> None:
    path = random_path(5)

    result = interpolate(path, 9)

    for index in range(9):
        left, share = min(index // 2, 3), index / 2 - min(index // 2, 3)
        a, b = path.poses[left], path.poses[left + 1]
        np.testing.assert_allclose(
            result.poses[index, :3, :3], between(a[:3, :3], b[:3, :3], share), atol=1e-9
        )
        np.testing.assert_allclose(result.poses[index, :3, 3], a[:3, 3] + share * (b[:3, 3] - a[:3, 3]))
        expected = path.intrinsics[left] + share * (path.intrinsics[left + 1] - path.intrinsics[left])
        np.testing.assert_allclose(result.intrinsics[index], expected)


def test_nearly_equal_rotations_are_blended_and_normalised() -> None:
    a = np.array([1.0, 0, 0, 0])
    b = np.array([math.cos(0.01), math.sin(0.01), 0, 0])

    middle = slerp(a, b, 0.5)

    expected = (a + b) / np.linalg.norm(a + b)
    np.testing.assert_allclose(middle, expected, atol=1e-15)
    assert np.linalg.norm(middle) == pytest.approx(1)


def test_a_quaternion_and_its_negative_are_one_rotation() -> None:
    rng = np.random.default_rng(1)
    a, b = (quaternion_of(random_rotation(rng)) for _ in range(2))

    assert rotation_of(slerp(a, b, 0.3)) == pytest.approx(rotation_of(slerp(a, -b, 0.3)))


def test_every_rotation_survives_the_way_to_a_quaternion_and_back() -> None:
    rng = np.random.default_rng(2)
    halves = [np.diag(signs) for signs in ((1, 1, 1), (1, -1, -1), (-1, 1, -1), (-1, -1, 1))]

    for rotation in [*halves, *(random_rotation(rng) for _ in range(100))]:
        np.testing.assert_allclose(rotation_of(quaternion_of(rotation.astype(float))), rotation, atol=1e-12)


def test_one_pose_is_repeated() -> None:
    path = random_path(1)

    repeated = interpolate(path, 3)

    np.testing.assert_allclose(repeated.poses, np.tile(path.poses, (3, 1, 1)), atol=1e-12)
    assert np.array_equal(repeated.intrinsics, np.tile(path.intrinsics, (3, 1)))


def test_the_same_count_changes_nothing() -> None:
    path = random_path(4)

    assert interpolate(path, 4) is path


@pytest.mark.parametrize("count", [0, -1, True, 2.0])
def test_a_count_must_be_positive(count: Any) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        interpolate(random_path(2), count)
    assert caught.value.field == "frames"


def test_a_trajectory_is_cut_to_the_pixel_frames_before_it_is_interpolated() -> None:
    path = random_path(20)

    cut = latent_path(path, 9, 3)

    np.testing.assert_allclose(cut.poses, path.poses[[0, 4, 8]], atol=1e-12)
    with pytest.raises(InvalidArgumentError, match="at least 21 poses, got 20") as caught:
        latent_path(path, 21, 6)
    assert caught.value.field == "poses"


def test_inline_numbers_beyond_float32_are_refused_before_anything_overflows() -> None:
    row = (1e300,) * 4

    with pytest.raises(InvalidArgumentError, match="finite float32") as caught:
        CameraPath.of_inline(CameraTrajectory(((row,) * 4,), ((1.0,) * 4,)))
    assert caught.value.field == "poses"


def test_the_largest_numbers_that_pass_interpolate_without_a_warning() -> None:
    poses = np.full((2, 4, 4), -float(np.finfo(np.float32).max))

    assert np.isfinite(interpolate(CameraPath(poses, np.ones((2, 4))), 3).poses).all()
