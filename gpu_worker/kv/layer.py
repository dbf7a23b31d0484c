"""The handle that one transformer layer attends through, directly or inside a compiled graph.

A compiled graph sees one opaque operator with tensor arguments only. Layer and context are 0-dim integer tensors, so
neither another layer nor a longer history makes another graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final
from weakref import WeakValueDictionary

import torch

from contracts.errors import KVStateError
from gpu_worker.kv.attention import PagedMetadata
from gpu_worker.kv.context import PagedForwardContext

_CONTEXTS: Final[WeakValueDictionary[int, PagedForwardContext]] = WeakValueDictionary()
_CONTEXT_IDS: Final[Iterator[int]] = itertools.count()


class LayerKVHandle:
    """One layer's paged KV in one forward.

    Args:
        context: the forward's pages, shared by all layers.
        context_id: 0-dim int64 tensor, its registration.
        layer_idx: 0-dim int64 tensor.
    """

    def __init__(
        self, context: PagedForwardContext, context_id: torch.Tensor, layer_idx: torch.Tensor
    ) -> None:
        self.context = context
        self.context_id = context_id
        self.layer_idx = layer_idx

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
            return paged_write_and_attend(q, k, v, extra_k, extra_v, self.context_id, self.layer_idx)
        return self.context.write_and_attend(int(self.layer_idx), q, k, v, extra_k=extra_k, extra_v=extra_v)


def layer_handles(context: PagedForwardContext) -> list[LayerKVHandle]:
    """One handle a layer, in layer order."""
    number = next(_CONTEXT_IDS)
    _CONTEXTS[number] = context
    context_id = torch.tensor(number)
    return [LayerKVHandle(context, context_id, layer_idx) for layer_idx in context.cache.layer_indices]


# The pool is reached through the context, not through an argument, so no argument is mutated.
@torch.library.custom_op("worldline::paged_write_and_attend", mutates_args=())
def paged_write_and_attend(  # noqa: PLR0917 - an operator's schema is positional
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    extra_k: torch.Tensor | None,
    extra_v: torch.Tensor | None,
    context_id: torch.Tensor,
    layer_idx: torch.Tensor,
) -> torch.Tensor:
    """`PagedForwardContext.write_and_attend` as one operator of a compiled graph."""
    context = _CONTEXTS.get(int(context_id))
    if context is None:
        raise KVStateError("this paged context is over")
    return context.write_and_attend(int(layer_idx), q, k, v, extra_k=extra_k, extra_v=extra_v).contiguous()


@paged_write_and_attend.register_fake
def _(q: torch.Tensor, *_others: torch.Tensor | None) -> torch.Tensor:
    return q.new_empty(q.shape)
