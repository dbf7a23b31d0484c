"""Where one forward writes and what it reads: page ids, and the tensors that paged kernels want of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from contracts.capacity import NULL_BLOCK_ID
from gpu_worker.kv.block_table import slot_indices

Runs = tuple[tuple[int, int], ...]
"""(first page, pages) of stretches that lie together in the pool."""


def page_runs(page_ids: Sequence[int]) -> Runs:
    """The longest stretches of neighbouring pages, in the order given."""
    runs: list[tuple[int, int]] = []
    for page in page_ids:
        if runs and page == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
    return tuple(runs)


class PagedMetadata:
    """The pages of one forward, the same for every layer.

    Page ids are plain numbers, so that a forward which reads and writes whole runs costs the device no index tensor.
    What a paged kernel needs beyond them is made when it is first asked for, once for all layers.

    Args:
        visible: pages to attend to, in the timeline's order: sink, recent history, current frames.
        current: the pages that this forward writes, in frame order.
        extra: scratch pages of action or register tokens.
        extra_tokens: how many such tokens.
        block_size: tokens of a page.
        retained_blocks: most frames that are visible.
        device: where kernels want their tensors.
    """

    def __init__(
        self,
        *,
        visible: Sequence[int],
        current: Sequence[int],
        extra: Sequence[int],
        extra_tokens: int,
        block_size: int,
        retained_blocks: int,
        device: torch.device,
    ) -> None:
        self.page_ids = (*visible, *extra)
        self.current_ids = tuple(current)
        self.extra_ids = tuple(extra)
        self.extra_tokens = extra_tokens
        self.block_size = block_size
        self.num_visible = len(visible) * block_size + extra_tokens
        # A row of constant width keeps kernels and captured graphs independent of how far the rollout is.
        self._width = retained_blocks + max(1, len(extra))
        self._device = device
        self.read_runs = page_runs(self.page_ids)
        self.write_runs = page_runs(self.current_ids)

    @property
    def run(self) -> tuple[int, int] | None:
        """(first page, pages) where all that is visible lies together, else None."""
        return self.read_runs[0] if len(self.read_runs) == 1 else None

    @property
    def num_current_pages(self) -> int:
        """Pages that this forward writes."""
        return len(self.current_ids)

    @property
    def max_seq_len(self) -> int:
        """Constant upper bound of `seq_lens`."""
        return self._width * self.block_size

    @cached_property
    def slot_mapping(self) -> torch.Tensor:
        """[seq_len] int64, slots that the current frames are written to."""
        return self._slots(self.current_ids, len(self.current_ids) * self.block_size)

    @cached_property
    def extra_slots(self) -> torch.Tensor:
        """[extra_tokens] int64, scratch slots of action or register tokens."""
        return self._slots(self.extra_ids, self.extra_tokens)

    @cached_property
    def block_table(self) -> torch.Tensor:
        """[1, width] int32, the visible pages, padded with the null page."""
        padding = [NULL_BLOCK_ID] * (self._width - len(self.page_ids))
        return torch.tensor([[*self.page_ids, *padding]], dtype=torch.int32, device=self._device)

    @cached_property
    def seq_lens(self) -> torch.Tensor:
        """[1] int32, tokens that are visible, extra tokens included."""
        return torch.tensor([self.num_visible], dtype=torch.int32, device=self._device)

    @cached_property
    def query_start_loc(self) -> torch.Tensor:
        """[2] int32, (0, query tokens)."""
        queries = len(self.current_ids) * self.block_size + self.extra_tokens
        return torch.tensor([0, queries], dtype=torch.int32, device=self._device)

    def _slots(self, pages: Sequence[int], count: int) -> torch.Tensor:
        slots = slot_indices(pages, 0, count, self.block_size)
        return torch.tensor(slots, dtype=torch.int64, device=self._device)
