"""Fixed-length cross-attention K/V, published a whole cache at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypedDict

import torch

from contracts.errors import InvalidArgumentError, KVStateError
from contracts.kv_spec import ARDiffusionCrossAttentionKVSpec, ARDiffusionKVCacheSpec
from gpu_worker.kv.errors import UnknownNameError, is_known

LayerKV = tuple[torch.Tensor, torch.Tensor]


class CrossAttentionLayer(TypedDict):
    """One layer of a published cache; k and v are [1, tokens, heads, head_size]."""

    is_init: bool
    k: torch.Tensor
    v: torch.Tensor


class CrossAttentionStore:
    """The cross-attention caches of all resident sessions, keyed by session, logical branch and name.

    A cache becomes readable only once its iterable has completed; until then the previous one stays. Storage is
    allocated at the first publication.
    """

    def __init__(
        self, spec: ARDiffusionKVCacheSpec, capacity: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._num_layers = spec.num_layers
        self._branches = spec.branch_names
        self._shapes = {cache.name: _shape(cache, spec) for cache in spec.cross_attention}
        self._capacity = capacity
        self._device = device
        self._dtype = dtype
        self._sessions: dict[str, dict[tuple[str, str], list[CrossAttentionLayer]]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the caches that a branch can have."""
        return tuple(self._shapes)

    @property
    def session_ids(self) -> tuple[str, ...]:
        """Sessions that hold at least one cache."""
        return tuple(self._sessions)

    @property
    def nbytes(self) -> int:
        """Bytes held by all caches."""
        caches = (layers for session in self._sessions.values() for layers in session.values())
        return sum(layer["k"].nbytes + layer["v"].nbytes for layers in caches for layer in layers)

    def populate(
        self,
        session_id: str,
        branch: str,
        name: str,
        layer_kv: Iterable[LayerKV],
        *,
        before_publication: Callable[[], None] = lambda: None,
    ) -> None:
        """Publishes one cache from exactly `num_layers` (k, v) pairs in layer order; values are copied.

        Args:
            session_id: the world.
            branch: logical branch.
            name: of the cache.
            layer_kv: the pairs, each tensor [1, tokens, heads, head].
            before_publication: raises if the session is over by now: the iterable may have run any code.

        Raises:
            UnknownNameError: unknown branch or name.
            KVStateError: as many sessions as fit hold caches already.
            InvalidArgumentError: wrong number of layers, or something that is no pair of tensors of the right shape.
                Errors of the iterable itself pass through unchanged. Either way the previous cache stays.
        """
        shape = self._shape_of(branch, name)
        if session_id not in self._sessions and len(self._sessions) >= self._capacity:
            raise KVStateError(
                f"cross-attention caches of {self._capacity} sessions exist, there is no room for more"
            )
        _check_iterable(name, layer_kv)
        layers = list(self._copies(name, shape, layer_kv))
        if len(layers) != self._num_layers:
            raise InvalidArgumentError(
                f"cross-attention cache {name!r}: expected {self._num_layers} layers, got {len(layers)}",
                field=name,
            )
        before_publication()
        self._sessions.setdefault(session_id, {})[branch, name] = layers

    def is_populated(self, session_id: str, branch: str, name: str) -> bool:
        """Whether a complete cache can be read."""
        self._shape_of(branch, name)
        return (branch, name) in self._sessions.get(session_id, {})

    def get(self, session_id: str, branch: str, name: str) -> list[CrossAttentionLayer]:
        """One entry a layer; KVStateError before the first publication."""
        self._shape_of(branch, name)
        layers = self._sessions.get(session_id, {}).get((branch, name))
        if layers is None:
            raise KVStateError(
                f"cross-attention cache {name!r} of branch {branch!r} was read before it was populated"
            )
        return layers

    def clear(self, session_id: str, branch: str | None = None, name: str | None = None) -> None:
        """Drops a session's caches; None stands for every branch, or every name."""
        if branch is not None:
            self._check_branch(branch)
        if name is not None:
            self.check_name(name)
        kept = {
            key: layers
            for key, layers in self._sessions.pop(session_id, {}).items()
            if (branch is not None and key[0] != branch) or (name is not None and key[1] != name)
        }
        if kept:
            self._sessions[session_id] = kept

    def _shape_of(self, branch: str, name: str) -> tuple[int, ...]:
        self._check_branch(branch)
        self.check_name(name)
        return self._shapes[name]

    def _check_branch(self, branch: str) -> None:
        if not is_known(branch, self._branches):
            raise UnknownNameError(
                f"unknown KV branch {branch!r:.80}, expected one of {list(self._branches)}", field="branch"
            )

    def check_name(self, name: str) -> None:
        """UnknownNameError for a name that no cache has."""
        if not is_known(name, self._shapes):
            raise UnknownNameError(
                f"unknown cross-attention cache {name!r:.80}, expected one of {sorted(self._shapes)}",
                field="name",
            )

    def _copies(
        self, name: str, shape: tuple[int, ...], layer_kv: Iterable[LayerKV]
    ) -> Iterator[CrossAttentionLayer]:
        for index, pair in enumerate(layer_kv):
            if index == self._num_layers:
                raise InvalidArgumentError(
                    f"cross-attention cache {name!r}: expected {self._num_layers} layers, got more",
                    field=name,
                )
            k, v = _checked_pair(name, index, shape, pair)
            yield {"is_init": True, "k": self._copy(k), "v": self._copy(v)}

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, device=self._device, dtype=self._dtype).copy_(tensor.detach())


def _shape(cache: ARDiffusionCrossAttentionKVSpec, spec: ARDiffusionKVCacheSpec) -> tuple[int, ...]:
    heads = spec.num_kv_heads if cache.num_kv_heads is None else cache.num_kv_heads
    return (1, cache.num_tokens, heads, spec.head_size)


def _check_iterable(name: str, layer_kv: object) -> None:
    if not isinstance(layer_kv, Iterable) or isinstance(layer_kv, torch.Tensor):
        raise InvalidArgumentError(
            f"cross-attention cache {name!r}: expected one (k, v) pair a layer, got {type(layer_kv).__name__}",
            field=name,
        )


def _checked_pair(name: str, index: int, shape: tuple[int, ...], pair: object) -> LayerKV:
    where = f"cross-attention cache {name!r}, layer {index}"
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise InvalidArgumentError(f"{where}: expected a (k, v) pair, got {type(pair).__name__}", field=name)
    k, v = pair
    if not isinstance(k, torch.Tensor) or not isinstance(v, torch.Tensor):
        raise InvalidArgumentError(f"{where}: k and v must be tensors", field=name)
    for tensor in (k, v):
        if tensor.is_complex() or tensor.layout != torch.strided or tensor.is_meta:
            raise InvalidArgumentError(
                f"{where}: k and v must be dense tensors of real numbers, got {tensor.dtype}, {tensor.layout}, "
                f"on {tensor.device}",
                field=name,
            )
    if tuple(k.shape) != shape or tuple(v.shape) != shape:
        raise InvalidArgumentError(
            f"{where}: k/v shape must be {shape}, got {tuple(k.shape)} and {tuple(v.shape)}", field=name
        )
    return k, v
