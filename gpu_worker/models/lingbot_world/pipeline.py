"""LingBot World behind the runner's seam: it puts the parts together, and nothing else.

Ticks, stepwise execution and whole clips go through the same five step functions. What a session keeps is replaced at
the very end of a chunk, so a chunk that fails leaves index, encoder history, camera and generator where they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from contracts.errors import InvalidArgumentError, KVStateError, ModelError
from contracts.kv_spec import ARDiffusionKVCacheSpec
from contracts.lingbot import FRAMES_PER_CHUNK, actions_control
from contracts.tick import METADATA_KEY, ARDiffusionChunkMetadata, ARDiffusionTickRequest
from gpu_worker.capability import WARMUP_SESSION_ID, ARDiffusionRequest, DiffusionOutput
from gpu_worker.kv.state import ARDiffusionKVState
from gpu_worker.models.lingbot_world.actions import CameraState
from gpu_worker.models.lingbot_world.attention import SequenceParallel
from gpu_worker.models.lingbot_world.camera import (
    CameraTail,
    PictureSize,
    action_camera,
    tick_camera,
    trajectory_camera,
)
from gpu_worker.models.lingbot_world.conditioning import StreamingConditionEncoder
from gpu_worker.models.lingbot_world.decoding import DecoderState, Pictures, StreamingDecoder
from gpu_worker.models.lingbot_world.images import first_image, one_image
from gpu_worker.models.lingbot_world.parts import load_parts
from gpu_worker.models.lingbot_world.passes import PagedFlow, publish_prompt
from gpu_worker.models.lingbot_world.request import LingBotRequest, check_request
from gpu_worker.models.lingbot_world.sampler import DMDBlock
from gpu_worker.models.lingbot_world.settings import LingBotSettings, LingBotTopology
from gpu_worker.models.lingbot_world.spec import BRANCH, DEFAULT_DTYPE, TEXT, lingbot_kv_spec, owned_bytes
from gpu_worker.models.lingbot_world.steps import Chunk, LingBotSteps, WorldState, read_together
from gpu_worker.models.lingbot_world.trajectories import load_trajectory
from gpu_worker.models.lingbot_world.trusted_root import TrustedRoot
from gpu_worker.models.lingbot_world.weights import Checkpoint


class LingBotWorldPipeline:
    """Implements `SupportsARDiffusionPipeline` and `SupportsStepExecution`.

    Args:
        device: where the models run.
        dtype: element type of all weights, and of conditions; latents stay in float32.
        config: settings, see `LingBotSettings`; `checkpoint` is needed.
        topology: what the checkpoint must be; None is the published one.
        parallel: ranks that share every sequence; None where this process is alone.

    Raises:
        ConfigurationError: a setting or something in the checkpoint does not fit; names it.
    """

    default_dtype: ClassVar[str] = DEFAULT_DTYPE
    """What it runs in where nobody says."""

    shares_sequences: ClassVar[bool] = True
    """Whether several ranks can share a sequence: then `parallel` is given."""

    def __init__(
        self,
        *,
        device: torch.device,
        dtype: torch.dtype,
        config: Mapping[str, Any] | None = None,
        topology: LingBotTopology | None = None,
        parallel: SequenceParallel | None = None,
    ) -> None:
        self._settings = settings = LingBotSettings.from_mapping(config or {})
        self._topology = LingBotTopology() if topology is None else topology
        root = settings.lingbot_action_root
        self._root = None if root is None else TrustedRoot(root)
        self._device, self._dtype = device, dtype
        self._size = PictureSize(settings.cost.ar_diffusion_height, settings.cost.ar_diffusion_width)
        self._degree = 1 if parallel is None else parallel.degree
        settings.check_degree(self._degree, self._topology.transformer)
        parts = load_parts(
            Checkpoint(settings.checkpoint), self._topology, device=device, dtype=dtype, parallel=parallel
        )
        self._transformer, self._text, self._scheduler = parts.transformer, parts.text, parts.scheduler
        self._encoder = StreamingConditionEncoder(parts.vae, dtype=dtype)
        self._decoder = StreamingDecoder(parts.vae)
        self._worlds: dict[str, WorldState] = {}
        self._decoded: dict[str, DecoderState] = {}
        self._prompts: dict[str, str] = {}  # what each session's cross-attention was built from
        self._kv: ARDiffusionKVState | None = None

    # ------------------------------------------------------------------------------------------- the runner's seam

    def ar_diffusion_kv_cache_spec(self) -> ARDiffusionKVCacheSpec:
        """What a session costs."""
        size, degree = (self._size.height, self._size.width), self._degree
        model, vae, itemsize = self._topology.transformer, self._topology.vae, self._dtype.itemsize
        owned = owned_bytes(*size, transformer=model, vae=vae, itemsize=itemsize, degree=degree)
        capacity = self._settings.cost.session_capacity
        return lingbot_kv_spec(
            *size, owned=owned, transformer=model, session_capacity=capacity, degree=degree
        )

    @contextmanager
    def bind_ar_diffusion_state(self, session_id: str, state: ARDiffusionKVState) -> Iterator[None]:
        """Makes the session's KV the current one for the duration of one call."""
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
        self.close_ar_diffusion_session(session_id)

    def close_ar_diffusion_session(self, session_id: str) -> None:
        """Forgets the session's world."""
        for kept in (self._worlds, self._decoded, self._prompts):
            kept.pop(session_id, None)

    def ar_diffusion_warmup_requests(self) -> Iterator[ARDiffusionRequest]:
        """Two chunks of a grey world: one without history, one with."""
        grey = torch.full((3, self._size.height, self._size.width), 0.5)
        still = actions_control(((),) * FRAMES_PER_CHUNK)
        for index in range(2):
            tick = ARDiffusionTickRequest(
                WARMUP_SESSION_ID, f"warmup-{index}", index, prompt="warm-up", controls=(still,)
            )
            yield ARDiffusionRequest(prompt=tick.prompt, images=(grey,), tick=tick)

    # ------------------------------------------------------------------------------------------- one chunk

    def forward(self, request: ARDiffusionRequest) -> DiffusionOutput:
        """Generates the chunk of `request.tick`.

        Returns:
            payload `latents` float32 [1, 16, 3, H/8, W/8]; unless `params.output_type` is "latent", frames uint8
            [9 first, 12 later, H, W, 3]; the tick's identity as metadata.

        Raises:
            InvalidArgumentError: something of the request can't be followed; names the field.
            KVStateError: no session is bound.
            ModelError: the chunk is not finite.
        """
        self._bound()
        if request.tick is None:
            raise InvalidArgumentError("forward generates ticks; a clip is run step by step", field="tick")
        state = self.prepare_encode(request)
        self.prepare_next_chunk(state)
        while not state.chunk_complete:
            self.step_scheduler(state, self.denoise_step(state))
        return self.post_decode(state)

    # ------------------------------------------------------------------------------------------- step by step

    def prepare_encode(self, request: ARDiffusionRequest) -> LingBotSteps:
        """1. Whose chunks, how many, from which image; the camera of a whole clip."""
        kv = self._bound()
        checked = check_request(
            request, self._size, flow_shift=self._settings.flow_shift, scheduler=self._scheduler
        )
        ticks = [request.tick] if request.tick is not None else checked.ticks(kv.session_id)
        if ticks[0].session_id != kv.session_id:
            raise InvalidArgumentError(
                f"session {kv.session_id!r} is bound, the tick is of {ticks[0].session_id!r}",
                field="session_id",
            )
        image = None
        if ticks[0].chunk_index == 0:  # later the encoder's history stands for the image
            source = one_image(request.images)
            image = first_image(source, self._size.height, self._size.width, root=self._root)
        camera = None if request.tick is not None else self._clip_camera(checked)
        return LingBotSteps(checked, ticks, image, camera)

    def prepare_next_chunk(self, state: LingBotSteps) -> None:
        """2. Where the camera goes, what the text says, what the image does, and the noise to start from."""
        tick, request = state.next_tick(), state.request
        world = self._worlds.get(tick.session_id, WorldState())
        if tick.chunk_index != world.next_chunk:
            raise InvalidArgumentError(
                f"chunk_index must be contiguous: expected {world.next_chunk}, got {tick.chunk_index}",
                field="chunk_index",
            )
        start_frame = FRAMES_PER_CHUNK * tick.chunk_index
        with state.undone_on_failure():
            camera, tail = self._camera(state, tick, world.camera)
            self._use_prompt(tick.session_id, request.prompt)
            encoded = self._encoder.encode(
                start_frame, self._size.height, self._size.width, image=state.image, state=world.encoder
            )
            inputs = self._transformer.prepare_chunk(camera, start_frame)
            block = DMDBlock(
                PagedFlow(self._transformer, self._bound(), inputs),
                encoded.condition,
                request.schedule,
                request.generator,
                reuse_last_step_kv=request.reuse_last_step_kv,
            )
        state.chunk = Chunk(tick, block, inputs, encoded, tail)
        state.image = None

    def denoise_step(self, state: LingBotSteps) -> torch.Tensor:
        """3. Predicts the flow; this pass leaves no trace in the KV."""
        with state.undone_on_failure():
            return state.current.block.predict()

    def step_scheduler(self, state: LingBotSteps, prediction: torch.Tensor) -> None:
        """4. The latents one step on, with noise of the next, lower level unless this was the last."""
        with state.undone_on_failure():
            state.current.block.advance(prediction)

    def post_decode(self, state: LingBotSteps) -> DiffusionOutput:
        """5. One pass over the clean chunk, whose K and V later chunks will see; then the pictures."""
        with state.undone_on_failure():
            chunk = state.current
            latents = chunk.block.commit()
            made = self._pictures(chunk.tick, latents) if state.request.decodes else None
            latents_finite, frames_finite, at_rest = read_together(
                latents.isfinite().all(), made is None or made.finite, chunk.encoded.at_rest
            )
            for field, finite in (("latents", latents_finite), ("frames", frames_finite)):
                if not finite:
                    raise ModelError(f"the {field} are not finite", field=field)
            # Nothing failed, so the world moves on.
            session_id = chunk.tick.session_id
            if made is not None:
                self._decoded[session_id] = made.state
            self._worlds[session_id] = WorldState(
                next_chunk=chunk.tick.chunk_index + 1,
                encoder=chunk.encoded.settle(at_rest),
                camera=chunk.camera,
            )
        state.chunk = None
        return DiffusionOutput(
            payload={"latents": latents},
            frames=None if made is None else made.frames,
            metadata={METADATA_KEY: ARDiffusionChunkMetadata.from_tick(chunk.tick).to_dict()},
        )

    # ------------------------------------------------------------------------------------------- parts

    def _bound(self) -> ARDiffusionKVState:
        if self._kv is None:
            raise KVStateError("no session is bound: a forward runs inside bind_ar_diffusion_state only")
        return self._kv

    def _clip_camera(self, request: LingBotRequest) -> torch.Tensor:
        """The camera of a whole clip, so that all its chunks have one scale."""
        if request.script is None:
            path = load_trajectory(request.action_path, self._root)
            return trajectory_camera(
                path, request.num_frames, self._size, device=self._device, dtype=self._dtype
            )
        keys = [held for frames in request.script for held in frames]
        camera, _ = action_camera(
            keys, CameraState(), self._size, translation_scale=None, device=self._device, dtype=self._dtype
        )
        return camera

    def _camera(
        self, state: LingBotSteps, tick: ARDiffusionTickRequest, tail: CameraTail
    ) -> tuple[torch.Tensor, CameraTail]:
        """The camera of one chunk [1, 384, 3, h, w], and where it is left."""
        if state.clip_camera is None:
            return tick_camera(tick.controls, tail, self._size, device=self._device, dtype=self._dtype)
        start = FRAMES_PER_CHUNK * tick.chunk_index
        return state.clip_camera[:, :, start : start + FRAMES_PER_CHUNK], tail

    def _use_prompt(self, session_id: str, prompt: str) -> None:
        """Projects the text once a prompt; the past in self-attention stays."""
        kv = self._bound()
        if kv.is_cross_attention_populated(BRANCH, TEXT) and self._prompts.get(session_id) == prompt:
            return
        self._prompts.pop(session_id, None)  # a failure leaves none, so the next chunk builds its own
        publish_prompt(self._transformer, kv, self._text(prompt))
        self._prompts[session_id] = prompt

    def _pictures(self, tick: ARDiffusionTickRequest, latents: torch.Tensor) -> Pictures:
        """What the latents look like. A failure leaves no decoder history: half of its slots would be new."""
        session_id, start = tick.session_id, FRAMES_PER_CHUNK * tick.chunk_index
        known = self._decoded.pop(session_id, None)
        state = self._decoder.begin(session_id) if start == 0 else known
        if state is None or state.frames != start:
            raise ModelError("the decoder has lost this world's history: reset it", field="chunk_index")
        return self._decoder.pictures(state, latents)
