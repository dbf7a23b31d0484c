"""flash-attn's paged kernels: the block table goes to the kernel, so no key is ever moved."""

from __future__ import annotations

from typing import Any

import torch

from gpu_worker.kv.metadata import PagedMetadata


class FlashBackend:
    """`flash_attn_with_kvcache` of the package that is installed.

    Args:
        kernel: the function.
        table: its name for the block table, which differs between releases.
    """

    name = "flash_attn"

    def __init__(self, kernel: Any, *, table: str) -> None:
        self._kernel = kernel
        self._table = table

    def attend(
        self, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, metadata: PagedMetadata
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        out: torch.Tensor = self._kernel(
            q.to(k_pages.dtype),
            k_pages,
            v_pages,
            cache_seqlens=metadata.seq_lens,
            causal=False,
            **{self._table: metadata.block_table},
        )
        return out.to(q.dtype)
