"""What a forward accepts: shapes, types and places, checked before anything is computed or written."""

from __future__ import annotations

import torch

from contracts.errors import InvalidArgumentError, InvalidTypeError


def check_tensor(
    name: str,
    value: object,
    shape: tuple[int | str, ...],
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`value` if it is a tensor of that shape; a size that is a word may be any from 1.

    Args:
        name: of the argument, in messages.
        value: the argument.
        shape: sizes.
        device: where it must be.
        dtype: its type; None is any.

    Raises:
        InvalidTypeError: it is no tensor.
        InvalidArgumentError: shape, type or device are wrong.
    """
    if not isinstance(value, torch.Tensor):
        raise InvalidTypeError(f"{name} must be a tensor, got {type(value).__name__}", field=name)
    found = tuple(value.shape)
    fits = len(found) == len(shape) and all(
        size >= 1 if isinstance(wanted, str) else size == wanted
        for size, wanted in zip(found, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join(map(str, shape))
        raise InvalidArgumentError(f"{name} must have shape [{wanted}], got {list(found)}", field=name)
    if value.device != device or (dtype is not None and value.dtype != dtype):
        kind = "" if dtype is None else f"{dtype} "
        raise InvalidArgumentError(
            f"{name} must be {kind}on {device}, got {value.dtype} on {value.device}", field=name
        )
    return value


def expand_timestep(name: str, value: object, count: int, device: torch.device) -> torch.Tensor:
    """A timestep, or one an item [1, count], as float64 [1, count]; errors as `check_tensor`."""
    if isinstance(value, bool) or not isinstance(value, int | float | torch.Tensor):
        raise InvalidTypeError(f"{name} must be a number or a tensor, got {type(value).__name__}", field=name)
    if not isinstance(value, torch.Tensor):
        return torch.full((1, count), float(value), dtype=torch.float64, device=device)
    if tuple(value.shape) not in {(), (1, count)}:
        raise InvalidArgumentError(
            f"{name} must be a scalar or [1, {count}], got {list(value.shape)}", field=name
        )
    return value.to(device=device, dtype=torch.float64).expand(1, count)


def check_start_frame(value: object) -> int:
    """An absolute frame index: an integer >= 0, and a bool is none."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidArgumentError(
            f"start_frame must be an integer >= 0, got {value!r:.80}", field="start_frame"
        )
    return value


def check_layers(name: str, value: object, count: int) -> None:
    """InvalidArgumentError unless `value` has one entry a layer."""
    found = len(value) if isinstance(value, list | tuple) else None
    if found != count:
        raise InvalidArgumentError(f"{name} must have {count} layers, got {found}", field=name)
