"""What `bench_kv.py` times: chunks over paged KV, and the same attention without it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name that torch code uses

from contracts.capacity import plan_capacity
from contracts.kv_spec import ARDiffusionKVBranchSpec, ARDiffusionKVCacheSpec, resolve_kv_config
from gpu_worker.kv.attention import SdpaBackend, read_visible
from gpu_worker.kv.cache import ARDiffusionKVCache
from gpu_worker.kv.metadata import PagedMetadata
from gpu_worker.kv.state import ARDiffusionKVState

CPU = torch.device("cpu")
HEADS, HEAD, FRAMES, SINK, WINDOW = 8, 64, 3, 3, 6


@dataclass(frozen=True)
class Tokens:
    """Random q, k, v of one chunk, [1, FRAMES * tokens, HEADS, HEAD] each."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def random(cls, tokens: int) -> Tokens:
        return cls(*torch.randn(3, 1, FRAMES * tokens, HEADS, HEAD))


class OnlyReady:
    """In place of attention: makes K and V ready to attend to, and stops there."""

    name = "ready"

    def attend(
        self, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, metadata: PagedMetadata
    ) -> torch.Tensor:
        read_visible(k_pages, metadata), read_visible(v_pages, metadata)
        return q


class PagedWorld:
    """One session on a pool that holds just that.

    Args:
        tokens: of a frame.
        layers: of the model; `chunk` runs the first.
        attends: False makes K and V ready and stops there.
    """

    def __init__(self, tokens: int, *, layers: int = 1, attends: bool = True) -> None:
        spec = ARDiffusionKVCacheSpec(
            num_layers=layers,
            num_kv_heads=HEADS,
            head_size=HEAD,
            tokens_per_frame=tokens,
            frames_per_block=FRAMES,
            window_frames=WINDOW,
            sink_frames=SINK,
            kv_branches=(ARDiffusionKVBranchSpec("main", 0),),
        )
        config = resolve_kv_config(spec, {"gpu_memory_fraction": 1.0})
        roomy = plan_capacity(spec, config, available_bytes=1 << 50, itemsize=4)
        plan = plan_capacity(spec, config, available_bytes=roomy.required_bytes, itemsize=4)
        backend = SdpaBackend() if attends else OnlyReady()
        self.cache = ARDiffusionKVCache(
            spec, config, plan, device=CPU, dtype=torch.float32, attention=backend
        )
        self.state = ARDiffusionKVState("bench", self.cache)
        self._seq_len = FRAMES * tokens

    def book_keeping(self, *, commit: bool = True) -> None:
        """All of one forward but its layers."""
        self.state.get_kv_caches("main", seq_len=self._seq_len, commit_current=commit)
        self.state.prepare_paged_context("main")
        self.state.commit_paged_context("main")

    def forward(self, tokens: Tokens, *, commit: bool) -> torch.Tensor:
        """One forward of one layer, book-keeping included."""
        handle = self.state.get_kv_caches("main", seq_len=self._seq_len, commit_current=commit)[0]
        self.state.prepare_paged_context("main")
        out = handle.write_and_attend(tokens.q, tokens.k, tokens.v)
        self.state.commit_paged_context("main")
        return out

    def move_on_to(self, chunk: int) -> PagedWorld:
        """Commits chunks of whatever the pages hold, up to that index."""
        while self.state.adapter("main").absolute_frames < chunk * FRAMES:
            self.book_keeping()
        return self


class PlainWorld:
    """The same attention on K and V that lie together already."""

    def __init__(self, tokens: int) -> None:
        shape = (1, (SINK + WINDOW) * tokens, HEADS, HEAD)
        self.k, self.v = torch.randn(shape), torch.randn(shape)

    def attend(self, tokens: Tokens) -> torch.Tensor:
        """Nothing but scaled dot product attention."""
        return F.scaled_dot_product_attention(
            tokens.q.transpose(1, 2), self.k.transpose(1, 2), self.v.transpose(1, 2)
        ).transpose(1, 2)


class ConcatenatingWorld(PlainWorld):
    """A cache as one would write it first: `torch.cat` to append, slices to drop, and the copies that this means.

    Args:
        tokens: of a frame.
        attends: False makes K and V ready and stops there.
    """

    def __init__(self, tokens: int, *, attends: bool = True) -> None:
        super().__init__(tokens)
        self._sink, self._window, self._attends = SINK * tokens, WINDOW * tokens, attends

    def _appended(self, cached: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        grown = torch.cat((cached, new), 1)
        return torch.cat((grown[:, : self._sink], grown[:, -self._window :]), 1)

    def chunk(self, tokens: Tokens) -> torch.Tensor:
        """Appends, drops, attends."""
        self.k, self.v = self._appended(self.k, tokens.k), self._appended(self.v, tokens.v)
        return self.attend(tokens) if self._attends else self.k


class ForgetfulWorld:
    """No cache: to make one chunk, all chunks before it are run again, each over its own sink and window.

    Args:
        tokens: of a frame.
        chunks: so far, the one to make included.
    """

    def __init__(self, tokens: int, chunks: int) -> None:
        self._tokens, self._chunks = tokens, chunks
        self._q, self._k, self._v = torch.randn(3, 1, HEADS, chunks * FRAMES * tokens, HEAD)

    def run_all(self) -> None:
        """Every chunk from the first on."""
        size, sink, window = FRAMES * self._tokens, SINK * self._tokens, WINDOW * self._tokens
        for chunk in range(self._chunks):
            stop = (chunk + 1) * size
            q = self._q[:, :, stop - size : stop]
            k, v = (self._seen(t, stop, sink, window) for t in (self._k, self._v))
            F.scaled_dot_product_attention(q, k, v)

    @staticmethod
    def _seen(past: torch.Tensor, stop: int, sink: int, window: int) -> torch.Tensor:
        if stop <= sink + window:
            return past[:, :, :stop]
        return torch.cat((past[:, :, :sink], past[:, :, stop - window : stop]), 2)
