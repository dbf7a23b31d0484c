"""DreamZero behind the runner's seam: whose observation it is, what is kept of a session, and nothing else.

A tick is one observation. What a session keeps is replaced at the very end, and everything that can be wrong with an
observation is found before its KV is touched, so one that fails leaves the session's own state as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Final

import numpy as np
import torch

from contracts.dreamzero import observation_control
from contracts.errors import InvalidArgumentError, KVStateError, ModelError
from contracts.kv_spec import ARDiffusionKVCacheSpec
from contracts.tick import METADATA_KEY, ARDiffusionChunkMetadata, ARDiffusionTickRequest
from gpu_worker.capability import WARMUP_SESSION_ID, ARDiffusionRequest, DiffusionOutput
from gpu_worker.kv.state import ARDiffusionKVState
from gpu_worker.models.dreamzero.cfg import Gathering
from gpu_worker.models.dreamzero.normalisation import restore_actions
from gpu_worker.models.dreamzero.policy import Policy
from gpu_worker.models.dreamzero.request import ACTIONS, PIXEL, is_dummy
from gpu_worker.models.dreamzero.rollout import settled
from gpu_worker.models.dreamzero.settings import DEFAULT_SEED, DreamZeroSettings
from gpu_worker.models.dreamzero.spec import DEFAULT_DTYPE, dreamzero_kv_spec, owned_bytes
from gpu_worker.models.dreamzero.world import PolicyState

_WARMUP_LANGUAGE: Final = "stand still"


class DreamZeroPipeline:
    """Implements `SupportsARDiffusionPipeline`.

    Args:
        device: where the models run.
        dtype: element type of all weights, and of conditions; the sampler works in float32.
        config: settings, see `DreamZeroSettings`; `checkpoint` is needed.
        parallel: the two ranks that run a branch each; None runs both here.

    Raises:
        ConfigurationError: a setting or something in the checkpoint does not fit; names it.

    Attributes:
        forwards, reused: denoising steps so far that ran the transformer, and that did without.
    """

    ar_diffusion_default_seed = DEFAULT_SEED
    """Of sessions that name none."""

    shares_sequences: ClassVar[bool] = True
    """Two ranks may serve a session together."""

    default_dtype: ClassVar[str] = DEFAULT_DTYPE
    """What it runs in where nobody says."""

    begins_anew_on_prompt = True
    """Another language is another task."""

    def __init__(
        self,
        *,
        device: torch.device,
        dtype: torch.dtype,
        config: Mapping[str, Any] | None = None,
        parallel: Gathering | None = None,
    ) -> None:
        settings = DreamZeroSettings.from_mapping(config or {})
        self._capacity, self._itemsize = settings.cost.session_capacity, dtype.itemsize
        self._policy = Policy(settings, device=device, dtype=dtype, parallel=parallel)
        self.forwards = self.reused = 0
        self._states: dict[str, PolicyState] = {}
        self._kv: ARDiffusionKVState | None = None

    # ------------------------------------------------------------------------------------------- the runner's seam

    def ar_diffusion_kv_cache_spec(self) -> ARDiffusionKVCacheSpec:
        """What a session costs."""
        topology = self._policy.topology
        return dreamzero_kv_spec(
            topology,
            owned=owned_bytes(topology, itemsize=self._itemsize),
            session_capacity=self._capacity,
            cfg_parallel=self._policy.cfg_parallel,
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
        robot = self._policy.robot
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
        policy = self._policy
        if is_dummy(request):
            shape = (policy.config.action_horizon, policy.config.max_action_dim)
            return DiffusionOutput(payload={"actions": torch.zeros(shape)})
        if self._kv is None:
            raise KVStateError("no session is bound: a forward runs inside bind_ar_diffusion_state only")
        session_id = self._kv.session_id
        turn = policy.turn(request, self._state_of(session_id, request.tick))
        answer = policy.answer(self._kv, turn)
        made = answer.actions[0].double().cpu().numpy()
        actions = restore_actions(made, turn.observed.state, policy.robot).astype(np.float32)
        if not np.isfinite(actions).all():
            raise ModelError("the actions are not finite", field="actions")
        state = settled(
            turn.state, turn.sight, answer, language=turn.language, frames=policy.config.latent_frames
        )
        payload: dict[str, Any] = {"actions": actions}
        if turn.options.output_type != ACTIONS:
            payload["latents"] = answer.video
        shown = turn.options.output_type == PIXEL
        frames = policy.pictures(session_id, state, answer) if shown else None
        self._states[session_id] = state  # nothing failed, so the session moves on
        self.forwards, self.reused = self.forwards + answer.forwards, self.reused + answer.reused
        return _output(request, payload, frames)

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


def _output(
    request: ARDiffusionRequest, payload: Mapping[str, Any], frames: torch.Tensor | None = None
) -> DiffusionOutput:
    metadata = {}
    if request.tick is not None:
        metadata[METADATA_KEY] = ARDiffusionChunkMetadata.from_tick(request.tick).to_dict()
    return DiffusionOutput(payload=payload, frames=frames, metadata=metadata)
