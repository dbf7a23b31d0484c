"""A robot's whole session, recomputed densely in float64 at every observation: nothing is cached but what was seen.

It knows the checkpoint's weights, the stitched pictures and the token ids; the VAE is diffusers' own, in float64, on
whole clips. All else is NumPy from the formulas.
"""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file

from support.dreamzero_oracles import clip, text, unipc
from support.dreamzero_oracles.rollout import DenseRollout
from support.dreamzero_oracles.transformer import Sizes

MODEL = "action_head.model."
TEXT = "action_head.text_encoder."
TOWER = "action_head.image_encoder.model.visual."


class Memory:
    """One session.

    Args:
        checkpoint: its weights.
        vae: diffusers' `AutoencoderKLWan` with the checkpoint's weights; it is copied.
        sizes: of the transformer.
        topology: sizes of everything else.
        negative: token ids of the negative prompt.
        scale: of the guidance; 1 is none.
        steps: of the sampler.
        seed: of the noise.
    """

    def __init__(
        self,
        checkpoint: Path,
        vae: Any,
        topology: Any,
        *,
        negative: list[int],
        scale: float,
        steps: int,
        seed: int = 1140,
        final_noise: float | None = None,
    ) -> None:
        weights: dict[str, np.ndarray] = {}
        for file in sorted(checkpoint.glob("*.safetensors")):
            weights |= {name: value.astype(np.float64) for name, value in load_file(file).items()}

        def part(prefix: str) -> dict[str, np.ndarray]:
            return {name.removeprefix(prefix): v for name, v in weights.items() if name.startswith(prefix)}

        self.model, self.text, self.tower = part(MODEL), part(TEXT), part(TOWER)
        self.vae = copy.deepcopy(vae).double()
        self.topology = topology
        head = topology.head
        self.sizes = Sizes(
            layers=head.transformer.num_layers,
            heads=head.transformer.num_heads,
            freq_dim=head.transformer.freq_dim,
            frames_per_block=head.num_frame_per_block,
            window_frames=head.window_frames,
        )
        self.negative, self.scale, self.steps, self.seed = negative, scale, steps, seed
        self.final_noise = final_noise
        self.forget()

    def forget(self) -> None:
        """Another task."""
        self.seen: list[np.ndarray] = []
        self.start = 0
        self.begun = 0

    def act(self, picture: np.ndarray, state: np.ndarray, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Normalised actions [A, D] and imagined latents [16, n, h, w] of the next observation.

        Args:
            picture: stitched, uint8 [H, W, 3].
            state: normalised [D_s].
            ids: tokens of the task's sentence.
        """
        self.seen.append(picture)
        block, limit = self.sizes.frames_per_block, self.topology.head.local_attention_frames
        if self.start == 0 or (limit != -1 and self.start >= limit):
            self.condition = self._condition(picture)
            tokens = self._tower(picture)
            prompts = [ids, self.negative] if self.scale != 1 else [ids]
            self.rollouts = [
                DenseRollout(self.model, self.sizes, self._embedding(prompt), tokens) for prompt in prompts
            ]
            self._prefill(self.condition[4:, :1], 0)
            self.start = 1
        else:
            shown = self._latents(self.seen[: 1 + 4 * ((len(self.seen) - 1) // 4)])[:, -block:]
            while shown.shape[1] < block:
                shown = np.concatenate((shown[:, -1:], shown), axis=1)
            self._prefill(shown, self.start - block)
        actions, video = self._imagine(state)
        if self.start == 1:
            video = np.concatenate((self.condition[4:, :1], video), axis=1)
        self.start += block
        return actions, video

    # ------------------------------------------------------------------------------------------------ parts

    def _conditions(self, begin: int, count: int) -> np.ndarray:
        """Of some frames; beyond the end of the condition its last ones."""
        end = begin + count
        return self.condition[:, begin:end] if end <= self.condition.shape[1] else self.condition[:, -count:]

    def _prefill(self, latents: np.ndarray, begin: int) -> None:
        part = self._conditions(begin, latents.shape[1])
        for rollout in self.rollouts:
            rollout.prefill(latents, part, begin)

    def _imagine(self, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        block = self.sizes.frames_per_block
        part = self._conditions(self.start, block)
        head = self.topology.head
        sigmas = unipc.levels(self.steps, 5.0)
        video_sigmas = sigmas
        if self.final_noise is not None:
            most = sigmas[0]
            video_sigmas = [s * (most - self.final_noise) / most + self.final_noise for s in sigmas]
        video = unipc.walk(video_sigmas, self._noise((16, block, *part.shape[2:])))
        action = unipc.walk(sigmas, self._noise((head.action_horizon, head.max_action_dim)))
        x, a = next(video), next(action)
        for sigma, video_sigma in zip(sigmas[:-1], video_sigmas[:-1], strict=True):
            flows = [
                rollout.denoise(
                    x,
                    part,
                    self.start,
                    timestep=float(int(1000 * video_sigma)),
                    action=a,
                    action_timestep=float(int(1000 * sigma)),
                    state=state[None],
                )
                for rollout in self.rollouts
            ]
            flow = flows[0][0]
            if len(flows) == 2:
                flow = flows[1][0] + self.scale * (flows[0][0] - flows[1][0])
            x, a = video.send(flow), action.send(flows[0][1])
        return a, x

    def _noise(self, shape: tuple[int, ...]) -> np.ndarray:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn((1, *shape), generator=generator)[0].double().numpy()

    def _embedding(self, ids: list[int]) -> np.ndarray:
        shape, model = self.topology.text, self.topology.head.transformer
        return text.forward(
            self.text,
            ids,
            model.text_len,
            layers=shape.layers,
            heads=shape.heads,
            buckets=shape.buckets,
            most=shape.max_distance,
        )

    def _tower(self, picture: np.ndarray) -> np.ndarray:
        shape = self.topology.clip
        pixels = picture.transpose(2, 0, 1) / 255 * 2 - 1
        return clip.forward(
            self.tower,
            pixels,
            size=shape.image_size,
            patch=shape.patch_size,
            heads=shape.heads,
            blocks=shape.layers - 1,
        )

    def _condition(self, picture: np.ndarray) -> np.ndarray:
        latents = self._latents([picture], grey=self.topology.head.num_frames - 1)
        mask = np.zeros((4, *latents.shape[1:]))
        mask[:, 0] = 1
        return np.concatenate((mask, latents))

    def _latents(self, pictures: list[np.ndarray], *, grey: int = 0) -> np.ndarray:
        """[16, n, h, w] of a whole clip: pictures, then grey ones."""
        clip = np.stack(pictures).transpose(3, 0, 1, 2) / 255 * 2 - 1
        clip = np.concatenate((clip, np.zeros((3, grey, *clip.shape[2:]))), axis=1)
        with torch.no_grad():
            mean = self.vae.encode(torch.from_numpy(clip)[None]).latent_dist.mean[0].numpy()
        shift, scale = (
            np.array(values).reshape(16, 1, 1, 1)
            for values in (self.vae.config.latents_mean, self.vae.config.latents_std)
        )
        return (mean - shift) / scale
