"""Files beneath a trusted root: what is read, and everything that is not."""

import os
from pathlib import Path

import pytest

from contracts.errors import ConfigurationError, InvalidArgumentError
from gpu_worker.models.lingbot_world import trusted_root
from gpu_worker.models.lingbot_world.trusted_root import TrustedRoot


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A root with `walk/poses.npy`, and a secret beside the root."""
    (tmp_path / "root" / "walk").mkdir(parents=True)
    (tmp_path / "root" / "walk" / "poses.npy").write_bytes(b"poses")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "poses.npy").write_bytes(b"secret")
    return tmp_path


def read(root: TrustedRoot, path: object, *, max_bytes: int = 100) -> bytes:
    return root.read_file((*root.resolve(path, "action_path"), "poses.npy"), "poses.npy", max_bytes=max_bytes)


def refused(place: Path, root: TrustedRoot, path: object, **options: int) -> str:
    """The error's text; never one that holds a path."""
    with pytest.raises(InvalidArgumentError) as caught:
        read(root, path, **options)
    assert str(place) not in caught.value.message
    assert "secret" not in caught.value.message
    assert caught.value.field in {"action_path", "poses.npy", "lingbot_action_root"}
    assert caught.value.__cause__ is None
    return caught.value.message


def test_relative_and_absolute_paths_beneath_the_root_are_read(place: Path) -> None:
    root = TrustedRoot(place / "root")

    assert read(root, "walk") == b"poses"
    assert read(root, str(place / "root" / "walk")) == b"poses"


def test_a_root_that_is_itself_a_link_is_followed_once(place: Path) -> None:
    (place / "link").symlink_to("root")

    assert read(TrustedRoot(place / "link"), "walk") == b"poses"
    assert read(TrustedRoot(place / "link"), str(place / "link" / "walk")) == b"poses"


def test_a_link_that_stays_beneath_the_root_is_resolved_and_read(place: Path) -> None:
    (place / "root" / "latest").symlink_to("walk")

    assert TrustedRoot(place / "root").resolve("latest", "action_path") == ("walk",)
    assert read(TrustedRoot(place / "root"), "latest") == b"poses"


@pytest.mark.parametrize("path", ["../secret", "walk/../../secret", "walk/../walk", ".."])
def test_dots_that_climb_are_refused(place: Path, path: str) -> None:
    assert "beneath" in refused(place, TrustedRoot(place / "root"), path)


def test_an_absolute_path_outside_is_refused(place: Path) -> None:
    assert "beneath" in refused(place, TrustedRoot(place / "root"), str(place / "secret"))


def test_a_link_that_leads_outside_is_refused(place: Path) -> None:
    (place / "root" / "out").symlink_to(place / "secret")

    assert "beneath" in refused(place, TrustedRoot(place / "root"), "out")


@pytest.mark.parametrize("path", ["", "a\0b", None, 3, b"walk", "missing", "walk/poses.npy/x", "x" * 5000])
def test_what_is_no_path_or_leads_nowhere_is_refused(place: Path, path: object) -> None:
    refused(place, TrustedRoot(place / "root"), path)


def test_a_loop_of_links_is_refused(place: Path) -> None:
    (place / "root" / "loop").symlink_to("loop")

    refused(place, TrustedRoot(place / "root"), "loop")


def test_a_linked_file_is_refused_wherever_it_leads(place: Path) -> None:
    root = TrustedRoot(place / "root")
    (place / "root" / "linked").mkdir()
    for target in (place / "secret" / "poses.npy", place / "root" / "walk" / "poses.npy"):
        link = place / "root" / "linked" / "poses.npy"
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        assert "read safely" in refused(place, root, "linked")


def test_a_fifo_is_refused_without_waiting_for_a_writer(place: Path) -> None:
    (place / "root" / "pipe").mkdir()
    os.mkfifo(place / "root" / "pipe" / "poses.npy")

    assert "regular" in refused(place, TrustedRoot(place / "root"), "pipe")


def test_a_folder_in_place_of_the_file_is_refused(place: Path) -> None:
    (place / "root" / "folder" / "poses.npy").mkdir(parents=True)

    assert "regular" in refused(place, TrustedRoot(place / "root"), "folder")
    with pytest.raises(InvalidArgumentError, match="regular"):
        TrustedRoot(place / "root").read_file((), "image", max_bytes=1)


def test_a_component_swapped_for_a_link_after_resolution_is_not_followed(place: Path) -> None:
    root = TrustedRoot(place / "root")
    parts = root.resolve("walk", "action_path")
    (place / "root" / "walk").rename(place / "root" / "old")
    (place / "root" / "walk").symlink_to(place / "secret")

    with pytest.raises(InvalidArgumentError, match="read safely"):
        root.read_file((*parts, "poses.npy"), "poses.npy", max_bytes=100)


@pytest.mark.parametrize("swap", ["link", "folder"])
def test_a_root_that_was_swapped_is_refused(place: Path, swap: str) -> None:
    root = TrustedRoot(place / "root")
    parts = (*root.resolve("walk", "action_path"), "poses.npy")
    (place / "root").rename(place / "old")
    if swap == "link":
        (place / "root").symlink_to(place / "old")
    else:
        (place / "root" / "walk").mkdir(parents=True)
        (place / "root" / "walk" / "poses.npy").write_bytes(b"other")

    with pytest.raises(InvalidArgumentError) as caught:
        root.read_file(parts, "poses.npy", max_bytes=100)
    assert str(place) not in caught.value.message


def test_a_parent_of_the_root_that_was_swapped_is_refused(place: Path) -> None:
    (place / "above").mkdir()
    (place / "root").rename(place / "above" / "root")
    root = TrustedRoot(place / "above" / "root")
    (place / "above").rename(place / "old")
    (place / "other" / "root" / "walk").mkdir(parents=True)
    (place / "other" / "root" / "walk" / "poses.npy").write_bytes(b"other")
    (place / "above").symlink_to(place / "other")

    with pytest.raises(InvalidArgumentError, match="replaced"):
        root.read_file(("walk", "poses.npy"), "poses.npy", max_bytes=100)


def test_an_oversize_file_is_refused_before_anything_is_read(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> bytes:
        raise AssertionError("read")

    monkeypatch.setattr(trusted_root.os, "read", never)

    assert "limit is 4" in refused(place, TrustedRoot(place / "root"), "walk", max_bytes=4)


@pytest.mark.parametrize("content", [b"pos", b"poses and more"])
def test_a_file_that_changes_size_while_it_is_read_is_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    real = os.read

    def slowly(file: int, count: int) -> bytes:
        (place / "root" / "walk" / "poses.npy").write_bytes(content)
        return real(file, count)

    monkeypatch.setattr(trusted_root.os, "read", slowly)

    assert "changed" in refused(place, TrustedRoot(place / "root"), "walk")


def test_no_descriptor_is_left_open(place: Path) -> None:
    root = TrustedRoot(place / "root")
    (place / "root" / "a" / "b").mkdir(parents=True)
    before = len(os.listdir("/dev/fd"))

    for path in ("walk", "a/b", "a"):
        try:
            read(root, path)
        except InvalidArgumentError:
            continue

    assert len(os.listdir("/dev/fd")) == before


def test_a_root_must_be_a_folder_that_exists(place: Path) -> None:
    for path in (place / "missing", place / "secret" / "poses.npy"):
        with pytest.raises(ConfigurationError) as caught:
            TrustedRoot(path)
        assert caught.value.field == "lingbot_action_root"
        assert str(place) not in caught.value.message
