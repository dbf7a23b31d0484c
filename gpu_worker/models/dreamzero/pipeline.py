"""DreamZero behind the runner's seam: it puts the parts together, and nothing else.

A tick is one observation. What a session keeps is replaced at the very end, and everything that can be wrong with an
observation is found before its KV is touched, so one that fails leaves the session's own state as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch

from contracts.dreamzero import observation_control
from contracts.errors import InvalidArgumentError, KVStateError, ModelError
from contracts.kv_spec import ARDiffusionKVCacheSpec
from contracts.tick import METADATA_KEY, ARDiffusionChunkMetadata, ARDiffusionTickRequest
from gpu_worker.capability import WARMUP_SESSION_ID, ARDiffusionRequest, DiffusionOutput
from gpu_worker.kv.state import ARDiffusionKVState
from gpu_worker.models.dreamzero.checkpoint import DreamZeroCheckpoint
from gpu_worker.models.dreamzero.deployment import Deployment
from gpu_worker.models.dreamzero.guidance import GuidedModel
from gpu_worker.models.dreamzero.normalisation import normalise_state, restore_actions
from gpu_worker.models.dreamzero.parts import load_parts
from gpu_worker.models.dreamzero.passes import PagedModel
from gpu_worker.models.dreamzero.request import (
    ACTIONS,
    PIXEL,
    Observed,
    Options,
    check_options,
    is_dummy,
    observe,
)
from gpu_worker.models.dreamzero.rollout import Answer, Rollout, Sight, let_go, publish, see, settled
from gpu_worker.models.dreamzero.settings import DEFAULT_SEED, DreamZeroSettings
from gpu_worker.models.dreamzero.spec import NEGATIVE, POSITIVE, dreamzero_kv_spec, owned_bytes
from gpu_worker.models.dreamzero.stream import PICTURES_PER_LATENT, FrameEncoder, FrameStream
from gpu_worker.models.dreamzero.unipc import UniPCSchedule
from gpu_worker.models.dreamzero.world import PolicyState, Reset, accumulate_frames, reset_reason
from gpu_worker.models.lingbot_world.decoding import StreamingDecoder, to_uint8

_WARMUP_LANGUAGE: Final = "stand still"


@dataclass(frozen=True, slots=True, eq=False)
class _Turn:
    """One observation, checked and seen.

    Args:
        options: how it is to be answered.
        observed: what the robot saw and felt.
        language: token ids of what it is asked to do.
        texts: embeddings [1, tokens, text_dim] by branch.
        state: the session's, after `reset`.
        reset: what the observation makes it let go of.
        sight: what the model sees.
        seed: of the noise.
    """

    options: Options
    observed: Observed
    language: tuple[int, ...]
    texts: Mapping[str, torch.Tensor]
    state: PolicyState
    reset: Reset | None
    sight: Sight
    seed: int


class DreamZeroPipeline:
    """Implements `SupportsARDiffusionPipeline`.

    Args:
        device: where the models run.
        dtype: element type of all weights, and of conditions; the sampler works in float32.
        config: settings, see `DreamZeroSettings`; `checkpoint` is needed.

    Raises:
        ConfigurationError: a setting or something in the checkpoint does not fit; names it.
    """

    ar_diffusion_default_seed = DEFAULT_SEED
    """Of sessions that name none."""

    def __init__(
        self, *, device: torch.device, dtype: torch.dtype, config: Mapping[str, Any] | None = None
    ) -> None:
        self._settings = settings = DreamZeroSettings.from_mapping(config or {})
        deployment = Deployment.load(settings.checkpoint)
        self._robot, self._topology = deployment.embodiment, deployment.topology
        self._negative_prompt = deployment.negative_prompt
        checkpoint = DreamZeroCheckpoint(settings.checkpoint)
        tokenizer = str(deployment.tokenizer.relative_to(settings.checkpoint))
        parts = load_parts(checkpoint, self._topology, tokenizer=tokenizer, device=device, dtype=dtype)
        self._config = parts.config
        self._transformer, self._clip, self._text = parts.transformer, parts.clip, parts.text
        self._device, self._dtype = device, dtype
        self._encoder = FrameEncoder(
            parts.vae, height=self._topology.height, width=self._topology.width, dtype=dtype
        )
        self._stream = FrameStream(self._encoder, self._config.num_frame_per_block)
        self._decoder = StreamingDecoder(parts.vae)
        self._states: dict[str, PolicyState] = {}
        self._kv: ARDiffusionKVState | None = None

    # ------------------------------------------------------------------------------------------- the runner's seam

    def ar_diffusion_kv_cache_spec(self) -> ARDiffusionKVCacheSpec:
        """What a session costs."""
        cost = self._settings.cost
        return dreamzero_kv_spec(
            self._topology,
            owned=owned_bytes(self._topology, itemsize=self._dtype.itemsize),
            session_capacity=cost.session_capacity,
            cfg_parallel=cost.cfg_parallel,
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
        """Forgets what was seen; the session starts again at chunk 0."""
        self.close_ar_diffusion_session(session_id)

    def close_ar_diffusion_session(self, session_id: str) -> None:
        """Forgets what was seen."""
        self._states.pop(session_id, None)

    def ar_diffusion_warmup_requests(self) -> Iterator[ARDiffusionRequest]:
        """Two observations in the dark: one begins a rollout, one goes on with it."""
        robot = self._robot
        dark = np.zeros((robot.view_height, robot.view_width, 3), np.uint8)
        still = observation_control(
            dict.fromkeys(robot.views, "warmup:black"),
            {part.name: part.q01 for part in robot.state},
            _WARMUP_LANGUAGE,
        )
        for index in range(2):
            tick = ARDiffusionTickRequest(WARMUP_SESSION_ID, f"warmup-{index}", index, controls=(still,))
            yield ARDiffusionRequest(images=(dark,) * len(robot.views), tick=tick)

    # ------------------------------------------------------------------------------------------- one observation

    def forward(self, request: ARDiffusionRequest) -> DiffusionOutput:
        """Answers one observation.

        Returns:
            payload `actions` float32 [action_horizon, dims] in the robot's units; with `output_type` "latent" or
            "pixel" `latents` float32 [1, 16, 2, h, w] (3 where a rollout begins), with "pixel" frames uint8
            [8, H, W, 3] (9 where a rollout begins), too; the tick's identity as metadata.

        Raises:
            ObservationMissingError: there is nothing to act on.
            InvalidArgumentError: something of the request can't be followed; names the field.
            KVStateError: no session is bound.
            ModelError: the actions are not finite.
        """
        if is_dummy(request):
            shape = (self._config.action_horizon, self._config.max_action_dim)
            return _output(request, {"actions": torch.zeros(shape)})
        kv = self._bound()
        turn = self._turn(request, kv.session_id)
        answer = self._answer(kv, turn)
        actions = restore_actions(
            answer.actions[0].double().cpu().numpy(), turn.observed.state, self._robot
        ).astype(np.float32)
        if not np.isfinite(actions).all():
            raise ModelError("the actions are not finite", field="actions")
        state = settled(
            turn.state, turn.sight, answer, language=turn.language, frames=self._config.latent_frames
        )
        payload: dict[str, Any] = {"actions": actions}
        if turn.options.output_type != ACTIONS:
            payload["latents"] = answer.video
        frames = self._pictures(kv.session_id, state, answer) if turn.options.output_type == PIXEL else None
        self._states[kv.session_id] = state  # nothing failed, so the session moves on
        return _output(request, payload, frames)

    def _turn(self, request: ARDiffusionRequest, session_id: str) -> _Turn:
        """All that can be wrong with an observation is found here, before the session's KV is touched."""
        options = check_options(request, self._settings)
        known = self._state_of(session_id, request.tick)
        observed = observe(request, self._robot)
        sentence = self._robot.sentence(observed.language)
        language = self._text.token_ids(sentence)
        state, reset = self._reset_state(known, observed, language)
        sight = see(state, observed.picture, self._encoder, self._stream, self._config.latent_frames)
        texts = {POSITIVE: self._text(sentence), NEGATIVE: self._text(self._negative_prompt)}
        return _Turn(options, observed, language, texts, state, reset, sight, _seed(request))

    def _answer(self, kv: ARDiffusionKVState, turn: _Turn) -> Answer:
        paged = PagedModel(self._transformer, kv)
        model = GuidedModel(paged, self._transformer, scale=turn.options.cfg_scale)
        row = normalise_state(turn.observed.state, self._robot.state, self._config.max_state_dim)
        schedule = UniPCSchedule.of(turn.options.steps)
        rollout = Rollout(self._config, model, schedule=schedule, sight=turn.sight, stream=self._stream)
        let_go(kv, turn.reset)
        publish(
            kv,
            model,
            text=turn.texts.__getitem__,
            image=lambda: self._clip(self._encoder.pixels(turn.observed.picture)),
        )
        start = rollout.prefill(turn.state.start)
        felt = torch.from_numpy(row).to(device=self._device, dtype=self._dtype).view(1, 1, -1)
        return rollout.denoise(start, felt, turn.seed)

    # ------------------------------------------------------------------------------------------- parts

    def _bound(self) -> ARDiffusionKVState:
        if self._kv is None:
            raise KVStateError("no session is bound: a forward runs inside bind_ar_diffusion_state only")
        return self._kv

    def _state_of(self, session_id: str, tick: ARDiffusionTickRequest | None) -> PolicyState:
        known = self._states.get(session_id, PolicyState())
        if tick is None:
            return known
        if tick.session_id != session_id:
            raise InvalidArgumentError(
                f"session {session_id!r} is bound, the tick is of {tick.session_id!r}", field="session_id"
            )
        if tick.chunk_index != known.next_chunk:
            raise InvalidArgumentError(
                f"chunk_index must be contiguous: expected {known.next_chunk}, got {tick.chunk_index}",
                field="chunk_index",
            )
        return known

    def _reset_state(
        self, known: PolicyState, observed: Observed, language: tuple[int, ...]
    ) -> tuple[PolicyState, Reset | None]:
        """The session's state as this observation finds it, and the reset that it went through."""
        ring, seen = accumulate_frames(known.ring, observed.picture)
        counted = replace(known, calls=known.calls + 1)
        reset = reset_reason(
            counted,
            language=language,
            num_frames=len(seen),
            local_attention_frames=self._config.local_attention_frames,
        )
        if reset is not None:
            ring, _ = accumulate_frames((), observed.picture)
        state = counted.after(reset)
        return replace(state, ring=ring, calls=max(1, state.calls)), reset

    def _pictures(self, session_id: str, state: PolicyState, answer: Answer) -> torch.Tensor:
        """The imagined frames as pictures; the rollout so far is decoded, since each frame needs those before it."""
        assert state.video is not None
        clip = torch.from_numpy(state.video).unsqueeze(0).to(self._device)
        pictures = self._decoder.decode(self._decoder.begin(session_id), clip)
        new = answer.video.shape[2]
        count = pictures.shape[2] if new == clip.shape[2] else PICTURES_PER_LATENT * new
        shown = pictures[:, :, -count:]
        if not bool(shown.isfinite().all()):
            raise ModelError("the pictures are not finite", field="frames")
        return to_uint8(shown)


def _seed(request: ARDiffusionRequest) -> int:
    """The session's seed, from which each observation's noise begins anew."""
    return DEFAULT_SEED if request.generator is None else request.generator.initial_seed()


def _output(
    request: ARDiffusionRequest, payload: Mapping[str, Any], frames: torch.Tensor | None = None
) -> DiffusionOutput:
    metadata = {}
    if request.tick is not None:
        metadata[METADATA_KEY] = ARDiffusionChunkMetadata.from_tick(request.tick).to_dict()
    return DiffusionOutput(payload=payload, frames=frames, metadata=metadata)
