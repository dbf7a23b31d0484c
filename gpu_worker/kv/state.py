"""The KV of one resident session, as a pipeline sees it while it is bound."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager

from contracts.errors import InvalidArgumentError, KVStateError
from gpu_worker.kv.block_table import KVRequestAdapter
from gpu_worker.kv.cache import ARDiffusionKVCache
from gpu_worker.kv.context import PagedForwardContext
from gpu_worker.kv.cross_attention import CrossAttentionLayer, LayerKV
from gpu_worker.kv.errors import FrameAlignmentError, UnknownNameError, is_known
from gpu_worker.kv.layer import BranchForwards, LayerKVHandle
from gpu_worker.kv.lease import Lease


class ARDiffusionKVState:
    """Paged self-attention and cross-attention KV of one session.

    One forward over one branch is:

        handles = state.get_kv_caches("main", seq_len=..., commit_current=...)
        state.prepare_paged_context("main")
        ... every layer calls handles[layer].write_and_attend(q, k, v) once ...
        state.commit_paged_context("main")      # only for commit_current=True

    Args:
        session_id: the world.
        cache: the worker's pool.
        adapters: one timeline a configured branch; None begins them.
    """

    def __init__(
        self,
        session_id: str,
        cache: ARDiffusionKVCache,
        adapters: Mapping[str, KVRequestAdapter] | None = None,
    ) -> None:
        expected = set(cache.spec.branch_names)
        if adapters is not None and set(adapters) != expected:
            raise InvalidArgumentError(
                f"adapters must match the KV branches {sorted(expected)}, got {sorted(adapters)}",
                field="adapters",
            )
        self.session_id = session_id
        self._cache = cache
        self._adapters = dict(cache.begin_session(session_id) if adapters is None else adapters)
        self._forwards = {branch: BranchForwards() for branch in self._adapters}
        self._handles = {
            branch: forwards.handles(cache.spec.num_layers) for branch, forwards in self._forwards.items()
        }
        self._lease = Lease(session_id)

    @property
    def closed(self) -> bool:
        """Whether the session's KV was released."""
        return self._lease.closed

    def lend(self) -> AbstractContextManager[None]:
        """Makes the state usable for one call; once it was lent, it can be used during such calls only."""
        return self._lease.lend()

    def adapter(self, branch: str) -> KVRequestAdapter:
        """The timeline of a branch; its counters may be looked at outside a call, too.

        Raises:
            KVStateError: the state is closed.
            UnknownNameError: there is no such branch.
        """
        self._lease.check_open()
        if not is_known(branch, self._adapters):
            raise UnknownNameError(
                f"unknown KV branch {branch!r:.80}, expected one of {sorted(self._adapters)}", field="branch"
            )
        return self._adapters[branch]

    def _borrowed(self, branch: str) -> KVRequestAdapter:
        self._lease.check()
        return self.adapter(branch)

    # ------------------------------------------------------------------------------------------- self-attention

    def get_kv_caches(
        self, branch: str, *, seq_len: int | None = None, commit_current: bool = False
    ) -> tuple[LayerKVHandle, ...]:
        """Begins a forward over `branch` and returns one handle a layer. Allocates nothing yet.

        Args:
            branch: logical branch.
            seq_len: tokens of the current frames; whole frames.
            commit_current: whether these frames are to stay.

        Raises:
            InvalidArgumentError: no seq_len, or more frames to commit than a tick has.
            FrameAlignmentError: seq_len is not whole frames.
            KVStateError: the branch holds pages of a commit that was prepared and never committed.
        """
        adapter = self._borrowed(branch)
        checked = self._checked_length(seq_len, commit_current)
        forwards = self._forwards[branch]
        previous = forwards.context
        if previous is not None:
            if previous.commit and previous.prepared:
                raise KVStateError(f"branch {branch!r} allocated pages for a commit that did not happen")
            previous.retire()
        forwards.context = PagedForwardContext(
            self._cache, adapter, checked, commit=commit_current, lease=self._lease
        )
        return self._handles[branch]

    def _checked_length(self, seq_len: object, commit: bool) -> int:
        if isinstance(seq_len, bool) or not isinstance(seq_len, int):
            raise InvalidArgumentError(
                f"get_kv_caches needs seq_len, the tokens of the current frames, got {seq_len!r:.80}",
                field="seq_len",
            )
        block_size, most = self._cache.block_size, self._cache.spec.frames_per_block
        if seq_len <= 0 or seq_len % block_size:
            raise FrameAlignmentError(
                f"seq_len must be frame-aligned: {seq_len} is no multiple of {block_size} tokens",
                field="seq_len",
            )
        if commit and seq_len > most * block_size:
            raise InvalidArgumentError(
                f"seq_len {seq_len} commits more than the {most} frames of a tick", field="seq_len"
            )
        return seq_len

    def prepare_paged_context(self, branch: str, *, extra_tokens: int = 0) -> PagedForwardContext:
        """Assigns pages to the forward that `get_kv_caches` began; the second time does nothing.

        Args:
            branch: logical branch.
            extra_tokens: action or register tokens that each layer passes as extra_k and extra_v.
        """
        self._borrowed(branch)
        context = self._forwards[branch].context
        if context is None:
            raise KVStateError(f"branch {branch!r} has no forward to prepare: call get_kv_caches first")
        context.prepare(extra_tokens)
        return context

    def commit_paged_context(self, branch: str) -> None:
        """Ends the forward over `branch`. Its frames are committed one by one if it was a prepared commit; a scratch
        or unprepared forward advances nothing, and without a forward nothing happens."""
        adapter = self._borrowed(branch)
        context = self._end_forward(branch)
        if context is None:
            return
        if context.commit and context.prepared:
            for _ in range(context.num_frames):
                self._cache.commit_chunk(adapter)

    # ------------------------------------------------------------------------------------------- cross-attention

    def populate_cross_attention(self, branch: str, name: str, layer_kv: Iterable[LayerKV]) -> None:
        """Publishes a named cache from one (k, v) pair a layer, each [1, tokens, heads, head]; all or nothing.

        Values are copied. An error, also one of the iterable, leaves the previous cache in place.
        """
        self._borrowed(branch)
        self._cache.cross_attention.populate(
            self.session_id, branch, name, layer_kv, before_publication=self._lease.check
        )

    def is_cross_attention_populated(self, branch: str, name: str) -> bool:
        """Whether a complete cache of that name can be read."""
        self._borrowed(branch)
        return self._cache.cross_attention.is_populated(self.session_id, branch, name)

    def get_cross_attention_kv(self, branch: str, name: str) -> list[CrossAttentionLayer]:
        """`{"is_init": True, "k", "v"}` a layer; KVStateError before it was populated."""
        self._borrowed(branch)
        return self._cache.cross_attention.get(self.session_id, branch, name)

    def clear_cross_attention(self, branch: str | None = None, name: str | None = None) -> None:
        """Drops cross-attention caches, all or those named. Self-attention pages and positions stay."""
        self._borrowed(next(iter(self._adapters)) if branch is None else branch)
        self._cache.cross_attention.clear(self.session_id, branch, name)

    # ------------------------------------------------------------------------------------------- life

    def reset(self, *, keep_cross_attention: bool | Collection[str] = False) -> None:
        """Frees all self-attention pages and starts again at position 0.

        Args:
            keep_cross_attention: True keeps every cross-attention cache, a collection of names those; the rest go.

        Raises:
            UnknownNameError: a name that no cache has; nothing was freed.
        """
        kept = self._kept_caches(keep_cross_attention)
        for branch in self._adapters:
            self._cache.reset_request(self._borrowed(branch))
        self._end_forwards()
        for name in self._cache.cross_attention.names:
            if name not in kept:
                self._cache.cross_attention.clear(self.session_id, name=name)

    def _kept_caches(self, keep: bool | Collection[str]) -> Collection[str]:
        names = self._cache.cross_attention.names
        if isinstance(keep, bool):
            return names if keep else ()
        wanted = [keep] if isinstance(keep, str) or not isinstance(keep, Collection) else list(keep)
        for name in wanted:
            self._cache.cross_attention.check_name(name)
        return wanted

    def close(self) -> None:
        """Frees everything; the second time does nothing."""
        if self.closed:
            return
        self._lease.closed = True
        self._end_forwards()
        for adapter in self._adapters.values():
            self._cache.end_request(adapter)
        self._cache.cross_attention.clear(self.session_id)

    def _end_forward(self, branch: str) -> PagedForwardContext | None:
        forwards = self._forwards[branch]
        context, forwards.context = forwards.context, None
        if context is not None:
            context.retire()
        return context

    def _end_forwards(self) -> None:
        for branch in self._forwards:
            self._end_forward(branch)
