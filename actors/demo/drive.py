"""Drives the demo's session: create, let it run (or go chunk by chunk), watch, close."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from actors.client import SessionClient
from actors.demo.producer import Producer
from actors.demo.walk import FIRST_PROMPT, PACE_MS, Scene, Walk
from contracts.errors import error_from_dict
from contracts.lifecycle import Status
from contracts.payloads import decode_frames
from contracts.state import CommittedChunk

SESSION_ID = "demo"
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asked for."""

    chunks: int = 12
    seed: int = 7
    model: str = "reference"
    lockstep: bool = False
    keys: bool = True


@dataclass(frozen=True, slots=True)
class DemoChunk:
    """A committed chunk, what held while it was made, and its pixel frames, uint8 [F, H, W, 3]."""

    chunk: CommittedChunk
    keys: tuple[str, ...]
    prompt: str
    switched: bool
    frames: npt.NDArray[np.uint8] | None

    @property
    def tick_ms(self) -> int:
        """How long the tick took at the worker, its wait there included."""
        return self.chunk.queued_ms + self.chunk.executed_ms

    def to_dict(self) -> dict[str, Any]:
        """The form that `--json` prints."""
        return {
            "index": self.chunk.chunk_index,
            "sha256": self.chunk.sha256,
            "applied_event_ids": list(self.chunk.applied_event_ids),
            "keys": list(self.keys),
            "prompt": self.prompt,
            "queued_ms": self.chunk.queued_ms,
            "executed_ms": self.chunk.executed_ms,
            "tick_ms": self.tick_ms,
            "accepted_to_applied_ms": self.chunk.accepted_to_applied_ms,
        }


async def drive(url: str, options: Options, walk: Walk, show: Callable[[DemoChunk], None]) -> list[DemoChunk]:
    """The whole life of one session; `show` is told of each chunk as it comes. TickFailedError if the session fails."""
    made: list[DemoChunk] = []
    scene = Scene(walk)

    async def watch(producer: Producer) -> None:
        async with producer, aclosing(_chunks(session, producer, options)) as chunks:
            async for chunk in chunks:
                made.append(await _look(session, chunk, scene))
                show(made[-1])

    async with SessionClient(SESSION_ID, url) as session:
        await session.create(
            model=options.model, reducer="lingbot-camera", seed=options.seed, prompt=FIRST_PROMPT
        )
        producer = Producer(
            SESSION_ID,
            url,
            prefix=session.broker.keys.prefix,
            lockstep=options.lockstep,
            keys=options.keys,
        )
        await _unless_it_fails(session, watch(producer))
        await session.close("the demo is over")
    return made


async def _unless_it_fails(session: SessionClient, work: Coroutine[Any, Any, None]) -> None:
    """Waits for `work`, which would wait for ever for the chunks of a session that has failed."""
    task = asyncio.create_task(work)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=_LOOK_S)
            state = None if task.done() else await session.state()
            if state is not None and state.status is Status.FAILED:
                raise error_from_dict({"code": state.failure_code, "message": state.failure_message})
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _chunks(
    session: SessionClient, producer: Producer, options: Options
) -> AsyncGenerator[CommittedChunk, None]:
    if options.lockstep:
        for index in range(options.chunks):
            await producer.push(index)
            yield await session.next_chunk()
        return
    await session.run(PACE_MS)
    async for chunk in session.watch(from_start=True):
        yield chunk
        if chunk.chunk_index + 1 >= options.chunks:
            break
    await session.pause()


async def _look(session: SessionClient, chunk: CommittedChunk, scene: Scene) -> DemoChunk:
    before = scene.prompt
    scene.apply(chunk.applied_event_ids)
    frames = None if chunk.frames is None else decode_frames(await session.read(chunk.frames))
    return DemoChunk(chunk, scene.keys, scene.prompt, scene.prompt != before, frames)
