"""The past in one tensor a layer: the plain reference that paged KV must equal, and the way to run without a pool.

history   [0 .. sink)   [.. recent)      current
          for ever      sliding          replaces itself when its start is repeated
"""

from __future__ import annotations

import torch

from contracts.errors import InvalidArgumentError, KVStateError
from gpu_worker.kv.attention import attend


class ContiguousKV:
    """Self-attention K and V of one rollout.

    Args:
        num_layers: layers.
        tokens_per_frame: tokens of a latent frame.
        sink_frames: leading frames that are always seen.
        visible_frames: frames seen in all, the sink and the current ones included.
    """

    def __init__(
        self, num_layers: int, tokens_per_frame: int, *, sink_frames: int, visible_frames: int
    ) -> None:
        self.tokens_per_frame = tokens_per_frame
        self.sink_frames = sink_frames
        self.visible_frames = visible_frames
        self.end_frame = 0
        """Absolute index of the frame that comes next."""
        self.layers = tuple(ContiguousLayer(self) for _ in range(num_layers))
        self.history_frames = 0
        self.current_frames = 0
        self._start_frame = 0
        self._last: tuple[int, int] | None = None  # start and frames of the last block that stayed
        self._update: bool | None = None

    def begin(self, start_frame: int, frames: int, *, update_cache: bool) -> tuple[ContiguousLayer, ...]:
        """Begins a forward over the block at `start_frame`; one handle a layer.

        The block follows the last one, or repeats it.

        Raises:
            InvalidArgumentError: it does neither (earlier, overlapping, or with a gap), or does not fit.
        """
        _check_count("start_frame", start_frame, 0)
        _check_count("frames", frames, 1)
        if frames > self.visible_frames - self.sink_frames:
            raise InvalidArgumentError(f"{frames} frames don't fit the window", field="frames")
        repeated = self._last == (start_frame, frames)
        if not repeated and start_frame != self.end_frame:
            raise InvalidArgumentError(self._misplaced(start_frame), field="start_frame")
        stored = min(self.end_frame, self.visible_frames)
        self.history_frames = stored - frames if repeated else stored
        self.current_frames = frames
        self._start_frame, self._update = start_frame, update_cache
        return self.layers

    def end(self) -> None:
        """Ends the forward: its block stays if it was begun with `update_cache`."""
        if self._update is None:
            raise KVStateError("no forward was begun")
        for layer in self.layers:
            layer.settle(keep=self._update)
        if self._update:
            self._last = (self._start_frame, self.current_frames)
            self.end_frame = self._start_frame + self.current_frames
        self._update = None

    def window(self, values: torch.Tensor) -> torch.Tensor:
        """Of history and current tokens [B, tokens, H, S] those that are seen."""
        most, sink = (frames * self.tokens_per_frame for frames in (self.visible_frames, self.sink_frames))
        if values.shape[1] <= most:
            return values
        return torch.cat((values[:, :sink], values[:, values.shape[1] - (most - sink) :]), dim=1)

    def _misplaced(self, start_frame: int) -> str:
        if start_frame > self.end_frame:
            return f"start_frame {start_frame} leaves a gap: the next is {self.end_frame}"
        if self._last is not None and start_frame >= self._last[0]:
            return f"start_frame {start_frame} overlaps the last block, which began at {self._last[0]}"
        return f"start_frame {start_frame} lies before the last block"


class ContiguousLayer:
    """One layer of `ContiguousKV`."""

    def __init__(self, cache: ContiguousKV) -> None:
        self._cache = cache
        self._stored: tuple[torch.Tensor, torch.Tensor] | None = None
        self._pending: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def stored(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [B, tokens, H, S] that stayed; KVStateError before the first block."""
        if self._stored is None:
            raise KVStateError("no block has stayed yet")
        return self._stored

    def write_and_attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attends from q [B, T, H, S] to what is seen of history and k, v."""
        cache = self._cache
        if k.shape != v.shape or k.shape[1] != cache.current_frames * cache.tokens_per_frame:
            raise KVStateError(
                f"k and v must have the {cache.current_frames * cache.tokens_per_frame} tokens of the block, "
                f"got {list(k.shape)} and {list(v.shape)}",
                field="k",
            )
        past = cache.history_frames * cache.tokens_per_frame
        if past:
            old_k, old_v = self.stored
            k, v = torch.cat((old_k[:, :past], k), dim=1), torch.cat((old_v[:, :past], v), dim=1)
        seen = cache.window(k), cache.window(v)
        self._pending = seen
        return attend(q, *seen)

    def settle(self, *, keep: bool) -> None:
        """Keeps or forgets what the forward has written."""
        if keep and self._pending is not None:
            self._stored = self._pending
        self._pending = None


def _check_count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidArgumentError(f"{name} must be an integer >= {least}, got {value!r:.80}", field=name)
