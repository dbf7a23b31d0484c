"""One observation answered: the steps between what was seen and what is to be done, over a session's KV.

    1. see        the picture to latents; nothing of the session is touched yet
    2. let go     what a reset drops: session all, inference all but the text
    3. publish    text and image of every branch, where they are missing
    4. prefill    the frames that were seen, clean; they stay
    5. denoise    the frames to come and the actions towards them, from the same noise every time; nothing stays

A rollout begins with one latent frame, its first picture, and goes on by as many as a block has:

    start    0 -> 1     the picture is prefilled
             1 -> 3     frames 1 and 2 are imagined
             3 -> 5     what was seen by now is prefilled as frames 1 and 2, frames 3 and 4 are imagined
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from gpu_worker.kv.state import ARDiffusionKVState
from gpu_worker.models.dreamzero.config import LATENT_CHANNELS, DreamZeroConfig
from gpu_worker.models.dreamzero.guidance import BranchedModel
from gpu_worker.models.dreamzero.passes import Frames, Registers
from gpu_worker.models.dreamzero.pictures import Picture
from gpu_worker.models.dreamzero.spec import IMAGE, TEXT
from gpu_worker.models.dreamzero.step_cache import StepCache
from gpu_worker.models.dreamzero.stream import FrameEncoder, FrameStream, StreamState
from gpu_worker.models.dreamzero.unipc import UniPCSampler, UniPCSchedule
from gpu_worker.models.dreamzero.world import PolicyState, Reset
from gpu_worker.models.lingbot_world.spec import MASK_CHANNELS


@dataclass(frozen=True, slots=True, eq=False)
class Sight:
    """What an observation shows the model.

    Args:
        stream: what the cameras have shown, this picture included.
        condition: [1, 20, F, h, w] of the rollout.
        begins: whether the rollout begins with this picture.
    """

    stream: StreamState
    condition: torch.Tensor
    begins: bool


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What comes of an observation.

    Args:
        video: [1, 16, n, h, w] float32: the imagined latents, the picture's own in front where a rollout begins.
        actions: [1, A, max_action_dim] float32, normalised.
        start: latent frames of the rollout after it.
        forwards: steps that ran the transformer.
        reused: steps that a flow of another step was good enough for.
    """

    video: torch.Tensor
    actions: torch.Tensor
    start: int
    forwards: int
    reused: int


def see(
    state: PolicyState, picture: Picture, encoder: FrameEncoder, stream: FrameStream, frames: int
) -> Sight:
    """1. The picture in the stream; and the condition of a rollout of `frames` latent frames, where one begins."""
    shown = stream.begin(picture) if state.stream is None else stream.append(state.stream, picture)
    if state.start > 0 and state.condition is not None:
        return Sight(shown, state.condition, begins=False)
    return Sight(shown, encoder.condition(picture, frames), begins=True)


def let_go(kv: ARDiffusionKVState, reset: Reset | None) -> None:
    """2. Drops of the KV what a reset asks for."""
    if reset is Reset.SESSION:
        kv.reset()
    elif reset is Reset.INFERENCE:
        kv.reset(keep_cross_attention=(TEXT,))


def publish(
    kv: ARDiffusionKVState,
    model: BranchedModel,
    *,
    texts: Mapping[str, torch.Tensor],
    image: torch.Tensor | None,
) -> None:
    """3. Text and image K and V of each branch that runs here, where they are missing.

    Args:
        kv: the session's.
        model: says which branches run, and projects.
        texts: the embedding [1, tokens, text_dim] of each branch that lacks it.
        image: the image tower's tokens [1, tokens, width]; None where no branch lacks them.
    """
    for branch in model.branches:
        if branch in texts:
            kv.populate_cross_attention(branch, TEXT, model.transformer.project_text(texts[branch]))
        if image is not None and not kv.is_cross_attention_populated(branch, IMAGE):
            kv.populate_cross_attention(branch, IMAGE, model.transformer.project_image(image))


class Rollout:
    """Steps 4 and 5 of one observation.

    Args:
        config: the action head's.
        model: the transformer over the session's branches.
        schedule: noise levels of the actions, and of the video unless that is decoupled.
        sight: what was seen.
        stream: where `sight` comes from.
        cache: lets steps do without a forward; None runs one every step.
    """

    def __init__(
        self,
        config: DreamZeroConfig,
        model: BranchedModel,
        *,
        schedule: UniPCSchedule,
        sight: Sight,
        stream: FrameStream,
        cache: StepCache | None = None,
    ) -> None:
        self._config = config
        self._model = model
        self._schedule = schedule
        self._sight = sight
        self._stream = stream
        self._cache = cache

    def prefill(self, start: int) -> int:
        """Commits what was seen; returns where the imagined frames begin."""
        block, condition = self._config.num_frame_per_block, self._sight.condition
        if self._sight.begins:
            seen = condition[:, MASK_CHANNELS:, :1]
            self._model.prefill(Frames(seen, condition[:, :, :1], 0, 0.0))
            return 1
        seen = self._stream.newest(self._sight.stream, block)
        begin = start - block
        self._model.prefill(Frames(seen, self._conditions(begin), begin, 0.0))
        return start

    def denoise(self, start: int, state: torch.Tensor, seed: int) -> Answer:
        """Imagines the frames from `start` on, and the actions.

        Args:
            start: where they begin.
            state: [1, S, max_state_dim] of the model's type.
            seed: of the noise of video and actions, each from its start.
        """
        config, condition = self._config, self._conditions(start)
        block, dtype = config.num_frame_per_block, condition.dtype
        frames = (1, LATENT_CHANNELS, block, *condition.shape[3:])
        actions = (1, config.transformer.num_action_per_block, config.max_action_dim)
        video_schedule = self._schedule
        if config.decouple_inference_noise:
            video_schedule = video_schedule.decoupled(config.video_inference_final_noise)
        video = UniPCSampler(video_schedule, _noise(frames, seed, condition))
        action = UniPCSampler(self._schedule, _noise(actions, seed, condition))
        while not action.complete:
            flow = None if self._cache is None else self._cache.reuse()
            if flow is None:
                flow = self._model.denoise(
                    Frames(video.sample.to(dtype), condition, start, float(video.timestep)),
                    Registers(action.sample.to(dtype), float(action.timestep), state),
                )
                if self._cache is not None:
                    self._cache.keep(flow)
            assert flow.action is not None, "registers went in, so actions come out"
            video.advance(flow.video.float())
            action.advance(flow.action.float())
        imagined = video.sample
        if start == 1:  # the video begins with what was really seen
            first = self._sight.condition[:, MASK_CHANNELS:, :1].float()
            imagined = torch.cat((first, imagined), dim=2)
        reused = 0 if self._cache is None else self._cache.hits
        return Answer(imagined, action.sample, start + block, self._schedule.steps - reused, reused)

    def _conditions(self, start: int) -> torch.Tensor:
        """The condition [1, 20, block, h, w] of a block; beyond the rollout's end the last one's."""
        block, condition = self._config.num_frame_per_block, self._sight.condition
        end = start + block
        return condition[:, :, start:end] if end <= condition.shape[2] else condition[:, :, -block:]


def _noise(shape: tuple[int, ...], seed: int, like: torch.Tensor) -> torch.Tensor:
    """Noise drawn in the type and on the device of `like`, as float32; the same for the same seed."""
    generator = torch.Generator(device=like.device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=like.device, dtype=like.dtype).float()


def settled(
    state: PolicyState, sight: Sight, answer: Answer, *, language: tuple[int, ...], frames: int
) -> PolicyState:
    """What is kept once everything has succeeded; of the video the last latent frames, `frames` at most."""
    clip = answer.video[0].detach().to("cpu").numpy()
    video = clip if sight.begins or state.video is None else np.concatenate((state.video, clip), axis=1)
    return replace(
        state,
        next_chunk=state.next_chunk + 1,
        language=language,
        start=answer.start,
        condition=sight.condition,
        stream=sight.stream,
        video=video[:, -frames:],
    )
