"""Counts where a host waits for its device: values read back, by the code that reads them.

On the CPU every tensor is host memory, so nothing waits; but the calls that would are the same ones.
"""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from support.tree import REPOSITORY

READING = frozenset(
    {"item", "tolist", "numpy", "cpu", "equal", "nonzero", "is_nonzero", "allclose"}
    | {f"__{name}__" for name in ("array", "bool", "complex", "contains", "float", "index", "int")}
)
READING_OPERATORS = (
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::nonzero",
)


class DeviceReads(TorchFunctionMode):
    """While it is entered, `found` gets "file function" of each read by Python code, and `operators` the rest.

    Args:
        host: files whose tensors are small ones that are kept off the device; as in "gpu_worker/kv/layer.py".
    """

    def __init__(self, *, host: Iterable[str] = ()) -> None:
        super().__init__()
        self.found: list[str] = []
        self._host = frozenset(host)
        self._operators = _Operators()

    @property
    def operators(self) -> list[str]:
        """Operators that read while no Python code asked for it: a library's, inside."""
        return self._operators.found

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name not in READING:
            return func(*args, **(kwargs or {}))
        file = _caller(sys._getframe(1))
        if file not in self._host:
            self.found.append(f"{file} {name}")
        with self._operators.ignored():
            return func(*args, **(kwargs or {}))

    def __enter__(self) -> "DeviceReads":
        super().__enter__()
        self._operators.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._operators.__exit__(kind, error, traceback)
        super().__exit__(kind, error, traceback)


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._asked_for = 0

    def ignored(self) -> "_Ignored":
        return _Ignored(self)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self._asked_for and _reads(func.name(), args):
            self.found.append(func.name())
        return func(*args, **(kwargs or {}))


def _reads(operator: str, args: tuple[Any, ...]) -> bool:
    if operator.startswith(("aten::index.", "aten::index_put")):  # a mask has to be counted
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    return operator.startswith(READING_OPERATORS)


class _Ignored:
    def __init__(self, operators: _Operators) -> None:
        self._operators = operators

    def __enter__(self) -> None:
        self._operators._asked_for += 1

    def __exit__(self, *_: object) -> None:
        self._operators._asked_for -= 1


def _caller(frame: FrameType | None) -> str:
    """The file that asked: below the repository, else by its name alone."""
    while frame is not None and "torch/" in frame.f_code.co_filename.replace("\\", "/"):
        frame = frame.f_back
    if frame is None:
        return "?"
    path = Path(frame.f_code.co_filename)
    inside = REPOSITORY in path.parents and ".venv" not in path.parts
    return str(path.relative_to(REPOSITORY)) if inside else path.name
