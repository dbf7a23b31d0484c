"""A capacity plan, for programs and for people."""

from __future__ import annotations

from typing import Any, Final

from contracts.capacity import CapacityPlan, MemoryModel, plan_capacity
from contracts.errors import InvalidArgumentError
from contracts.kv_spec import ARDiffusionKVCacheSpec, resolve_kv_config
from contracts.memory_size import MAX_BYTES, format_memory

CAP_LIMIT: Final = 100_000
"""The most sessions of one worker that a plan lists one by one."""

COLUMNS: Final = ("part", "pages", "bytes", "that is")

Row = tuple[str, int, int, str]


def make_plan(
    spec: ARDiffusionKVCacheSpec,
    *,
    available_bytes: int,
    fraction: float,
    itemsize: int,
    scratch_blocks_minimum: int | None = None,
) -> CapacityPlan:
    """Plans one worker.

    Raises:
        CapacityError: not even one session fits.
        InvalidArgumentError: a figure is out of any range; names the field.
    """
    config = resolve_kv_config(spec, {"gpu_memory_fraction": fraction})
    if spec.session_capacity > CAP_LIMIT:
        raise InvalidArgumentError(
            f"session_capacity {spec.session_capacity} is more than a plan lists ({CAP_LIMIT})",
            field="session_capacity",
        )
    memory = MemoryModel.of(spec, config, itemsize=itemsize, scratch_blocks_minimum=scratch_blocks_minimum)
    if memory.required_bytes(spec.session_capacity + 1) > MAX_BYTES:
        raise InvalidArgumentError(
            f"{spec.session_capacity} sessions of this spec need more than any device has", field="spec"
        )
    return plan_capacity(
        spec,
        config,
        available_bytes=available_bytes,
        itemsize=itemsize,
        scratch_blocks_minimum=scratch_blocks_minimum,
    )


def plan_to_dict(plan: CapacityPlan) -> dict[str, Any]:
    """The form that `worldline plan --json` prints."""
    memory = plan.memory
    return {
        "page_bytes": memory.page_bytes,
        "scratch_blocks": memory.scratch_blocks,
        "managed_blocks": plan.managed_blocks,
        "num_blocks": plan.num_blocks,
        "cross_attention_bytes_per_session": memory.cross_bytes_per_session,
        "required_bytes": {
            str(count): memory.required_bytes(count) for count in range(1, plan.requested_capacity + 1)
        },
        "configured_budget_bytes": plan.configured_bytes,
        "effective_budget_bytes": plan.budget_bytes,
        "capacity": plan.capacity,
    }


def plan_rows(plan: CapacityPlan) -> list[Row]:
    """What each part takes, from one page to the whole budget."""
    memory, count = plan.memory, plan.capacity
    further = plan.num_blocks - plan.managed_blocks
    sessions = _sessions(count)

    def pages(name: str, number: int) -> Row:
        return _row(name, number, number * memory.page_bytes)

    return [
        pages("one page: K and V of one latent frame", 1),
        pages("scratch, for forwards that do not stay", memory.scratch_blocks),
        pages(f"managed pages for {sessions}", plan.managed_blocks),
        _row(f"cross-attention of {sessions}", 0, count * memory.cross_bytes_per_session),
        _row(f"the model's own state of {sessions}", 0, count * memory.owned_bytes_per_session),
        _row(f"required for {sessions}", memory.scratch_blocks + plan.managed_blocks, plan.required_bytes),
        pages("further managed pages", further),
        _row("budget", plan.total_blocks, plan.budget_bytes),
        _row("budget by the fraction alone", 0, plan.configured_bytes),
        _row("available", 0, plan.available_bytes),
    ]


def plan_summary(plan: CapacityPlan) -> list[str]:
    """Capacity, and what one session more would need."""
    following = plan.capacity + 1
    needed = plan.memory.required_bytes(following)
    missing = max(0, needed - plan.budget_bytes)
    lines = [f"capacity: {_sessions(plan.capacity)} of at most {plan.requested_capacity}"]
    need = f"next session: {following} would need {needed} bytes ({format_memory(needed)})"
    if missing:
        need += f", {missing} bytes ({format_memory(missing)}) more than the budget"
        if needed > plan.available_bytes:
            need += " and more than is available"
    else:
        need += ", which the budget holds, but session_capacity is reached"
    return [*lines, need]


def _row(name: str, pages: int, count: int) -> Row:
    return name, pages, count, format_memory(count)


def _sessions(count: int) -> str:
    return "1 session" if count == 1 else f"{count} sessions"
