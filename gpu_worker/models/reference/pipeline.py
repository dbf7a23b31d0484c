"""The reference world behind the runner's seam. The weights are seeded and untrained: a toy, but a real one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from contracts.errors import InvalidArgumentError, KVStateError
from contracts.kv_spec import ARDiffusionKVCacheSpec
from contracts.tick import METADATA_KEY, ARDiffusionChunkMetadata, ARDiffusionTickRequest
from gpu_worker.capability import WARMUP_SESSION_ID, ARDiffusionRequest, DiffusionOutput
from gpu_worker.kv.state import ARDiffusionKVState
from gpu_worker.models.reference.camera import CameraPose, held_keys, motion_of, patch_points
from gpu_worker.models.reference.decoder import ColourFieldDecoder
from gpu_worker.models.reference.sampler import Denoise, sample_chunk
from gpu_worker.models.reference.spec import (
    BRANCH,
    FRAMES,
    TEXT,
    TOKENS_PER_FRAME,
    ReferenceConfig,
    kv_spec,
)
from gpu_worker.models.reference.text import HashedTextEmbedding
from gpu_worker.models.reference.transformer import ReferenceTransformer


@dataclass(frozen=True, slots=True)
class WorldState:
    """What the model keeps of a session between ticks; replaced as a whole once a tick has succeeded.

    Args:
        next_chunk: index of the chunk that must come next.
        prompt: the prompt that the cross-attention cache was built from.
        pose: where the camera stands.
        last_frame: the last latent frame [C, GRID, GRID], which the decoder continues from.
    """

    next_chunk: int = 0
    prompt: str | None = None
    pose: CameraPose = field(default_factory=CameraPose)
    last_frame: torch.Tensor | None = None


class ReferencePipeline:
    """Implements `SupportsARDiffusionPipeline`.

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
            KVStateError: no session is bound, or there is no random state.
        """
        kv, tick, generator = self._bound(request)
        world = self._worlds.get(tick.session_id, WorldState())
        if tick.chunk_index != world.next_chunk:
            raise InvalidArgumentError(
                f"chunk_index must be contiguous: expected {world.next_chunk}, got {tick.chunk_index}",
                field="chunk_index",
            )
        # 1. Controls: where the camera goes, and what its patches look at.
        motions = [motion_of(keys) for keys in held_keys(tick.controls)]
        poses = _walk(world.pose, motions)
        points = torch.stack([patch_points(pose) for pose in poses], dim=1).to(self._device)
        # 2. Text: project it once a prompt; the past in self-attention stays.
        self._use_prompt(kv, world, tick.prompt)
        # 3. Latents, and with them the chunk's KV.
        motion = torch.tensor(motions, device=self._device)
        latents = sample_chunk(self._denoiser(kv, points, motion), generator)
        # 4. Pictures.
        frames = self._decoder(latents, world.last_frame)
        # 5. Nothing failed, so the world moves on.
        self._worlds[tick.session_id] = WorldState(
            next_chunk=tick.chunk_index + 1,
            prompt=tick.prompt,
            pose=poses[-1],
            last_frame=latents[0, :, -1].clone(),
        )
        return DiffusionOutput(
            payload={"latents": latents},
            frames=frames,
            metadata={METADATA_KEY: ARDiffusionChunkMetadata.from_tick(tick).to_dict()},
        )

    def _bound(
        self, request: ARDiffusionRequest
    ) -> tuple[ARDiffusionKVState, ARDiffusionTickRequest, torch.Generator]:
        if self._kv is None:
            raise KVStateError("no session is bound: a forward runs inside bind_ar_diffusion_state only")
        if request.tick is None:
            raise InvalidArgumentError("the reference model generates ticks only", field="tick")
        if request.generator is None:
            raise InvalidArgumentError("a tick needs the session's generator", field="generator")
        if request.tick.session_id != self._kv.session_id:
            raise InvalidArgumentError(
                f"session {self._kv.session_id!r} is bound, the tick is of {request.tick.session_id!r}",
                field="session_id",
            )
        return self._kv, request.tick, request.generator

    def _use_prompt(self, kv: ARDiffusionKVState, world: WorldState, prompt: str | None) -> None:
        populated = kv.is_cross_attention_populated(BRANCH, TEXT)
        if populated and prompt == world.prompt:
            return
        kv.clear_cross_attention()
        text = self._text(prompt).to(device=self._device, dtype=self._transformer.dtype)
        kv.populate_cross_attention(BRANCH, TEXT, self._transformer.text_kv(text))

    def _denoiser(self, kv: ARDiffusionKVState, points: torch.Tensor, motion: torch.Tensor) -> Denoise:
        """Passes of the transformer over the session's past, for the sampler."""

        def denoise(latents: torch.Tensor, timestep: float, commit: bool) -> torch.Tensor:
            handles = kv.get_kv_caches(BRANCH, seq_len=FRAMES * TOKENS_PER_FRAME, commit_current=commit)
            context = kv.prepare_paged_context(BRANCH)
            clean: torch.Tensor = self._transformer(
                latents,
                timestep,
                points,
                motion,
                start_frame=context.start_frame,
                kv=handles,
                text=kv.get_cross_attention_kv(BRANCH, TEXT),
            )
            kv.commit_paged_context(BRANCH)  # advances after the pass that commits, and only then
            return clean

        return denoise


def _walk(pose: CameraPose, motions: list[tuple[float, float, float, float]]) -> list[CameraPose]:
    poses = []
    for motion in motions:
        pose = pose.moved(motion)
        poses.append(pose)
    return poses
