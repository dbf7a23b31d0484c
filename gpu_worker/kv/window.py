"""Which frames stay: sink and sliding window, as pure arithmetic.

table   [0 .. sink)   [sink .. sink+skipped)   [sink+skipped .. n)
        kept for ever  freed at commit          recent window
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from contracts.errors import InvalidArgumentError
from contracts.kv_spec import ARDiffusionKVConfig


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """The retention policy of one KV timeline.

    Args:
        chunk_size: tokens of one frame.
        window_chunks: recent frames kept.
        sliding_window: the same in tokens.
        sink_chunks: leading frames kept.
        reset_at_boundary: keep the sink only, after each committed frame.
    """

    chunk_size: int
    window_chunks: int
    sliding_window: int
    sink_chunks: int = 0
    reset_at_boundary: bool = False

    def __post_init__(self) -> None:
        for name in ("chunk_size", "window_chunks"):
            if getattr(self, name) <= 0:
                raise InvalidArgumentError(f"{name} must be positive, got {getattr(self, name)}", field=name)
        if self.sink_chunks < 0:
            raise InvalidArgumentError(
                f"sink_chunks must not be negative, got {self.sink_chunks}", field="sink_chunks"
            )
        if self.sliding_window != self.window_chunks * self.chunk_size:
            raise InvalidArgumentError(
                f"sliding_window must be window_chunks * chunk_size = {self.window_chunks * self.chunk_size}, "
                f"got {self.sliding_window}",
                field="sliding_window",
            )

    @classmethod
    def from_config(cls, config: ARDiffusionKVConfig) -> SlidingWindow:
        """The policy that a usable config puts in force."""
        chunk_size, window_chunks = config.require_usable()
        return cls(
            chunk_size=chunk_size,
            window_chunks=window_chunks,
            sliding_window=window_chunks * chunk_size,
            sink_chunks=config.sink_chunks,
            reset_at_boundary=config.reset_at_boundary,
        )

    @property
    def retained_blocks(self) -> int:
        """Most pages that stay after a commit, and most that a forward sees."""
        return self.sink_chunks + self.window_chunks

    def skipped_tokens(self, num_tokens: int) -> int:
        """Tokens behind the sink that `num_tokens` committed ones no longer need: whole frames only."""
        sink = self.sink_chunks * self.chunk_size
        if self.reset_at_boundary:
            return max(0, num_tokens // self.chunk_size * self.chunk_size - sink)
        return max(0, num_tokens - self.sliding_window - sink) // self.chunk_size * self.chunk_size

    def visible(self, block_ids: Sequence[int]) -> list[int]:
        """Of history and current pages in table order: all, or the sink and the most recent."""
        if len(block_ids) <= self.retained_blocks:
            return list(block_ids)
        return [*block_ids[: self.sink_chunks], *block_ids[len(block_ids) - self.window_chunks :]]
