"""FlexAttention over the paged pool: keys are read where they lie, whatever their order.

Its blocks of keys do not end where pages end, so the order of its sums, and with it the last bits of a result, depend
on which pages a session got. With the other backends a world is the same, bit for bit, whoever else is resident.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from gpu_worker.kv.metadata import PagedMetadata

KEYS: Final = 128
"""Keys, and queries, of one block of the kernel."""


def covering_blocks(spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """(partly, wholly) covered kernel blocks of half-open spans of slots, ascending each."""
    covered: dict[int, int] = {}
    for start, stop in spans:
        for block in range(start // KEYS, -(-stop // KEYS)):
            first, last = max(start, block * KEYS), min(stop, (block + 1) * KEYS)
            covered[block] = covered.get(block, 0) + last - first
    partly = sorted(block for block, slots in covered.items() if slots < KEYS)
    wholly = sorted(block for block, slots in covered.items() if slots == KEYS)
    return partly, wholly


class FlexBackend:
    """FlexAttention with a block mask made of the visible pages.

    Args:
        compiled: whether to compile it. Without, torch computes all scores: for tests of what is masked.
    """

    name = "flex"

    def __init__(self, *, compiled: bool = True) -> None:
        self._attention: Any = torch.compile(flex_attention) if compiled else flex_attention
        self._last: tuple[PagedMetadata, int, BlockMask] | None = None

    def attend(
        self, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, metadata: PagedMetadata
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        out = self._attention(
            q.to(k_pages.dtype).transpose(1, 2),
            k_pages.flatten(0, 1).unsqueeze(0).transpose(1, 2),
            v_pages.flatten(0, 1).unsqueeze(0).transpose(1, 2),
            block_mask=self._mask(metadata, q.shape[1], len(k_pages), q.device),
            enable_gqa=q.shape[2] != k_pages.shape[2],
        )
        transposed: torch.Tensor = out.transpose(1, 2)
        return transposed.to(q.dtype)

    def _mask(self, metadata: PagedMetadata, queries: int, pages: int, device: torch.device) -> BlockMask:
        if self._last is None or self._last[0] is not metadata or self._last[1] != queries:
            self._last = (metadata, queries, block_mask(metadata, queries, pages, device))
        return self._last[2]


def block_mask(metadata: PagedMetadata, queries: int, pages: int, device: torch.device) -> BlockMask:
    """Every query sees the visible tokens, which lie anywhere in a pool of `pages` pages."""
    size, spans = metadata.block_size, []
    shown = torch.zeros(pages, dtype=torch.int32)  # tokens that are visible at the start of each page
    left = metadata.num_visible
    for page in metadata.page_ids:
        tokens = min(size, left)
        shown[page] = tokens
        spans.append((page * size, page * size + tokens))
        left -= tokens
    shown = shown.to(device)

    def mask(_b: torch.Tensor, _h: torch.Tensor, _q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return kv % size < shown[kv // size]

    rows = -(-queries // KEYS)
    width = metadata.max_seq_len // KEYS + 2 * metadata.max_seq_len // size + 1  # constant: no recompilation
    lists = [_rows(blocks, rows, width, device) for blocks in covering_blocks(spans)]
    (partly_count, partly), (wholly_count, wholly) = lists
    made: BlockMask = BlockMask.from_kv_blocks(
        partly_count,
        partly,
        wholly_count,
        wholly,
        BLOCK_SIZE=KEYS,
        mask_mod=mask,
        seq_lengths=(queries, pages * size),
        compute_q_blocks=False,
    )
    return made


def _rows(
    blocks: Sequence[int], rows: int, width: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    count = torch.full((1, 1, rows), len(blocks), dtype=torch.int32)
    row = torch.tensor([*blocks, *[0] * (width - len(blocks))], dtype=torch.int32)
    return count.to(device), row.expand(1, 1, rows, width).contiguous().to(device)
