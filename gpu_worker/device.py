"""The device: its free memory, its queue of work, its element types."""

from __future__ import annotations

import os

import torch

from contracts.errors import ConfigurationError, InvalidArgumentError


def resolve_device(device: torch.device | str) -> torch.device:
    """A torch device from its name, as its tensors name it: "cuda" is the current one, by its index.

    ConfigurationError for one that torch does not know, or that is not here.
    """
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # the second where torch was built without it
        raise ConfigurationError(
            f"device {str(device)!r:.80} can't be used: {error}", field="device"
        ) from None


def resolve_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A floating element type from its name, for example "bfloat16"; ConfigurationError otherwise."""
    value = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(value, torch.dtype) or not value.is_floating_point:
        raise ConfigurationError(f"dtype {dtype!r:.80} is not a floating element type", field="dtype")
    return value


def free_memory_bytes(device: torch.device | None) -> int:
    """Bytes that can still be allocated: free device memory, or on CPU the system's available memory.

    Raises RuntimeError when there is no device, ConfigurationError when its memory can't be told.
    """
    if device is None:
        raise RuntimeError("the runner has no device, so its free memory is unknown")
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "cpu":
        return _available_system_bytes()
    raise ConfigurationError(
        f"free memory of {device} can't be told; set available_bytes", field="available_bytes"
    )


def _available_system_bytes() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: free pages are the best that is portable
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def synchronize(device: torch.device) -> None:
    """Waits for queued work, so that its errors surface here and its time is counted."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seeded_generator(device: torch.device, seed: int) -> torch.Generator:
    """A random state on `device`; InvalidArgumentError for a seed outside [0, 2^63)."""
    return torch.Generator(device=device).manual_seed(check_seed(seed))


def check_seed(seed: object) -> int:
    """`seed` if it is an integer in [0, 2^63), else InvalidArgumentError."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise InvalidArgumentError(f"seed must be an integer in [0, 2^63), got {seed!r:.80}", field="seed")
    return seed
