"""Chooses the attention backend, once, when a runner is built.

| name         | reads pages                             | needs                                                   |
| ------------ | --------------------------------------- | ------------------------------------------------------- |
| `sdpa`       | in place where they lie together, else copied | nothing: torch on any device                      |
| `flex`       | in place, last bits depend on where     | CUDA and Triton                                         |
| `flash_attn` | in place, by block table                | CUDA, float16 or bfloat16, and one of two packages:     |
|              |                                         | `flash_attn_interface` (version 3: compute capability 9) |
|              |                                         | or `flash_attn` (2: capability 8, frames of 256 * n tokens) |
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import torch

from contracts.errors import ConfigurationError
from contracts.kv_spec import ARDiffusionKVCacheSpec, ARDiffusionKVConfig
from gpu_worker.kv.attention import AttentionBackend, SdpaBackend
from gpu_worker.kv.flash import FlashBackend

SDPA: Final = "sdpa"
_FLASH2_PAGE_TOKENS: Final = 256
_FLASH_MAX_HEAD: Final = 256


def make_attention_backend(
    name: str,
    spec: ARDiffusionKVCacheSpec,
    config: ARDiffusionKVConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> AttentionBackend:
    """The backend `name` for a pool of that geometry.

    Raises:
        ConfigurationError: there is none of that name, or it can't run here; says why.
    """
    if name not in _MAKERS:
        known = ", ".join(_MAKERS)
        raise ConfigurationError(
            f"unknown attention_backend {name!r:.80}; known: {known}", field="attention_backend"
        )
    if config.reuse_history_staging and name != SDPA:
        raise _refuse(name, "it reads pages in place, so reuse_history_staging has nothing to stage")
    return _MAKERS[name](spec, device, dtype)


def available_backends(
    spec: ARDiffusionKVCacheSpec, config: ARDiffusionKVConfig, *, device: torch.device, dtype: torch.dtype
) -> dict[str, AttentionBackend | str]:
    """Every backend by name: itself where it runs here, else why it does not."""
    found: dict[str, AttentionBackend | str] = {}
    for name in _MAKERS:
        try:
            found[name] = make_attention_backend(name, spec, config, device=device, dtype=dtype)
        except ConfigurationError as error:
            found[name] = error.message
    return found


def _refuse(name: str, why: str) -> ConfigurationError:
    return ConfigurationError(f"attention_backend {name!r} can't run here: {why}", field="attention_backend")


def _sdpa(_spec: ARDiffusionKVCacheSpec, _device: torch.device, _dtype: torch.dtype) -> AttentionBackend:
    return SdpaBackend()


def _flex(_spec: ARDiffusionKVCacheSpec, device: torch.device, _dtype: torch.dtype) -> AttentionBackend:
    if device.type != "cuda":
        raise _refuse("flex", f"it needs a CUDA device, not {device}")
    if find_spec("triton") is None:
        raise _refuse("flex", "Triton is not installed")
    from gpu_worker.kv.flex import FlexBackend

    return FlexBackend()


def _flash(spec: ARDiffusionKVCacheSpec, device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    if device.type != "cuda":
        raise _refuse("flash_attn", f"it needs a CUDA device, not {device}")
    if dtype not in (torch.float16, torch.bfloat16):
        raise _refuse("flash_attn", f"it needs float16 or bfloat16, not {dtype}")
    if spec.head_size > _FLASH_MAX_HEAD:
        raise _refuse("flash_attn", f"head_size {spec.head_size} is above {_FLASH_MAX_HEAD}")
    major = torch.cuda.get_device_capability(device)[0]
    if major == 9 and (kernel := _kernel_of("flash_attn_interface")) is not None:
        return FlashBackend(kernel, table="page_table")
    kernel = _kernel_of("flash_attn")
    if kernel is None:
        raise _refuse(
            "flash_attn", "neither flash_attn_interface nor flash_attn is installed for this device"
        )
    if major < 8:
        raise _refuse("flash_attn", f"it needs compute capability 8 or higher, not {major}")
    if spec.tokens_per_frame % _FLASH2_PAGE_TOKENS:
        raise _refuse(
            "flash_attn",
            f"version 2 takes pages of {_FLASH2_PAGE_TOKENS} * n tokens, tokens_per_frame is {spec.tokens_per_frame}",
        )
    return FlashBackend(kernel, table="block_table")


def _kernel_of(package: str) -> Any | None:
    try:
        return import_module(package).flash_attn_with_kvcache
    except (ImportError, AttributeError):
        return None


_MAKERS: Final[dict[str, Callable[..., AttentionBackend]]] = {
    SDPA: _sdpa,
    "flex": _flex,
    "flash_attn": _flash,
}
