"""A tiny LingBot world in this process, its parts timed and counted one by one; with what saves work switched off."""

# ruff: noqa: SLF001 - parts are private, and this takes a pipeline apart

from __future__ import annotations

import hashlib
import time
from collections import Counter
from dataclasses import replace
from typing import Any, Final

import torch

from contracts.lingbot import actions_control
from contracts.tick import ARDiffusionTickRequest
from gpu_worker.capability import ARDiffusionRequest
from gpu_worker.config import WorkerSettings
from gpu_worker.models.lingbot_world.conditioning import EncoderState
from gpu_worker.models.lingbot_world.pipeline import LingBotWorldPipeline
from gpu_worker.runner import ARDiffusionModelRunner, RunnerOptions
from support.kv_cache import CPU
from support.lingbot_worlds import TOPOLOGY

SESSION: Final = "bench"
PROMPT: Final = "rain over the valley"
HELD: Final = ("w",)

PARTS: Final = {
    "transformer: five passes": ("_transformer", "forward"),
    "camera: modulation": ("_transformer", "prepare_chunk"),
    "camera: rays": (None, "_camera"),
    "text": (None, "_use_prompt"),
    "encode": ("_encoder", "encode"),
    "decode": ("_decoder", "pictures"),
}
"""Part of a chunk -> the pipeline's attribute that does it, or None for itself, and its method."""


class Stopwatch:
    """Adds up seconds and calls of methods."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def watch(self, name: str, owner: Any, method: str) -> None:
        """From now on calls of `owner.method` count for `name`."""
        run = getattr(owner, method)

        def watched(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return run(*arguments, **options)
            finally:
                self.seconds[name] += time.perf_counter() - started
                self.calls[name] += 1

        setattr(owner, method, watched)

    def reset(self) -> None:
        """Counts from zero."""
        self.seconds.clear()
        self.calls.clear()


class TinyWorld:
    """One session on a runner of its own.

    Args:
        settings: checkpoint and size.
        image: bytes of the first picture's file.
        params: of the session.
    """

    def __init__(self, settings: WorkerSettings, image: bytes, **params: Any) -> None:
        self.pipeline = LingBotWorldPipeline(
            device=CPU, dtype=torch.float32, config=settings.pipeline_config, topology=TOPOLOGY
        )
        options = RunnerOptions(available_bytes=1 << 30)
        self.runner = ARDiffusionModelRunner(self.pipeline, device=CPU, dtype=torch.float32, options=options)
        self.runner.load()
        self._image, self._params = image, params
        self.digests: list[str] = []
        """SHA-256 of the latents of each chunk."""

    def tick(self) -> None:
        """Makes the next chunk."""
        index = len(self.digests)
        tick = ARDiffusionTickRequest(
            SESSION, f"{SESSION}-{index}", index, (), PROMPT, (actions_control((HELD,) * 3),)
        )
        request = ARDiffusionRequest(prompt=PROMPT, images=(self._image,), tick=tick, params=self._params)
        output = self.runner.execute_model(request, seed=7)
        self.digests.append(hashlib.sha256(output.payload["latents"].numpy().tobytes()).hexdigest())

    @property
    def encoder(self) -> EncoderState:
        """What the session keeps of its encoder."""
        state = self.pipeline._worlds[SESSION].encoder
        assert state is not None, "a chunk comes first"
        return state

    def run_until_at_rest(self) -> int:
        """Makes chunks until the encoder rests; how many there are then."""
        self.tick()
        while self.encoder.condition is None:
            self.tick()
        return len(self.digests)

    def encode(self, state: EncoderState) -> None:
        """The encoder's part of one more block, from that state; the session does not notice."""
        height, width = self.pipeline._size.height, self.pipeline._size.width
        self.pipeline._encoder.encode(3, height, width, state=state)

    @property
    def blocks(self) -> int:
        """Layers of the transformer."""
        return len(self.pipeline._transformer.blocks)

    def watch_parts(self) -> Stopwatch:
        """A stopwatch over the parts of a chunk, and over the whole."""
        watch = Stopwatch()
        for name, (attribute, method) in PARTS.items():
            owner = self.pipeline if attribute is None else getattr(self.pipeline, attribute)
            watch.watch(name, owner, method)
        watch.watch("tick", self.runner, "execute_model")
        return watch

    def watch_work(self) -> Stopwatch:
        """A stopwatch over what is saved: camera modulation, a block at a time, and single encoder calls."""
        watch = Stopwatch()
        for block in self.pipeline._transformer.blocks:
            watch.watch("camera modulation of a block", block, "camera_affine")
        watch.watch("encoder call", self.pipeline._encoder, "_call")
        return watch


class NeverAtRest(TinyWorld):
    """Its encoder forgets that nothing changes any more, and encodes every block."""

    def tick(self) -> None:
        """Makes the next chunk."""
        if self.digests:
            world = self.pipeline._worlds[SESSION]
            self.pipeline._worlds[SESSION] = replace(world, encoder=EncoderState(self.encoder.history))
        super().tick()


class ModulatedEachPass(TinyWorld):
    """Its camera modulation is computed for each of the five passes."""

    def __init__(self, settings: WorkerSettings, image: bytes, **params: Any) -> None:
        super().__init__(settings, image, **params)
        model = self.pipeline._transformer
        prepare, forward = model.prepare_chunk, model.forward
        camera: list[torch.Tensor] = []
        passes = 0

        def prepared(rays: torch.Tensor, start_frame: int) -> Any:
            nonlocal passes
            camera[:], passes = [rays], 0
            return prepare(rays, start_frame)

        def modulated(latents: torch.Tensor, timestep: float, *, chunk: Any, **rest: Any) -> torch.Tensor:
            nonlocal passes
            mine = prepare(camera[0], chunk.start_frame) if passes else chunk
            passes += 1
            return forward(latents, timestep, chunk=mine, **rest)

        model.prepare_chunk = prepared  # type: ignore[method-assign]
        model.forward = modulated  # type: ignore[method-assign]


def same_bits(worlds: list[TinyWorld]) -> int:
    """Chunks whose latents are the same in all worlds; AssertionError if any of those that all have differ."""
    common = min(len(world.digests) for world in worlds)
    for index, digests in enumerate(zip(*(world.digests[:common] for world in worlds), strict=True)):
        assert len(set(digests)) == 1, f"chunk {index} differs"
    return common
