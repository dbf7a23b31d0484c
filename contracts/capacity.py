"""How many sessions fit on a device: bytes and page counts, before any weight is loaded.

    required(c) = scratch + managed pages(c) + c * (cross-attention + model-owned state)
    budget      = max(available * gpu_memory_fraction, required(1))

Capacity is the largest c, up to the cap, whose required(c) fits the budget. What is left becomes further pages.

    page id    0      1 .. num_blocks-1          num_blocks .. total_blocks-1
    owner      null   managed: sink and window   scratch: uncommitted forwards, one range a local branch
"""

from __future__ import annotations

from dataclasses import dataclass

from contracts.errors import CapacityError, InvalidArgumentError
from contracts.kv_spec import ARDiffusionKVCacheSpec, ARDiffusionKVConfig, check_fraction
from contracts.memory_size import MAX_BYTES

NULL_BLOCK_ID = 0
_SPARE_BLOCKS = 2
"""The null page, and one page of slack."""


def _ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


def _positive(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise InvalidArgumentError(f"{name} must be a positive integer, got {value!r:.80}", field=name)
    return value


def page_bytes(spec: ARDiffusionKVCacheSpec, itemsize: int) -> int:
    """Bytes of one block: K and V of one latent frame in every layer."""
    _positive("itemsize", itemsize)
    return 2 * spec.tokens_per_frame * spec.num_kv_heads * spec.head_size * itemsize * spec.num_layers


def compute_num_blocks(available_bytes: int, gpu_memory_fraction: float, page_size_bytes: int) -> int:
    """Whole pages in a share of the memory; never negative."""
    fraction = check_fraction(gpu_memory_fraction)
    _positive("page_size_bytes", page_size_bytes)
    return max(0, _share(available_bytes, fraction) // page_size_bytes)


def _share(available_bytes: int, fraction: float) -> int:
    """Whole bytes of a share; rounding makes none of it more than there is."""
    return min(available_bytes, int(available_bytes * fraction))


def scratch_blocks_per_branch(spec: ARDiffusionKVCacheSpec, minimum: int | None = None) -> int:
    """Scratch pages of one local branch.

    Args:
        spec: needs room for one uncommitted tick and its extra tokens beside it.
        minimum: the deployment's setting `AR_DIFFUSION_KV_SCRATCH_BLOCKS_PER_BRANCH`; it can only increase the count.
    """
    derived = spec.frames_per_block + _ceil_div(spec.max_scratch_tokens_per_branch, spec.tokens_per_frame)
    return derived if minimum is None else max(derived, _scratch_minimum(minimum))


def _scratch_minimum(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidArgumentError(
            f"AR_DIFFUSION_KV_SCRATCH_BLOCKS_PER_BRANCH must be an integer >= 0, got {value!r:.80}",
            field="AR_DIFFUSION_KV_SCRATCH_BLOCKS_PER_BRANCH",
        )
    return value


def cross_attention_bytes_per_session(spec: ARDiffusionKVCacheSpec, itemsize: int) -> int:
    """Bytes of all cross-attention caches of a session. Logical branches count, whatever slot they share."""
    tokens_times_heads = sum(
        cache.num_tokens * (spec.num_kv_heads if cache.num_kv_heads is None else cache.num_kv_heads)
        for cache in spec.cross_attention
    )
    return 2 * len(spec.kv_branches) * tokens_times_heads * spec.head_size * itemsize * spec.num_layers


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """The cost of sessions on one worker, every term of `required(c)`."""

    page_bytes: int
    scratch_blocks_per_branch: int
    staging_blocks: int
    local_branches: int
    retained_blocks_per_session: int
    frames_per_block: int
    cross_bytes_per_session: int
    owned_bytes_per_session: int

    @classmethod
    def of(
        cls,
        spec: ARDiffusionKVCacheSpec,
        config: ARDiffusionKVConfig,
        *,
        itemsize: int,
        scratch_blocks_minimum: int | None = None,
    ) -> MemoryModel:
        """The terms for `spec` under the window and sink that `config` puts in force."""
        _, window = config.require_usable()
        retained = config.sink_chunks + window
        return cls(
            page_bytes=page_bytes(spec, itemsize),
            scratch_blocks_per_branch=scratch_blocks_per_branch(spec, scratch_blocks_minimum),
            staging_blocks=spec.num_local_kv_branches * retained if config.reuse_history_staging else 0,
            local_branches=spec.num_local_kv_branches,
            retained_blocks_per_session=retained,
            frames_per_block=spec.frames_per_block,
            cross_bytes_per_session=cross_attention_bytes_per_session(spec, itemsize),
            owned_bytes_per_session=spec.model_owned_state_bytes_per_session,
        )

    @property
    def scratch_blocks(self) -> int:
        """Scratch pages of all local branches."""
        return self.local_branches * self.scratch_blocks_per_branch

    def managed_blocks(self, capacity: int) -> int:
        """Pages that `capacity` sessions and one tick in flight need at least."""
        return (
            self.local_branches * (capacity * self.retained_blocks_per_session + self.frames_per_block)
            + _SPARE_BLOCKS
        )

    def fixed_bytes(self, capacity: int) -> int:
        """Everything but managed pages: scratch, staging, cross-attention, model-owned state."""
        per_session = self.cross_bytes_per_session + self.owned_bytes_per_session
        return (self.scratch_blocks + self.staging_blocks) * self.page_bytes + capacity * per_session

    def required_bytes(self, capacity: int) -> int:
        """`required(capacity)`."""
        _positive("capacity", capacity)
        return self.fixed_bytes(capacity) + self.managed_blocks(capacity) * self.page_bytes


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """What is allocated on a device of `available_bytes`.

    `managed_blocks` is the minimum for `capacity` sessions; `num_blocks` is what the budget allows and what is
    allocated, the null page included.
    """

    memory: MemoryModel
    available_bytes: int
    configured_bytes: int
    budget_bytes: int
    requested_capacity: int
    capacity: int
    managed_blocks: int
    num_blocks: int

    @property
    def total_blocks(self) -> int:
        """Managed and scratch pages together."""
        return self.num_blocks + self.memory.scratch_blocks

    @property
    def required_bytes(self) -> int:
        """`required(capacity)` of the chosen capacity."""
        return self.memory.required_bytes(self.capacity)

    @property
    def planned_bytes(self) -> int:
        """Bytes once everything is allocated and every session is resident."""
        return self.memory.fixed_bytes(self.capacity) + self.num_blocks * self.memory.page_bytes


def plan_capacity(
    spec: ARDiffusionKVCacheSpec,
    config: ARDiffusionKVConfig,
    *,
    available_bytes: int,
    itemsize: int,
    requested_capacity: int | None = None,
    scratch_blocks_minimum: int | None = None,
) -> CapacityPlan:
    """Plans the pool of one worker.

    Args:
        spec: the pipeline's geometry.
        config: window, sink and memory fraction in force.
        available_bytes: free bytes of the device.
        itemsize: bytes of one KV element.
        requested_capacity: resident sessions wanted; None, or more than the spec's cap, means the cap.
        scratch_blocks_minimum: see `scratch_blocks_per_branch`.

    Raises:
        CapacityError: not even one session fits.
        InvalidArgumentError: an argument is out of range; names it.
    """
    _check_available(available_bytes)
    memory = MemoryModel.of(spec, config, itemsize=itemsize, scratch_blocks_minimum=scratch_blocks_minimum)
    requested = spec.session_capacity
    if requested_capacity is not None:
        requested = min(requested, _positive("session_capacity", requested_capacity))
    smallest = memory.required_bytes(1)
    if smallest > available_bytes:
        raise CapacityError(
            f"cannot fit one session on the device: available={available_bytes} bytes, required={smallest} bytes",
            available_bytes=available_bytes,
            required_bytes=smallest,
        )
    configured = _share(available_bytes, config.gpu_memory_fraction)
    budget = max(configured, smallest)
    # required() is affine in the number of sessions, so the largest that fits is one division away.
    per_session = memory.required_bytes(2) - smallest
    capacity = min(requested, 1 + (budget - smallest) // per_session)
    return CapacityPlan(
        memory=memory,
        available_bytes=available_bytes,
        configured_bytes=configured,
        budget_bytes=budget,
        requested_capacity=requested,
        capacity=capacity,
        managed_blocks=memory.managed_blocks(capacity),
        num_blocks=(budget - memory.fixed_bytes(capacity)) // memory.page_bytes,
    )


def _check_available(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value > MAX_BYTES:
        raise InvalidArgumentError(
            f"available_bytes must be an integer of at most {MAX_BYTES}, got {value!r:.80}",
            field="available_bytes",
        )
