"""Reading files that a request names, beneath a directory that only the operator may change. NumPy- and torch-free.

Two steps, so that what was checked is what is read. `resolve` says where a path leads once every link is followed, and
refuses what leads outside. `read_file` then walks there again from the root's own descriptor, component by component
and following no link at all: whatever was swapped in between is an error, not another file. No error text holds a path:
they reach people who must not learn how the machine is laid out.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from contracts.errors import ConfigurationError, InvalidArgumentError

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK the opening of a FIFO waits for a writer, for ever.
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

Parts = tuple[str, ...]
"""Components of a resolved path, relative to the root; () is the root itself."""


class TrustedRoot:
    """A directory that requests may name files beneath.

    It is identified by device and inode from now on: a root that is replaced is refused until the worker starts again.

    Args:
        path: the directory.
        setting: name of the setting it comes from, for messages.
    """

    def __init__(self, path: str | os.PathLike[str], setting: str = "lingbot_action_root") -> None:
        self._setting = setting
        try:
            self._path = Path(os.path.realpath(path, strict=True))
            found = os.stat(self._path, follow_symlinks=False)
        except (OSError, ValueError):
            raise ConfigurationError(f"{setting} does not exist or can't be read", field=setting) from None
        if not stat.S_ISDIR(found.st_mode):
            raise ConfigurationError(f"{setting} is no directory", field=setting)
        self._identity = (found.st_dev, found.st_ino)

    def resolve(self, path: object, field: str) -> Parts:
        """Where `path` leads; a relative one starts at the root.

        Raises:
            InvalidArgumentError: it is no path, does not exist, or leads outside the root.
        """
        if not isinstance(path, str) or not path or "\0" in path:
            raise InvalidArgumentError(f"{field} must be a non-empty path", field=field)
        outside = InvalidArgumentError(f"{field} must lie beneath the trusted root", field=field)
        if ".." in Path(path).parts:
            raise outside
        try:
            real = Path(os.path.realpath(self._path / path, strict=True))
        except (OSError, ValueError):
            raise InvalidArgumentError(
                f"{field} does not exist beneath the trusted root", field=field
            ) from None
        if not real.is_relative_to(self._path):
            raise outside
        return real.relative_to(self._path).parts

    def read_file(self, parts: Parts, field: str, *, max_bytes: int) -> bytes:
        """The whole of a regular file, read once.

        Args:
            parts: the file, as `resolve` gave it (or its folder's parts and a name).
            field: what it is called in messages.
            max_bytes: a larger file is refused before anything of it is read.

        Raises:
            InvalidArgumentError: it is missing, no regular file, reached through a link, too large, or changing.
        """
        if not parts:
            raise InvalidArgumentError(f"{field} is no regular file", field=field)
        try:
            with self._folder(parts[:-1]) as folder, _opened(parts[-1], _FILE, folder) as file:
                return _read(file, field, max_bytes)
        except OSError:
            raise InvalidArgumentError(f"{field} is missing or can't be read safely", field=field) from None

    @contextmanager
    def _folder(self, parts: Parts) -> Iterator[int]:
        """A descriptor of a folder beneath the root, reached without following a link."""
        with _opened(self._path, _DIRECTORY) as root:
            found = os.fstat(root)
            if (found.st_dev, found.st_ino) != self._identity:
                raise InvalidArgumentError(f"{self._setting} was replaced", field=self._setting)
            folder = root
            try:
                for part in parts:
                    parent, folder = folder, os.open(part, _DIRECTORY, dir_fd=folder)
                    if parent != root:
                        os.close(parent)
                yield folder
            finally:
                if folder != root:
                    os.close(folder)


@contextmanager
def _opened(path: str | Path, flags: int, folder: int | None = None) -> Iterator[int]:
    descriptor = os.open(path, flags, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _read(file: int, field: str, max_bytes: int) -> bytes:
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        raise InvalidArgumentError(f"{field} is no regular file", field=field)
    if found.st_size > max_bytes:
        raise InvalidArgumentError(
            f"{field} has {found.st_size} bytes, the limit is {max_bytes}", field=field
        )
    data = bytearray()
    while len(data) < found.st_size and (piece := os.read(file, found.st_size - len(data))):
        data += piece
    if len(data) != found.st_size or os.fstat(file).st_size != found.st_size:
        raise InvalidArgumentError(f"{field} changed while it was read", field=field)
    return bytes(data)
