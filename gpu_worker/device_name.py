"""Which device a worker means that leaves it to the machine."""

from __future__ import annotations


def device_of(name: str) -> str:
    """`name`, but for `auto`: a GPU where there is one."""
    if name != "auto":
        return name
    import torch  # late: another engine may do without

    return "cuda" if torch.cuda.is_available() else "cpu"
