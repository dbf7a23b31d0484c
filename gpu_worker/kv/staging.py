"""A contiguous copy of one timeline's visible history, reused by the forwards of one tick.

The denoise forwards of a tick see the same history and differ only in their current frames. With staging, each layer
gathers the history once and later forwards rewrite the tail only. It costs one window of pages a local branch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu_worker.kv.block_table import KVRequestAdapter
from gpu_worker.kv.metadata import PagedMetadata


@dataclass(frozen=True, slots=True)
class StagingKey:
    """What must be equal for staged history to be valid. The adapter is compared by identity."""

    adapter: KVRequestAdapter
    resets: int
    absolute_tokens: int
    num_computed_tokens: int
    history_ids: tuple[int, ...]
    max_seq_len: int
    seq_len: int


class HistoryStaging:
    """Staged K and V of one local branch, [layers, max visible tokens, kv_heads, head].

    Args:
        num_layers: layers to stage.
        shape: shape of one layer's buffer.
        device: where the pool lives.
        dtype: element type of the pool.
    """

    def __init__(
        self, num_layers: int, shape: tuple[int, int, int], *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._k = torch.zeros((num_layers, *shape), device=device, dtype=dtype)
        self._v = torch.zeros((num_layers, *shape), device=device, dtype=dtype)
        self._key: StagingKey | None = None
        self._staged: set[int] = set()

    @property
    def nbytes(self) -> int:
        """Bytes of both buffers."""
        return self._k.nbytes + self._v.nbytes

    @property
    def staged_layers(self) -> frozenset[int]:
        """Layers whose history is staged for the present key."""
        return frozenset(self._staged)

    def begin(self, key: StagingKey) -> None:
        """Keeps what is staged if `key` equals the last one, else forgets it."""
        if key is not self._key and key != self._key:
            self._staged.clear()
        self._key = key

    def gather(
        self, layer: int, k_pages: torch.Tensor, v_pages: torch.Tensor, metadata: PagedMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Visible K and V of one layer, [num_visible, kv_heads, head] each, from the buffer."""
        staged = layer in self._staged
        runs = metadata.write_runs if staged else metadata.read_runs
        skipped = len(metadata.page_ids) - metadata.num_current_pages if staged else 0
        for buffer, pages in ((self._k[layer], k_pages), (self._v[layer], v_pages)):
            done = skipped * metadata.block_size
            for first, count in runs:
                tokens = pages[first : first + count].flatten(0, 1)
                buffer[done : done + len(tokens)] = tokens
                done += len(tokens)
        self._staged.add(layer)
        return self._k[layer, : metadata.num_visible], self._v[layer, : metadata.num_visible]
