"""What a model says about its attention KV, and what a deployment may change of it.

A *block* is one page of paged KV and holds one latent frame. `chunk_size`, `window_chunks` and `sink_chunks` are
published names in which "chunk" means one latent frame (in tokens, and in frames).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from contracts.errors import InvalidArgumentError, InvalidTypeError


def _check_int(owner: str, name: str, value: object, minimum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise InvalidArgumentError(
            f"{owner}: {name} must be an integer >= {minimum}, got {value!r:.80}", field=name
        )


def _check_name(owner: str, name: str, value: object) -> None:
    if not isinstance(value, str) or not value.strip():
        raise InvalidArgumentError(
            f"{owner}: {name} must be a non-empty string, got {value!r:.80}", field=name
        )


def _check_bool(owner: str, name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"{owner}: {name} must be a bool, got {value!r:.80}", field=name)


def check_fraction(value: object) -> float:
    """`gpu_memory_fraction` as a float in (0, 1], else InvalidArgumentError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise InvalidArgumentError(
            f"gpu_memory_fraction must lie in (0, 1], got {value!r:.80}", field="gpu_memory_fraction"
        )
    return float(value)


@dataclass(frozen=True, slots=True)
class ARDiffusionKVBranchSpec:
    """One logical KV timeline of a session, for example one CFG branch.

    Args:
        name: what the pipeline calls it.
        local_index: the worker-local slot that holds its self-attention pages; branches that never run on the same
            worker share one.
    """

    name: str
    local_index: int

    def __post_init__(self) -> None:
        _check_name("KV branch", "name", self.name)
        _check_int("KV branch", "local_index", self.local_index, 0)


@dataclass(frozen=True, slots=True)
class ARDiffusionCrossAttentionKVSpec:
    """One named cross-attention cache of fixed length.

    Args:
        name: what the pipeline calls it, for example "text".
        num_tokens: its length.
        num_kv_heads: worker-local heads, or None for as many as self-attention has.
    """

    name: str
    num_tokens: int
    num_kv_heads: int | None = None

    def __post_init__(self) -> None:
        _check_name("cross-attention KV", "name", self.name)
        _check_int("cross-attention KV", "num_tokens", self.num_tokens, 1)
        if self.num_kv_heads is not None:
            _check_int("cross-attention KV", "num_kv_heads", self.num_kv_heads, 1)


@dataclass(frozen=True, slots=True)
class ARDiffusionKVCacheSpec:
    """The worker-local KV geometry and policy of one pipeline.

    Args:
        num_layers: self-attention layers.
        num_kv_heads: KV heads on this worker.
        head_size: width of one head.
        tokens_per_frame: tokens of one latent frame, the size of a block.
        frames_per_block: latent frames that one tick commits.
        window_frames: recent frames kept; the sink is not counted.
        kv_branches: logical branches and their slots.
        sink_frames: leading frames that are never dropped.
        cross_attention: named fixed-length caches.
        max_scratch_tokens_per_branch: most extra tokens (action, registers) beside an uncommitted tick.
        session_capacity: upper bound of resident sessions.
        model_owned_state_bytes_per_session: device bytes that the model itself keeps for a session.
        max_model_len: tokens a kernel may be tuned for; it bounds no rollout, positions grow past it.
        reset_at_boundary: after each committed frame keep the sink only.

    Raises:
        InvalidArgumentError: naming the field.
    """

    num_layers: int
    num_kv_heads: int
    head_size: int
    tokens_per_frame: int
    frames_per_block: int
    window_frames: int
    kv_branches: tuple[ARDiffusionKVBranchSpec, ...]
    sink_frames: int = 0
    cross_attention: tuple[ARDiffusionCrossAttentionKVSpec, ...] = ()
    max_scratch_tokens_per_branch: int = 0
    session_capacity: int = 1
    model_owned_state_bytes_per_session: int = 0
    max_model_len: int = 1 << 20
    reset_at_boundary: bool = False

    def __post_init__(self) -> None:
        for name in _SPEC_POSITIVE:
            _check_int("KV spec", name, getattr(self, name), 1)
        for name in _SPEC_NON_NEGATIVE:
            _check_int("KV spec", name, getattr(self, name), 0)
        _check_bool("KV spec", "reset_at_boundary", self.reset_at_boundary)
        object.__setattr__(self, "kv_branches", _check_branches(self.kv_branches))
        object.__setattr__(self, "cross_attention", _check_cross_attention(self.cross_attention))

    @property
    def num_local_kv_branches(self) -> int:
        """Worker-local self-attention slots: branches that share an index count once."""
        return max(branch.local_index for branch in self.kv_branches) + 1

    @property
    def branch_names(self) -> tuple[str, ...]:
        """Names of the logical branches, in their order."""
        return tuple(branch.name for branch in self.kv_branches)


_SPEC_POSITIVE = (
    "num_layers",
    "num_kv_heads",
    "head_size",
    "tokens_per_frame",
    "frames_per_block",
    "window_frames",
    "session_capacity",
    "max_model_len",
)
_SPEC_NON_NEGATIVE = ("sink_frames", "max_scratch_tokens_per_branch", "model_owned_state_bytes_per_session")


def _check_items(name: str, value: object, kind: type) -> tuple[Any, ...]:
    if (
        not isinstance(value, Sequence)
        or isinstance(value, str)
        or not all(isinstance(item, kind) for item in value)
    ):
        raise InvalidArgumentError(f"KV spec: {name} must be a sequence of {kind.__name__}", field=name)
    return tuple(value)


def _check_unique(name: str, names: Sequence[str]) -> None:
    if len(set(names)) != len(names):
        raise InvalidArgumentError(f"KV spec: {name} must have unique names, got {list(names)}", field=name)


def _check_branches(value: object) -> tuple[ARDiffusionKVBranchSpec, ...]:
    branches: tuple[ARDiffusionKVBranchSpec, ...] = _check_items(
        "kv_branches", value, ARDiffusionKVBranchSpec
    )
    if not branches:
        raise InvalidArgumentError("KV spec: kv_branches needs at least one branch", field="kv_branches")
    _check_unique("kv_branches", [branch.name for branch in branches])
    indices = sorted({branch.local_index for branch in branches})
    if indices != list(range(len(indices))):
        raise InvalidArgumentError(
            f"KV spec: kv_branches must use contiguous local indices from 0, got {indices}",
            field="kv_branches",
        )
    return branches


def _check_cross_attention(value: object) -> tuple[ARDiffusionCrossAttentionKVSpec, ...]:
    caches: tuple[ARDiffusionCrossAttentionKVSpec, ...] = _check_items(
        "cross_attention", value, ARDiffusionCrossAttentionKVSpec
    )
    _check_unique("cross_attention", [cache.name for cache in caches])
    return caches


@dataclass(frozen=True, slots=True)
class ARDiffusionKVConfig:
    """The KV configuration in force, spec and deployment combined.

    Args:
        enable: whether paged KV is used at all.
        chunk_size: tokens of one latent frame, the size of a block.
        window_chunks: recent frames kept.
        sink_chunks: leading frames kept.
        reset_at_boundary: after each committed frame keep the sink only.
        gpu_memory_fraction: share of the free device memory that further sessions may use, in (0, 1].
        warmup_cudagraph: run the pipeline's warm-up requests at start-up.
        reuse_history_staging: keep the gathered history of one tick in a contiguous buffer between its forwards.
        warmup_capture_reset: warm up once more after a reset of the warm-up session.
    """

    enable: bool = False
    chunk_size: int = 0
    window_chunks: int | None = None
    sink_chunks: int = 0
    reset_at_boundary: bool = False
    gpu_memory_fraction: float = 0.1
    warmup_cudagraph: bool = True
    reuse_history_staging: bool = False
    warmup_capture_reset: bool = False

    def __post_init__(self) -> None:
        for name in _CONFIG_BOOLS:
            _check_bool("KV config", name, getattr(self, name))
        for name in ("chunk_size", "sink_chunks"):
            _check_int("KV config", name, getattr(self, name), 0)
        if self.window_chunks is not None:
            _check_int("KV config", "window_chunks", self.window_chunks, 1)
        object.__setattr__(self, "gpu_memory_fraction", check_fraction(self.gpu_memory_fraction))

    @property
    def sliding_window(self) -> int | None:
        """Tokens of the recent window, None when none is set."""
        return None if self.window_chunks is None else self.window_chunks * self.chunk_size

    def require_usable(self) -> tuple[int, int]:
        """(chunk_size, window_chunks) of a config that a cache can be built from, else InvalidArgumentError."""
        if not self.enable:
            raise InvalidArgumentError(
                "KV config: enable is False, so there is no cache to build", field="enable"
            )
        if self.window_chunks is None:
            raise InvalidArgumentError("KV config: window_chunks is not set", field="window_chunks")
        if self.chunk_size <= 0:
            raise InvalidArgumentError("KV config: chunk_size must be positive", field="chunk_size")
        return self.chunk_size, self.window_chunks


_CONFIG_BOOLS = (
    "enable",
    "reset_at_boundary",
    "warmup_cudagraph",
    "reuse_history_staging",
    "warmup_capture_reset",
)


@dataclass(frozen=True, slots=True)
class ARDiffusionKVOverrides:
    """What a deployment changes. None means unset; 0 and False are values like any other.

    Raises:
        InvalidArgumentError: a value that is set is none of that field of `ARDiffusionKVConfig`; names the field.
    """

    window_chunks: int | None = None
    sink_chunks: int | None = None
    reset_at_boundary: bool | None = None
    gpu_memory_fraction: float | None = None
    warmup_cudagraph: bool | None = None
    reuse_history_staging: bool | None = None
    warmup_capture_reset: bool | None = None

    def __post_init__(self) -> None:
        ARDiffusionKVConfig(**self.values())

    def values(self) -> dict[str, Any]:
        """What is set, by its name."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if value is not None}

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any]) -> ARDiffusionKVOverrides:
        """From a deployment's raw mapping. The spec's `window_frames` and `sink_frames` may be called by these names.

        `enable` and `chunk_size` are accepted and ignored: a pipeline with paged KV always uses it, and the size of a
        block is the model's. Any other unknown key is an InvalidArgumentError naming it.
        """
        if not isinstance(raw, Mapping):
            raise InvalidTypeError(
                f"KV config must be a mapping, got {type(raw).__name__}", field="kv_config"
            )
        known = {field.name for field in fields(cls)}
        values: dict[str, Any] = {}
        for key, value in raw.items():
            name = _SPEC_NAMES.get(key, key)
            if name in _FIXED_KEYS:
                continue
            if name not in known:
                raise InvalidArgumentError(
                    f"KV config: unknown key {key!r:.80}; a deployment sets {', '.join(sorted(known))}",
                    field=str(key)[:80],
                )
            if name in values:
                raise InvalidArgumentError(f"KV config: {name} is given by both of its names", field=name)
            values[name] = value
        return cls(**values)


_FIXED_KEYS = frozenset({"enable", "chunk_size"})
_SPEC_NAMES = {"window_frames": "window_chunks", "sink_frames": "sink_chunks"}
"""What the spec calls it -> what the published configuration calls it."""


def resolve_kv_config(
    spec: ARDiffusionKVCacheSpec,
    overrides: ARDiffusionKVOverrides | Mapping[str, Any] | None = None,
) -> ARDiffusionKVConfig:
    """The config in force: what the deployment sets, otherwise what the spec says; always enabled."""
    if overrides is None:
        overrides = ARDiffusionKVOverrides()
    elif not isinstance(overrides, ARDiffusionKVOverrides):
        overrides = ARDiffusionKVOverrides.from_mapping(overrides)
    values: dict[str, Any] = {
        "window_chunks": spec.window_frames,
        "sink_chunks": spec.sink_frames,
        "reset_at_boundary": spec.reset_at_boundary,
    }
    values.update(overrides.values())
    return ARDiffusionKVConfig(enable=True, chunk_size=spec.tokens_per_frame, **values)
