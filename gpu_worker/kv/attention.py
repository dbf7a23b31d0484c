"""Attention over paged KV with torch's own scaled dot product.

K is cached after normalisation and positional encoding, and everything visible attends to everything, so the order of
the visible keys does not matter. That is why pages that lie in one run are read in place, whatever their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name that torch code uses

from contracts.errors import KVStateError


@dataclass(frozen=True, slots=True)
class PagedMetadata:
    """What one forward reads and writes; the same tensors serve every layer.

    Args:
        slot_mapping: [seq_len] int64, slots that the current frames are written to.
        extra_slots: [extra_tokens] int64, scratch slots of action or register tokens.
        block_table: [1, width] int32, visible pages, padded with the null page to a constant width.
        seq_lens: [1] int32, tokens that are visible, extra tokens included.
        query_start_loc: [2] int32, (0, query tokens).
        max_seq_len: constant upper bound of seq_lens.
        page_ids: [pages] int64, the visible pages and those of the extra tokens behind them.
        run: (first page, pages) where they lie in one run, else None.
        num_visible: tokens to attend to.
        num_current_pages: pages at the end of the visible ones that this forward writes.
    """

    slot_mapping: torch.Tensor
    extra_slots: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    max_seq_len: int
    page_ids: torch.Tensor
    run: tuple[int, int] | None
    num_visible: int
    num_current_pages: int


def single_run(page_ids: Sequence[int]) -> tuple[int, int] | None:
    """(first, count) if the pages are one run of the pool, in whatever order; else None.

    Only the last page of extra tokens is partly filled. It is scratch behind all others, so it is the run's last too.
    """
    ids = sorted(page_ids)
    if not ids or ids[-1] - ids[0] + 1 != len(ids):
        return None
    return ids[0], len(ids)


def write_tokens(pages: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """Writes values [tokens, heads, head] at flat slots [tokens] of pages [blocks, block_size, heads, head]."""
    pages.view(-1, *pages.shape[2:]).index_copy_(0, slots, values.to(pages.dtype))


def read_visible(pages: torch.Tensor, metadata: PagedMetadata) -> torch.Tensor:
    """The visible tokens [num_visible, heads, head]: a view where the pages are one run, else a gathered copy."""
    if metadata.run is not None:
        first, count = metadata.run
        picked = pages[first : first + count]
    else:
        picked = pages.index_select(0, metadata.page_ids)
    return picked.view(-1, *pages.shape[2:])[: metadata.num_visible]


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


def check_tokens(name: str, tensor: torch.Tensor, tokens: int, heads: int, head_size: int) -> None:
    """KVStateError unless `tensor` is [1, tokens, heads, head_size]."""
    if tuple(tensor.shape) != (1, tokens, heads, head_size):
        raise KVStateError(
            f"{name} must have shape {(1, tokens, heads, head_size)} in this forward, got {tuple(tensor.shape)}",
            field=name,
        )
