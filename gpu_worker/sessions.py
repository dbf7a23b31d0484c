"""The resident sessions: one map that owns everything of each, in order of last use."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from contracts.errors import KVStateError
from gpu_worker.capability import SupportsARDiffusionPipeline
from gpu_worker.device import seeded_generator
from gpu_worker.kv.cache import ARDiffusionKVCache
from gpu_worker.kv.state import ARDiffusionKVState

if TYPE_CHECKING:
    from gpu_worker.stepwise import SteppedRequest

logger = logging.getLogger(__name__)

Output = TypeVar("Output")


@dataclass(slots=True)
class ResidentSession:
    """What the runner holds for one session.

    Args:
        session_id: the world.
        kv: its attention KV.
        generator: its random state, which continues from tick to tick.
        last_used_s: monotonic time of its last request.
        stepped: its request, where that is run one step at a time.
    """

    session_id: str
    kv: ARDiffusionKVState
    generator: torch.Generator
    last_used_s: float
    stepped: SteppedRequest | None = None


class ResidentSessions:
    """How sessions come, are lent to the pipeline for a call, and go. They leave by `release` alone.

    Args:
        pipeline: its binding and its hooks are called.
        device: where random states live.
        capacity: sessions that fit; one more makes the least recently used one go.
    """

    def __init__(self, pipeline: SupportsARDiffusionPipeline, device: torch.device, capacity: int) -> None:
        self._pipeline = pipeline
        self._device = device
        self._capacity = capacity
        self._by_id: OrderedDict[str, ResidentSession] = OrderedDict()
        self.on_evict: Callable[[str], None] | None = None
        """Told the session id that made room; an error of it fails the request that needed the room."""

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, session_id: object) -> bool:
        return session_id in self._by_id

    @property
    def ids(self) -> tuple[str, ...]:
        """Session ids, least recently used first."""
        return tuple(self._by_id)

    def get(self, session_id: str) -> ResidentSession | None:
        """The session or None; looking is no use."""
        return self._by_id.get(session_id)

    def use(self, session_id: str) -> ResidentSession | None:
        """The session, now the most recently used, or None."""
        session = self._by_id.get(session_id)
        if session is not None:
            self._by_id.move_to_end(session_id)
            session.last_used_s = time.monotonic()
        return session

    def create(self, session_id: str, cache: ARDiffusionKVCache, seed: int) -> ResidentSession:
        """A new session at position 0, for which others go where there is no room.

        Args:
            session_id: the world.
            cache: the pool.
            seed: its random state begins with it; a bad one makes nobody go.
        """
        generator = seeded_generator(self._device, seed)
        while len(self._by_id) >= self._capacity:
            self._evict(self.ids[0])
        session = ResidentSession(
            session_id, ARDiffusionKVState(session_id, cache), generator, time.monotonic()
        )
        self._by_id[session_id] = session
        return session

    def call(self, session: ResidentSession, function: Callable[[], Output]) -> Output:
        """Runs `function` with the session's KV lent and bound; if it fails, the session is released.

        Raises:
            KVStateError: the pipeline closed the KV, which is not its own, or its binding hides errors.
            Whatever `function` and the binding raise, unchanged.
        """
        name, done = session.session_id, False
        try:
            with (
                torch.inference_mode(),
                session.kv.lend(),
                self._pipeline.bind_ar_diffusion_state(name, session.kv),
            ):
                output = function()
                done = True
            if not done:  # a context manager may swallow what is raised inside it
                raise KVStateError(
                    f"the call of session {name!r} failed, and bind_ar_diffusion_state hid why"
                )
            if session.kv.closed:
                raise KVStateError(
                    f"the pipeline closed the KV of session {name!r}: that is the runner's to do"
                )
        except BaseException:
            # It may have written half a chunk: nothing of the session can be trusted any more.
            self.release_quietly(name, "a forward exception")
            raise
        return output

    def reset(self, session_id: str) -> None:
        """Releases a session, resident or not, and calls the pipeline's reset hook; the first error is raised."""
        self._release(session_id, self._pipeline.reset_ar_diffusion_session)

    def close(self, session_id: str) -> None:
        """Releases a session, resident or not, and calls the pipeline's close hook; the first error is raised."""
        self._release(session_id, self._pipeline.close_ar_diffusion_session)

    def release_quietly(self, session_id: str, why: str) -> None:
        """Closes on a path that has an error or another session's request to go on with."""
        try:
            self.close(session_id)
        except Exception:
            logger.exception("releasing session %r after %s failed", session_id, why)

    def _release(self, session_id: str, hook: Callable[[str], None]) -> None:
        """The only way out for a session: KV and cross-attention first, then the model's own state."""
        session = self._by_id.pop(session_id, None)
        steps: list[Callable[[], None]] = [partial(hook, session_id)]
        if session is not None:
            steps.insert(0, session.kv.close)
        errors: list[Exception] = []
        for step in steps:
            try:
                step()
            except Exception as error:  # noqa: BLE001 - whatever the first step raises, the second must run
                errors.append(error)
        if errors:
            raise errors[0]

    def _evict(self, session_id: str) -> None:
        self.release_quietly(session_id, "eviction")
        logger.info("evicted session %r for room", session_id)
        if self.on_evict is not None:
            self.on_evict(session_id)

    def check_integrity(self, cache: ARDiffusionKVCache) -> None:
        """KVStateError unless pages, timelines and resident sessions agree."""
        cache.check_integrity()
        resident = set(self._by_id)
        expected = {
            f"ar::{session_id}::{branch}" for session_id in resident for branch in cache.spec.branch_names
        }
        if set(cache.request_ids) != expected:
            raise KVStateError("the KV timelines are not those of the resident sessions")
        orphans = set(cache.cross_attention.session_ids) - resident
        if orphans:
            raise KVStateError(f"cross-attention caches without a resident session: {sorted(orphans)}")
