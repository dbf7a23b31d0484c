"""The models of a checkpoint as one policy: an observation in, what is imagined and to be done out.

What it answers with depends on the session's state and KV that it is given; it keeps nothing of any session.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from contracts.errors import ConfigurationError, ModelError
from gpu_worker.capability import ARDiffusionRequest
from gpu_worker.kv.state import ARDiffusionKVState
from gpu_worker.models.dreamzero.cfg import BRANCH_OF_RANK, Gathering, SplitGuidedModel
from gpu_worker.models.dreamzero.checkpoint import DreamZeroCheckpoint
from gpu_worker.models.dreamzero.deployment import Deployment
from gpu_worker.models.dreamzero.guidance import BranchedModel, GuidedModel
from gpu_worker.models.dreamzero.normalisation import normalise_state
from gpu_worker.models.dreamzero.parts import load_parts
from gpu_worker.models.dreamzero.passes import PagedModel
from gpu_worker.models.dreamzero.request import Observed, Options, check_options, observe
from gpu_worker.models.dreamzero.rollout import Answer, Rollout, Sight, let_go, publish, see
from gpu_worker.models.dreamzero.settings import DEFAULT_SEED, DreamZeroSettings
from gpu_worker.models.dreamzero.spec import IMAGE, NEGATIVE, POSITIVE, TEXT
from gpu_worker.models.dreamzero.step_cache import StepCache
from gpu_worker.models.dreamzero.stream import PICTURES_PER_LATENT, FrameEncoder, FrameStream
from gpu_worker.models.dreamzero.unipc import UniPCSchedule
from gpu_worker.models.dreamzero.world import PolicyState, Reset, accumulate_frames, reset_reason
from gpu_worker.models.lingbot_world.decoding import StreamingDecoder, to_uint8


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One observation, checked and seen.

    Args:
        options: how it is to be answered.
        observed: what the robot saw and felt.
        language: token ids of what it is asked to do.
        prompts: what the text encoder reads, by branch.
        state: the session's, after `reset`.
        reset: what the observation makes it let go of.
        sight: what the model sees.
        seed: of the noise.
    """

    options: Options
    observed: Observed
    language: tuple[int, ...]
    prompts: Mapping[str, str]
    state: PolicyState
    reset: Reset | None
    sight: Sight
    seed: int


class Policy:
    """Answers observations.

    Args:
        settings: the deployment's.
        device: where the models run.
        dtype: element type of all weights, and of conditions; the sampler works in float32.
        parallel: the two ranks that run a branch each; None runs both here.

    Raises:
        ConfigurationError: something in the checkpoint does not fit, or the number of ranks; names it.
    """

    def __init__(
        self,
        settings: DreamZeroSettings,
        *,
        device: torch.device,
        dtype: torch.dtype,
        parallel: Gathering | None = None,
    ) -> None:
        self.cfg_parallel = _checked_ranks(settings.cost.cfg_parallel, parallel)
        self._settings, self._parallel = settings, parallel
        deployment = Deployment.load(settings.checkpoint)
        self.robot, self.topology = deployment.embodiment, deployment.topology
        tokenizer = str(deployment.tokenizer.relative_to(settings.checkpoint))
        checkpoint = DreamZeroCheckpoint(settings.checkpoint)
        parts = load_parts(checkpoint, self.topology, tokenizer=tokenizer, device=device, dtype=dtype)
        self.config = parts.config
        self._transformer, self._clip, self._text = parts.transformer, parts.clip, parts.text
        self._negative_prompt = deployment.negative_prompt
        self._encoder = FrameEncoder(
            parts.vae, height=self.topology.height, width=self.topology.width, dtype=dtype
        )
        self._stream = FrameStream(self._encoder, self.config.num_frame_per_block)
        self._decoder = StreamingDecoder(parts.vae)
        self._device, self._dtype = device, dtype

    def turn(self, request: ARDiffusionRequest, known: PolicyState) -> Turn:
        """Checks and sees an observation; all that can be wrong with one is found here, before any KV is touched.

        Args:
            request: as it came.
            known: the session's state.

        Raises:
            ObservationMissingError: there is nothing to act on.
            InvalidArgumentError: something of the request can't be followed; names the field.
        """
        options = check_options(request, self._settings)
        observed = observe(request, self.robot)
        sentence = self.robot.sentence(observed.language)
        language = self._text.token_ids(sentence)
        state, reset = self._reset_state(known, observed, language)
        sight = see(state, observed.picture, self._encoder, self._stream, self.config.latent_frames)
        prompts = {POSITIVE: sentence, NEGATIVE: self._negative_prompt}
        seed = DEFAULT_SEED if request.generator is None else request.generator.initial_seed()
        return Turn(options, observed, language, prompts, state, reset, sight, seed)

    def answer(self, kv: ARDiffusionKVState, turn: Turn) -> Answer:
        """What comes of a turn, over the session's KV."""
        model = self._branched(kv, turn.options.cfg_scale)
        row = normalise_state(turn.observed.state, self.robot.state, self.config.max_state_dim)
        felt = torch.from_numpy(row).to(device=self._device, dtype=self._dtype).view(1, 1, -1)
        rollout = Rollout(
            self.config,
            model,
            schedule=UniPCSchedule.of(turn.options.steps),
            sight=turn.sight,
            stream=self._stream,
            cache=StepCache() if self._settings.step_cache else None,
        )
        # What can fail comes before anything of the session's KV goes, and only what is missing then is made anew.
        unread = [b for b in model.branches if self._lacks(kv, turn, b, TEXT)]
        texts = {branch: self._text(turn.prompts[branch]) for branch in unread}
        unseen = any(self._lacks(kv, turn, branch, IMAGE) for branch in model.branches)
        tokens = self._clip(self._encoder.pixels(turn.observed.picture)) if unseen else None
        let_go(kv, turn.reset)
        publish(kv, model, texts=texts, image=tokens)
        start = rollout.prefill(turn.state.start)
        return rollout.denoise(start, felt, turn.seed)

    def pictures(self, session_id: str, state: PolicyState, answer: Answer) -> torch.Tensor:
        """The imagined frames, uint8 [8, H, W, 3], 9 where a rollout begins.

        The rollout so far is decoded each time, since a frame needs those before it: a decoder's history would be by far
        the largest thing that a session keeps.
        """
        assert state.video is not None
        clip = torch.from_numpy(state.video).unsqueeze(0).to(self._device)
        pictures = self._decoder.decode(self._decoder.begin(session_id), clip)
        new = answer.video.shape[2]
        count = pictures.shape[2] if new == clip.shape[2] else PICTURES_PER_LATENT * new
        shown = pictures[:, :, -count:]
        if not bool(shown.isfinite().all()):
            raise ModelError("the pictures are not finite", field="frames")
        return to_uint8(shown)

    @staticmethod
    def _lacks(kv: ARDiffusionKVState, turn: Turn, branch: str, name: str) -> bool:
        """Whether a branch is without text or image once the turn's reset is done."""
        dropped = turn.reset is Reset.SESSION or (turn.reset is Reset.INFERENCE and name == IMAGE)
        return dropped or not kv.is_cross_attention_populated(branch, name)

    def _branched(self, kv: ARDiffusionKVState, scale: float) -> BranchedModel:
        """The transformer over the session's branches that run here."""
        paged = PagedModel(self._transformer, kv)
        if self._parallel is None:
            return GuidedModel(paged, self._transformer, scale=scale)
        return SplitGuidedModel(paged, self._transformer, scale=scale, ranks=self._parallel)

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
            local_attention_frames=self.config.local_attention_frames,
        )
        if reset is not None:  # this observation is the first one after it
            ring, _ = accumulate_frames((), observed.picture)
            return replace(counted.after(reset), ring=ring, calls=1), reset
        return replace(counted, ring=ring), None


def _checked_ranks(wanted: int, parallel: Gathering | None) -> int:
    """How many workers share the branches; ConfigurationError unless that many were started."""
    started = 1 if parallel is None else parallel.degree
    if started not in {1, len(BRANCH_OF_RANK)}:
        raise ConfigurationError(
            f"two ranks share the two branches of guidance, {started} were started", field="cfg_parallel"
        )
    if wanted not in {1, started}:
        raise ConfigurationError(
            f"cfg_parallel {wanted} needs as many processes of this worker, {started} run",
            field="cfg_parallel",
        )
    return started
