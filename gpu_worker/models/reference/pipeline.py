"""The reference world behind the runner's seam. The weights are seeded and untrained: a toy, but a real one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from contracts.errors import InvalidArgumentError, KVStateError
from contracts.kv_spec import ARDiffusionKVCacheSpec
from contracts.tick import METADATA_KEY, ARDiffusionChunkMetadata, ARDiffusionTickRequest
from gpu_worker.capability import WARMUP_SESSION_ID, ARDiffusionRequest, DiffusionOutput
from gpu_worker.kv.state import ARDiffusionKVState
from gpu_worker.models.reference.camera import CameraPose, held_keys, motion_of, patch_points
from gpu_worker.models.reference.decoder import ColourFieldDecoder
from gpu_worker.models.reference.sampler import SIGMAS, draw_noise, next_latents
from gpu_worker.models.reference.spec import BRANCH, FRAMES, TEXT, TOKENS_PER_FRAME, ReferenceConfig, kv_spec
from gpu_worker.models.reference.steps import Chunk, ReferenceSteps, WorldState, ticks_of
from gpu_worker.models.reference.text import HashedTextEmbedding
from gpu_worker.models.reference.transformer import ReferenceTransformer


class ReferencePipeline:
    """Implements `SupportsARDiffusionPipeline` and `SupportsStepExecution`.

    Args:
        device: where the model runs.
        dtype: element type of the transformer; latents and decoder stay in float32.
        config: settings, see `ReferenceConfig`.
    """

    def __init__(
        self, *, device: torch.device, dtype: torch.dtype, config: Mapping[str, Any] | None = None
    ) -> None:
        self._config = dict(config or {})
        generator = torch.Generator().manual_seed(ReferenceConfig.from_mapping(self._config).weights_seed)
        self._device = device
        self._text = HashedTextEmbedding(generator)
        self._transformer = ReferenceTransformer.seeded(generator).to(device=device, dtype=dtype)
        self._decoder = ColourFieldDecoder(generator, device)
        self._worlds: dict[str, WorldState] = {}
        self._kv: ARDiffusionKVState | None = None

    # ------------------------------------------------------------------------------------------- the runner's seam

    def ar_diffusion_kv_cache_spec(self) -> ARDiffusionKVCacheSpec:
        """What a session costs."""
        return kv_spec(self._config)

    @contextmanager
    def bind_ar_diffusion_state(self, session_id: str, state: ARDiffusionKVState) -> Iterator[None]:
        """Makes the session's KV the current one for the duration of one forward."""
        if self._kv is not None:
            raise KVStateError(f"session {self._kv.session_id!r} is still bound")
        if state.session_id != session_id:
            raise InvalidArgumentError(
                f"the KV of session {state.session_id!r} can't be bound as {session_id!r}", field="session_id"
            )
        self._kv = state
        try:
            yield
        finally:
            self._kv = None

    def reset_ar_diffusion_session(self, session_id: str) -> None:
        """Forgets the session's world; it starts again at chunk 0."""
        self._worlds.pop(session_id, None)

    def close_ar_diffusion_session(self, session_id: str) -> None:
        """Forgets the session's world."""
        self._worlds.pop(session_id, None)

    def ar_diffusion_warmup_requests(self) -> Iterator[ARDiffusionRequest]:
        """Two chunks: one without history, one with."""
        for index in range(2):
            yield ARDiffusionRequest(tick=ARDiffusionTickRequest(WARMUP_SESSION_ID, f"warmup-{index}", index))

    # ------------------------------------------------------------------------------------------- one chunk

    def forward(self, request: ARDiffusionRequest) -> DiffusionOutput:
        """Generates the chunk of `request.tick`.

        Returns:
            payload `latents` float32 [1, C, 3, 4, 4]; frames uint8 [12, 96, 96, 3]; the tick's identity as metadata.

        Raises:
            InvalidArgumentError: chunk index or a camera control is wrong; names the field.
            KVStateError: no session is bound.
        """
        self._bound()
        if request.tick is None:
            raise InvalidArgumentError("the reference model generates ticks only", field="tick")
        state = self.prepare_encode(request)
        self.prepare_next_chunk(state)
        while not state.chunk_complete:
            self.step_scheduler(state, self.denoise_step(state))
        return self.post_decode(state)

    # ------------------------------------------------------------------------------------------- step by step

    def prepare_encode(self, request: ARDiffusionRequest) -> ReferenceSteps:
        """1. Whose chunks, and how many."""
        kv = self._bound()
        if request.generator is None:
            raise InvalidArgumentError("a chunk needs the session's generator", field="generator")
        if request.tick is not None and request.tick.session_id != kv.session_id:
            raise InvalidArgumentError(
                f"session {kv.session_id!r} is bound, the tick is of {request.tick.session_id!r}",
                field="session_id",
            )
        return ReferenceSteps(ticks_of(request, kv.session_id), request.generator)

    def prepare_next_chunk(self, state: ReferenceSteps) -> None:
        """2. Where the camera goes, what the text says, and the noise to start from."""
        tick = state.ticks.pop(0)
        world = self._world(tick)
        if tick.chunk_index != world.next_chunk:
            raise InvalidArgumentError(
                f"chunk_index must be contiguous: expected {world.next_chunk}, got {tick.chunk_index}",
                field="chunk_index",
            )
        motions = [motion_of(keys) for keys in held_keys(tick.controls)]
        poses = _walk(world.pose, motions)
        self._use_prompt(world, tick.prompt)
        state.chunk = Chunk(
            tick=tick,
            pose=poses[-1],
            points=torch.stack([patch_points(pose) for pose in poses], dim=1).to(self._device),
            motion=torch.tensor(motions, device=self._device),
            latents=draw_noise(state.generator),
        )

    def denoise_step(self, state: ReferenceSteps) -> torch.Tensor:
        """3. Predicts the clean chunk; this pass leaves no trace in the KV."""
        return self._pass(state.current, 1000 * SIGMAS[state.current.step], commit=False)

    def step_scheduler(self, state: ReferenceSteps, prediction: torch.Tensor) -> None:
        """4. Adds noise of the next, lower level, except after the last step."""
        chunk = state.current
        chunk.latents = next_latents(prediction, chunk.step, state.generator)
        chunk.step += 1

    def post_decode(self, state: ReferenceSteps) -> DiffusionOutput:
        """5. One pass over the clean chunk, whose K and V later chunks will see; then the pictures."""
        chunk = state.current
        self._pass(chunk, 0.0, commit=True)
        frames = self._decoder(chunk.latents, self._world(chunk.tick).last_frame)
        # Nothing failed, so the world moves on.
        self._worlds[chunk.tick.session_id] = WorldState(
            next_chunk=chunk.tick.chunk_index + 1,
            prompt=chunk.tick.prompt,
            pose=chunk.pose,
            last_frame=chunk.latents[0, :, -1].clone(),
        )
        return DiffusionOutput(
            payload={"latents": chunk.latents},
            frames=frames,
            metadata={METADATA_KEY: ARDiffusionChunkMetadata.from_tick(chunk.tick).to_dict()},
        )

    # ------------------------------------------------------------------------------------------- parts

    def _bound(self) -> ARDiffusionKVState:
        if self._kv is None:
            raise KVStateError("no session is bound: a forward runs inside bind_ar_diffusion_state only")
        return self._kv

    def _world(self, tick: ARDiffusionTickRequest) -> WorldState:
        return self._worlds.get(tick.session_id, WorldState())

    def _use_prompt(self, world: WorldState, prompt: str | None) -> None:
        """Projects the text once a prompt; the past in self-attention stays."""
        kv = self._bound()
        if kv.is_cross_attention_populated(BRANCH, TEXT) and prompt == world.prompt:
            return
        kv.clear_cross_attention()
        text = self._text(prompt).to(device=self._device, dtype=self._transformer.dtype)
        kv.populate_cross_attention(BRANCH, TEXT, self._transformer.text_kv(text))

    def _pass(self, chunk: Chunk, timestep: float, *, commit: bool) -> torch.Tensor:
        """One pass of the transformer over the session's past and this chunk."""
        kv = self._bound()
        handles = kv.get_kv_caches(BRANCH, seq_len=FRAMES * TOKENS_PER_FRAME, commit_current=commit)
        context = kv.prepare_paged_context(BRANCH)
        clean: torch.Tensor = self._transformer(
            chunk.latents,
            timestep,
            chunk.points,
            chunk.motion,
            start_frame=context.start_frame,
            kv=handles,
            text=kv.get_cross_attention_kv(BRANCH, TEXT),
        )
        kv.commit_paged_context(BRANCH)  # advances after the pass that commits, and only then
        return clean


def _walk(pose: CameraPose, motions: list[tuple[float, float, float, float]]) -> list[CameraPose]:
    poses = []
    for motion in motions:
        pose = pose.moved(motion)
        poses.append(pose)
    return poses
