"""A session's forwards one after the other, every one computed densely over all that stayed before it."""

import numpy as np

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
