"""A session's forwards one after the other, every one computed densely over all that stayed before it.

branches = DenseRollout(w, sizes, text, image), DenseRollout(w, sizes, negative_text, image)
for branch in branches:
    branch.prefill(first_latent, condition[:, :1], 0)
video, actions = imagine(*branches, scale=5.0, start=1, ...)
"""

import numpy as np

from support.dreamzero_oracles import unipc
from support.dreamzero_oracles.transformer import Block, Registers, Sizes, Weights, forward


class DenseRollout:
    """What a session's branch would compute if it kept no K and V at all.

    Args:
        w: the transformer's weights, by their names in the checkpoint without prefix.
        sizes: of the model.
        text: [L, text_dim].
        image: [N, width].
    """

    def __init__(self, w: Weights, sizes: Sizes, text: np.ndarray, image: np.ndarray) -> None:
        self.w, self.sizes, self.text, self.image = w, sizes, text, image
        self.history: list[Block] = []

    def prefill(self, latents: np.ndarray, condition: np.ndarray, start: int) -> None:
        """Clean frames [16, F, h, w] stay, at timestep 0. What they compute is not needed before somebody sees them."""
        self.history.append(Block(latents, condition, start, (0.0,) * latents.shape[1]))

    def denoise(
        self,
        latents: np.ndarray,
        condition: np.ndarray,
        start: int,
        *,
        timestep: float,
        action: np.ndarray,
        action_timestep: float,
        state: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The flow of frames [16, F, h, w] and actions [A, D_a]; nothing stays."""
        present = Block(latents, condition, start, (timestep,) * latents.shape[1])
        registers = Registers(action, (action_timestep,) * len(action), state)
        video, made = forward(
            self.w,
            present,
            history=self.history,
            registers=registers,
            text=self.text,
            image=self.image,
            sizes=self.sizes,
        )
        assert made is not None
        return video, made

    def reset(self, image: np.ndarray) -> None:
        """An inference reset: the past and the image go, the text stays."""
        self.history, self.image = [], image


def imagine(
    positive: DenseRollout,
    negative: DenseRollout | None,
    *,
    scale: float,
    start: int,
    condition: np.ndarray,
    state: np.ndarray,
    video: np.ndarray,
    action: np.ndarray,
    steps: int,
    shift: float = 5.0,
    final_noise: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """All steps of one observation.

    Args:
        positive, negative: what stayed in either branch; without a negative one there is no guidance.
        scale: of the guidance.
        start: absolute index of the first imagined frame.
        condition: [20, F, h, w] of the imagined frames.
        state: [S, D_s].
        video, action: noise [16, F, h, w] and [A, D_a].
        steps, shift: of the levels.
        final_noise: where the video's noise ends, where it is decoupled from that of the actions.

    Returns:
        The imagined latents and the actions.
    """
    sigmas = unipc.levels(steps, shift)
    video_sigmas = sigmas
    if final_noise is not None:
        video_sigmas = [sigma * (sigmas[0] - final_noise) / sigmas[0] + final_noise for sigma in sigmas]
    videos, actions = unipc.walk(video_sigmas, video), unipc.walk(sigmas, action)
    x, a = next(videos), next(actions)
    for video_sigma, sigma in zip(video_sigmas[:-1], sigmas[:-1], strict=True):
        flows = [
            branch.denoise(
                x,
                condition,
                start,
                timestep=float(int(1000 * video_sigma)),
                action=a,
                action_timestep=float(int(1000 * sigma)),
                state=state,
            )
            for branch in (positive, negative)
            if branch is not None
        ]
        video_flow = flows[-1][0] + scale * (flows[0][0] - flows[-1][0]) if len(flows) == 2 else flows[0][0]
        x, a = videos.send(video_flow), actions.send(flows[0][1])
    return x, a
