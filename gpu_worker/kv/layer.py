"""The handle that one transformer layer attends through, directly or inside a compiled graph.

A compiled graph sees one opaque operator with tensor arguments only. Layer and branch are 0-dim integer tensors, so
neither another layer nor a longer history makes another graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache as cached
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

import torch

from contracts.errors import KVStateError

if TYPE_CHECKING:
    from gpu_worker.kv.context import PagedForwardContext
    from gpu_worker.kv.metadata import PagedMetadata

_BRANCHES: Final[WeakValueDictionary[int, BranchForwards]] = WeakValueDictionary()
_NUMBERS: Final[Iterator[int]] = itertools.count()


class BranchForwards:
    """The forwards over one branch of one session, one after the other.

    Handles reach the forward under way through it, so they are made once a session and cost a chunk nothing.
    """

    def __init__(self) -> None:
        self.context: PagedForwardContext | None = None
        self._number = next(_NUMBERS)
        _BRANCHES[self._number] = self

    def current(self) -> PagedForwardContext:
        """The forward under way; KVStateError when there is none."""
        if self.context is None:
            raise KVStateError("the branch has no forward under way: its last paged context is over")
        return self.context

    def handles(self, num_layers: int) -> tuple[LayerKVHandle, ...]:
        """One handle a layer, in layer order."""
        branch_id = torch.tensor(self._number)
        return tuple(LayerKVHandle(self, branch_id, _layer_index(layer)) for layer in range(num_layers))


@cached
def _layer_index(layer: int) -> torch.Tensor:
    # The same object for all sessions: it lives on the host, and nobody writes it.
    return torch.tensor(layer)


class LayerKVHandle:
    """One layer's paged KV, in whatever forward is under way over its branch.

    Args:
        forwards: the branch.
        branch_id: 0-dim int64 tensor, its registration.
        layer_idx: 0-dim int64 tensor.
    """

    def __init__(self, forwards: BranchForwards, branch_id: torch.Tensor, layer_idx: torch.Tensor) -> None:
        self._forwards = forwards
        self.branch_id = branch_id
        self.layer_idx = layer_idx

    @property
    def context(self) -> PagedForwardContext:
        """The forward under way over the branch, shared by all its layers."""
        return self._forwards.current()

    @property
    def metadata(self) -> PagedMetadata:
        """The forward's pages and slots; KVStateError before `prepare_paged_context`."""
        return self.context.metadata

    def write_and_attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        extra_k: torch.Tensor | None = None,
        extra_v: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes k and v of the current frames, then attends; see `PagedForwardContext.write_and_attend`.

        Args:
            q: [1, queries, heads, head].
            k: [1, seq_len, kv_heads, head], after norm and positional encoding.
            v: as k.
            extra_k: [1, extra tokens, kv_heads, head] of action or register tokens, or None.
            extra_v: as extra_k.

        Returns:
            [1, queries, heads, head].
        """
        if torch.compiler.is_compiling():
            return paged_write_and_attend(q, k, v, extra_k, extra_v, self.branch_id, self.layer_idx)
        return self.context.write_and_attend(int(self.layer_idx), q, k, v, extra_k=extra_k, extra_v=extra_v)


# The pool is reached through the branch, not through an argument, so no argument is mutated; see below for what is.
@torch.library.custom_op("worldline::paged_write_and_attend", mutates_args=())
def paged_write_and_attend(  # noqa: PLR0917 - an operator's schema is positional
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    extra_k: torch.Tensor | None,
    extra_v: torch.Tensor | None,
    branch_id: torch.Tensor,
    layer_idx: torch.Tensor,
) -> torch.Tensor:
    """`LayerKVHandle.write_and_attend` as one operator of a compiled graph."""
    forwards = _BRANCHES.get(int(branch_id))
    if forwards is None:
        raise KVStateError("the session of this branch is over")
    context = forwards.current()
    return context.write_and_attend(int(layer_idx), q, k, v, extra_k=extra_k, extra_v=extra_v).contiguous()


@paged_write_and_attend.register_fake
def _(q: torch.Tensor, *_others: torch.Tensor | None) -> torch.Tensor:
    return q.new_empty(q.shape)


# What it writes is no output: without this a compiler drops the operator of a layer whose output nobody reads.
torch.fx.node.has_side_effect(torch.ops.worldline.paged_write_and_attend.default)
