"""An engine without a model, for tests of everything around one: `--engine support.noop_engine:make`.

What it makes is a digest of seed and committed ticks, so a chunk shows whether its session's memory was whole. What
goes wrong is scripted by the session's creation parameters:

    sleep_ms        each chunk takes so long
    fail_at         the chunk of that index raises (the session is dropped, as a real engine does)
    error_at        the chunk of that index comes back with an error
    metadata        fields of the returned metadata that are changed, at chunk `metadata_at` (default: at each)
    evict           session id that is dropped for room, at chunk `evict_at` (default: 0)
    release_fails   so many closes of this session raise, then they work
    reset_fails     the same for resets
    hang_at         the chunk of that index never ends
    hold_at         the same, and no other thread ever runs again
    exit_at         the chunk of that index kills the process
    frames          true: pixel frames come with each chunk
"""

import hashlib
import os
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from contracts.errors import NotResidentError
from contracts.tick import METADATA_KEY, ARDiffusionChunkMetadata, ARDiffusionTickRequest
from gpu_worker.capability import DiffusionOutput
from gpu_worker.config import WorkerSettings

DEFAULT_CAPACITY = 64
FRAMES_SHAPE = (12, 8, 8, 3)


@dataclass
class World:
    """One resident session."""

    digest: bytes
    fails: dict[str, int] = field(default_factory=dict)


class NoopEngine:
    """A `TickEngine` that costs next to nothing."""

    def __init__(self, model: str = "noop", capacity: int = DEFAULT_CAPACITY) -> None:
        self.model = model
        self.capacity = capacity
        self.on_evict: Callable[[str], None] | None = None
        self.calls: list[tuple[str, str]] = []
        self.broken: Exception | None = None
        self._worlds: OrderedDict[str, World] = OrderedDict()

    def start(self) -> None:
        self.calls.append(("start", ""))

    def execute_tick(
        self, tick: ARDiffusionTickRequest, *, params: Mapping[str, Any], seed: int
    ) -> DiffusionOutput:
        self.calls.append(("tick", tick.session_id))
        index = tick.chunk_index
        if tick.reset:
            self._worlds.pop(tick.session_id, None)
        world = self._world(tick, params, seed)
        if "evict" in params and params.get("evict_at", 0) == index:
            self._evict(params["evict"])
        if params.get("sleep_ms", 0) > 0:
            time.sleep(params["sleep_ms"] / 1000)
        self._misbehave(tick, params)
        if params.get("error_at") == index:
            self._worlds.pop(tick.session_id)
            return DiffusionOutput(error="scripted error")
        world.digest = _next(world.digest, tick)
        if tick.close_session:
            self.close_session(tick.session_id)
        return DiffusionOutput(
            payload={"latents": np.frombuffer(world.digest, np.uint8).reshape(1, 4, 2, 4)},
            frames=np.full(FRAMES_SHAPE, world.digest[0], np.uint8) if params.get("frames") else None,
            metadata={METADATA_KEY: _metadata(tick, params)},
        )

    def _misbehave(self, tick: ARDiffusionTickRequest, params: Mapping[str, Any]) -> None:
        index = tick.chunk_index
        if params.get("exit_at") == index:
            os._exit(9)
        while params.get("hang_at") == index:
            time.sleep(60)
        if params.get("hold_at") == index:
            re.fullmatch("(a|aa)+", "a" * 100 + "b")  # for years, within one call that keeps the interpreter
        if params.get("fail_at") == index:
            self._worlds.pop(tick.session_id)
            raise RuntimeError("scripted failure")

    def _world(self, tick: ARDiffusionTickRequest, params: Mapping[str, Any], seed: int) -> World:
        world = self._worlds.get(tick.session_id)
        if world is None:
            if tick.chunk_index > 0:
                raise NotResidentError(f"session {tick.session_id} is not resident", field="session_id")
            while len(self._worlds) >= self.capacity:
                self._evict(next(iter(self._worlds)))
            fails = {"close": params.get("release_fails", 0), "reset": params.get("reset_fails", 0)}
            world = self._worlds[tick.session_id] = World(hashlib.sha256(str(seed).encode()).digest(), fails)
        self._worlds.move_to_end(tick.session_id)
        return world

    def _evict(self, session_id: str) -> None:
        if self._worlds.pop(session_id, None) is not None and self.on_evict is not None:
            self.on_evict(session_id)

    def reset_session(self, session_id: str) -> None:
        self._drop("reset", session_id)

    def close_session(self, session_id: str) -> None:
        self._drop("close", session_id)

    def _drop(self, how: str, session_id: str) -> None:
        self.calls.append((how, session_id))
        world = self._worlds.get(session_id)
        if world is None:
            return
        if world.fails[how] > 0:
            world.fails[how] -= 1
            raise RuntimeError(f"scripted failure of a {how}")
        del self._worlds[session_id]

    def is_resident(self, session_id: str) -> bool:
        return session_id in self._worlds

    def resident_sessions(self) -> tuple[str, ...]:
        return tuple(self._worlds)

    def check_integrity(self) -> None:
        self.calls.append(("check_integrity", ""))
        if self.broken is not None:
            raise self.broken

    def memory(self) -> Mapping[str, int]:
        return {"capacity": self.capacity, "resident": len(self._worlds)}


def expected_digest(seed: int, *ticks: ARDiffusionTickRequest) -> bytes:
    """What the last of these ticks yields in a session of that seed."""
    digest = hashlib.sha256(str(seed).encode()).digest()
    for tick in ticks:
        digest = _next(digest, tick)
    return digest


def _next(digest: bytes, tick: ARDiffusionTickRequest) -> bytes:
    controls = [control.to_dict() for control in tick.controls]
    what = repr((tick.chunk_index, tick.applied_event_ids, tick.prompt, controls))
    return hashlib.sha256(digest + what.encode()).digest()


def _metadata(tick: ARDiffusionTickRequest, params: Mapping[str, Any]) -> dict[str, Any]:
    metadata = ARDiffusionChunkMetadata.from_tick(tick).to_dict()
    if params.get("metadata_at", tick.chunk_index) == tick.chunk_index:
        metadata.update(params.get("metadata", {}))
    return metadata


def make(settings: WorkerSettings) -> NoopEngine:
    """The factory."""
    return NoopEngine(settings.model, settings.session_capacity or DEFAULT_CAPACITY)
