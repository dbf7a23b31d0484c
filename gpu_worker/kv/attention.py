"""Attention over paged KV: writing, reading, and torch's own scaled dot product.

K is cached after normalisation and positional encoding, and everything visible attends to everything, so attention
needs no positions. Keys are still read in the timeline's order: sums of floating-point numbers depend on their order,
and a session's results must not depend on which pages it happened to get.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - the name that torch code uses

from contracts.errors import KVStateError
from gpu_worker.kv.metadata import PagedMetadata


class AttentionBackend(Protocol):
    """How a layer attends to its visible pages; chosen once, when the runner is built."""

    name: str

    def attend(
        self, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, metadata: PagedMetadata
    ) -> torch.Tensor:
        """Full attention of q to the visible tokens.

        Args:
            q: [1, queries, heads, head].
            k_pages: [blocks, block_size, kv_heads, head], the whole pool of a layer; heads is a multiple of kv_heads.
            v_pages: as k_pages.
            metadata: which pages are visible.

        Returns:
            [1, queries, heads, head].
        """
        ...


class SdpaBackend:
    """`torch.nn.functional.scaled_dot_product_attention`, on any device.

    Visible pages that lie together are read in place; else they are gathered first.
    """

    name = "sdpa"

    def attend(
        self, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, metadata: PagedMetadata
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        keys, values = read_visible(k_pages, metadata), read_visible(v_pages, metadata)
        return attend(q, keys.unsqueeze(0), values.unsqueeze(0))


def write_frames(pages: torch.Tensor, metadata: PagedMetadata, values: torch.Tensor) -> None:
    """Writes the current frames [seq_len, kv_heads, head] to their pages, one copy a run."""
    frames = values.unflatten(0, (metadata.num_current_pages, metadata.block_size))
    done = 0
    for first, count in metadata.write_runs:
        pages[first : first + count].copy_(frames[done : done + count])
        done += count


def write_extra(pages: torch.Tensor, metadata: PagedMetadata, values: torch.Tensor) -> None:
    """Writes action or register tokens [extra_tokens, kv_heads, head] to scratch, which is one run."""
    start = metadata.extra_ids[0] * metadata.block_size
    pages.flatten(0, 1)[start : start + metadata.extra_tokens].copy_(values)


def read_visible(pages: torch.Tensor, metadata: PagedMetadata) -> torch.Tensor:
    """The visible tokens [num_visible, kv_heads, head]: a view where the pages are one run, else a gathered copy."""
    runs = [pages[first : first + count] for first, count in metadata.read_runs]
    picked = runs[0] if len(runs) == 1 else torch.cat(runs)
    return picked.flatten(0, 1)[: metadata.num_visible]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False) -> torch.Tensor:
    """Full attention.

    Args:
        q: [batch, queries, heads, head].
        k: [batch, keys, kv_heads, head]; heads is a multiple of kv_heads.
        v: as k.
        causal: only False exists: frames of a chunk see each other, and history lies before all of them.

    Returns:
        [batch, queries, heads, head].
    """
    if causal:
        raise NotImplementedError("attention over paged KV is never causal inside a chunk")
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.to(q.dtype).transpose(1, 2),
        v.to(q.dtype).transpose(1, 2),
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


def check_tensor(name: str, value: object, device: torch.device) -> torch.Tensor:
    """`value` if it is a floating tensor on `device`, else KVStateError naming it."""
    if not isinstance(value, torch.Tensor):
        raise KVStateError(f"{name} must be a tensor, got {type(value).__name__}", field=name)
    if not value.is_floating_point():
        raise KVStateError(f"{name} must hold floating-point numbers, got {value.dtype}", field=name)
    if value.device != device:
        raise KVStateError(f"{name} must be on {device}, got {value.device}", field=name)
    return value


def check_tokens(name: str, value: object, shape: tuple[int, ...], device: torch.device) -> None:
    """KVStateError unless `value` is a floating tensor of that shape on `device`."""
    tensor = check_tensor(name, value, device)
    if tuple(tensor.shape) != shape:
        raise KVStateError(
            f"{name} must have shape {shape} in this forward, got {tuple(tensor.shape)}", field=name
        )


def check_query(value: object, kv_heads: int, head_size: int, device: torch.device) -> None:
    """KVStateError unless `value` is [1, queries, heads, head_size] with heads a multiple of kv_heads."""
    q = check_tensor("q", value, device)
    if (
        q.dim() != 4
        or q.shape[0] != 1
        or q.shape[1] == 0
        or q.shape[3] != head_size
        or q.shape[2] == 0
        or q.shape[2] % kv_heads
    ):
        raise KVStateError(
            f"q must have shape (1, queries, a multiple of {kv_heads} heads, {head_size}) in this forward, "
            f"got {tuple(q.shape)}",
            field="q",
        )
