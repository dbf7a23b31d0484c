"""Drives one pipeline on a pool of its own, tick by tick, the way a worker does."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from contracts.capacity import MemoryModel
from contracts.kv_spec import ARDiffusionKVCacheSpec, resolve_kv_config
from contracts.tick import ARDiffusionTickRequest
from gpu_worker.capability import DiffusionOutput, check_pipeline
from gpu_worker.conformance.probe import Probe
from gpu_worker.conformance.subject import Subject, ViolationError, require
from gpu_worker.device import free_memory_bytes
from gpu_worker.encoding import encode_frames, encode_output
from gpu_worker.engine import ARDiffusionEngine
from gpu_worker.runner import ARDiffusionModelRunner, RunnerOptions

WANTED_CAPACITY: Final = 2
BEYOND_WINDOW: Final = 3
"""Chunks that a rollout goes on for once the window is full."""


@dataclass(frozen=True, slots=True)
class Made:
    """One chunk: the tick it was asked with, what came back, and a digest of its bytes."""

    tick: ARDiffusionTickRequest
    output: DiffusionOutput
    digest: str


class Bench:
    """Sessions of one pipeline; as many are resident as it allows, two at most.

    Args:
        subject: how to run it.
        pipeline: what to run.
        name: begins the ids of its sessions, so that no check meets the sessions of another.
        steps: run ticks through the pipeline's step functions; its calls are then not probed.
    """

    def __init__(self, subject: Subject, pipeline: object, name: str, *, steps: bool = False) -> None:
        checked, self.spec = check_pipeline(pipeline)
        self.subject = subject
        self.name = name
        self.probe = Probe(checked)
        self.capacity, available_bytes = _room(self.spec, subject)
        self.runner = ARDiffusionModelRunner(
            checked if steps else self.probe,
            device=subject.device,
            dtype=subject.dtype,
            options=RunnerOptions(
                kv={"gpu_memory_fraction": 1.0},
                session_capacity=self.capacity,
                available_bytes=available_bytes,
                step_execution=steps,
            ),
        )
        self.runner.load()
        self._engine = ARDiffusionEngine(name, self.runner)
        self._next_chunk: dict[str, int] = {}

    @property
    def prompt(self) -> str:
        return self.subject.prompts[0]

    @property
    def chunks_past_window(self) -> int:
        """Chunks after which the window has moved on several times."""
        retained = self.spec.sink_frames + self.spec.window_frames
        return -(-retained // self.spec.frames_per_block) + BEYOND_WINDOW

    def session(self, label: str) -> str:
        """A session id of this check."""
        return f"conformance.{self.name}.{label}"

    def tick(
        self, session_id: str, *, seed: int = 1, prompt: str | None = None, event_ids: Sequence[int] = ()
    ) -> Made:
        """Generates the session's next chunk; raises what the forward raises."""
        tick = self.tick_of(session_id, prompt=prompt, event_ids=event_ids)
        output = self._engine.execute_tick(tick, params=self.subject.params, seed=seed)
        if output.error is not None:
            self.restarts(session_id)
            raise ViolationError(f"chunk {tick.chunk_index} came back with an error: {output.error}")
        self._next_chunk[session_id] = tick.chunk_index + 1
        return Made(tick, output, _digest(output))

    def tick_of(
        self, session_id: str, *, prompt: str | None = None, event_ids: Sequence[int] = ()
    ) -> ARDiffusionTickRequest:
        """The session's next tick."""
        index = self._next_chunk.get(session_id, 0)
        asked = self.prompt if prompt is None else prompt
        return ARDiffusionTickRequest(
            session_id,
            f"ar-{session_id}-{index}-{index:032x}",
            index,
            tuple(event_ids),
            asked,
            self.subject.controls(asked),
        )

    def run(self, session_id: str, count: int, *, seed: int = 1) -> list[str]:
        """Digests of the session's next `count` chunks."""
        return [self.tick(session_id, seed=seed).digest for _ in range(count)]

    def alone(self, label: str, count: int, *, seed: int = 1) -> list[str]:
        """Digests of a whole session that has the pipeline to itself."""
        session_id = self.session(label)
        digests = self.run(session_id, count, seed=seed)
        self.close(session_id)
        return digests

    def close(self, session_id: str) -> None:
        """Releases a session."""
        self.restarts(session_id)
        self.runner.close_session(session_id)

    def close_all(self) -> None:
        """Releases every resident session."""
        for session_id in self.runner.session_ids:
            self.close(session_id)

    def reset(self, session_id: str) -> None:
        """Releases a session that starts again."""
        self.restarts(session_id)
        self.runner.reset_session(session_id)

    def restarts(self, session_id: str) -> None:
        """The session's next tick is chunk 0."""
        self._next_chunk.pop(session_id, None)

    @property
    def free_pages(self) -> int:
        """Managed pages that no session holds."""
        return self.runner.cache.pool.num_free

    def require_all_free(self, when: str) -> None:
        """ViolationError unless every page is free and accounted for."""
        self.runner.check_integrity()
        held = self.runner.cache.pool.num_usable - self.free_pages
        require(held == 0, f"{held} KV pages are still held {when}")


def _room(spec: ARDiffusionKVCacheSpec, subject: Subject) -> tuple[int, int]:
    """(sessions, bytes of exactly that many)."""
    memory = MemoryModel.of(spec, resolve_kv_config(spec), itemsize=subject.dtype.itemsize)
    capacity = min(WANTED_CAPACITY, spec.session_capacity)
    if capacity > 1 and memory.required_bytes(capacity) > free_memory_bytes(subject.device):
        capacity = 1
    return capacity, memory.required_bytes(capacity)


def _digest(output: DiffusionOutput) -> str:
    digest = hashlib.sha256(encode_output(output).payload)
    if output.frames is not None:
        digest.update(encode_frames(output.frames))
    return digest.hexdigest()


def float_tensors(output: DiffusionOutput) -> dict[str, torch.Tensor]:
    """The payload's values that can be other than finite, by name."""
    found: dict[str, torch.Tensor] = {}
    for name, value in output.payload.items():
        tensor = _as_tensor(value)
        if tensor is not None and (tensor.is_floating_point() or tensor.is_complex()):
            found[name] = tensor
    return found


def _as_tensor(value: Any) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return value
    return None if isinstance(value, bytes | bytearray | memoryview) else torch.as_tensor(value)
