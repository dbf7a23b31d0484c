"""DreamZero's diffusion transformer, with the names and shapes of its checkpoint.

    forward     [video tokens of F frames | A action tokens | S state tokens] over the past that the KV handles keep
    prefill     without registers, at timestep 0: what it writes stays
    denoise     with registers: nothing of it stays

Text and image are projected once a rollout by `project_text` and `project_image`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypedDict

import torch
import torch.nn.functional as F
from torch import nn

from contracts.errors import InvalidArgumentError
from gpu_worker.models.dreamzero.attention import CrossKV, RegisterKV
from gpu_worker.models.dreamzero.blocks import Block, Head
from gpu_worker.models.dreamzero.checks import (
    check_layers,
    check_start_frame,
    check_tensor,
    expand_timestep,
)
from gpu_worker.models.dreamzero.config import (
    CONDITION_CHANNELS,
    LATENT_CHANNELS,
    PATCH,
    ClipGeometry,
    DreamZeroConfig,
)
from gpu_worker.models.dreamzero.registers import ActionEncoder, CategoryMLP
from gpu_worker.models.dreamzero.rope import block_index, rotary
from gpu_worker.models.lingbot_world.blocks import patchify, unpatchify

Timestep = float | torch.Tensor


class Flow(NamedTuple):
    """What one forward predicts.

    Args:
        video: [1, 16, F, h, w].
        action: [1, A, max_action_dim]; None where there were no registers.
    """

    video: torch.Tensor
    action: torch.Tensor | None


class _Place(TypedDict):
    device: torch.device
    dtype: torch.dtype


class ImageEmbedding(nn.Module):
    """The image tower's tokens to the transformer's width."""

    def __init__(self, width: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, dim), nn.LayerNorm(dim)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[1, tokens, width] -> [1, tokens, D]."""
        return self.proj(x)


class DreamZeroTransformer(nn.Module):
    """Predicts the flow of the current frames and of the actions beside them.

    Args:
        config: the action head's configuration; None is the published one.
        image: the image tower's layout; None is the published one.
    """

    def __init__(self, config: DreamZeroConfig | None = None, image: ClipGeometry | None = None) -> None:
        super().__init__()
        self.config = DreamZeroConfig() if config is None else config
        self.image = ClipGeometry() if image is None else image
        model = self.config.transformer
        dim = model.dim
        self.patch_embedding = nn.Conv3d(model.in_dim, dim, kernel_size=PATCH, stride=PATCH)
        self.text_embedding = nn.Sequential(
            nn.Linear(model.text_dim, dim), nn.GELU(approximate="tanh"), nn.Linear(dim, dim)
        )
        self.time_embedding = nn.Sequential(nn.Linear(model.freq_dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        self.img_emb = ImageEmbedding(self.image.width, dim)
        self.blocks = nn.ModuleList(Block(model) for _ in range(model.num_layers))
        self.head = Head(model)
        self.state_encoder = CategoryMLP(self.config.max_state_dim, model.hidden_size, dim)
        self.action_encoder = ActionEncoder(self.config.max_action_dim, dim)
        self.action_decoder = CategoryMLP(dim, model.hidden_size, self.config.max_action_dim)
        self.requires_grad_(False).eval()

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the weights."""
        return self.patch_embedding.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.patch_embedding.weight.device

    def compile_blocks(self, **options: Any) -> None:
        """Compiles the blocks (`options` as for `torch.compile`); all of them share their graphs."""
        for block in self._blocks():
            block.compile(**options)

    # ------------------------------------------------------------------------------------------------ once a rollout

    def project_text(self, text: torch.Tensor) -> Iterator[CrossKV]:
        """K and V of every block's text attention, in order; for `populate_cross_attention`.

        Args:
            text: [1, tokens, text_dim] of any type, zero where padded; padding is attended to like any token.
        """
        check_tensor("text", text, (1, "tokens", self.config.transformer.text_dim), device=self.device)
        embedded = self.text_embedding(text.to(self.dtype))
        return (block.cross_attn.project_text(embedded) for block in self._blocks())

    def project_image(self, image: torch.Tensor) -> Iterator[CrossKV]:
        """K and V of every block's image attention, in order; for `populate_cross_attention`.

        Args:
            image: [1, tokens, width] of any type, from the image tower.
        """
        check_tensor("image", image, (1, self.image.tokens, self.image.width), device=self.device)
        embedded = self.img_emb(image.to(self.dtype))
        return (block.cross_attn.project_image(embedded) for block in self._blocks())

    # ------------------------------------------------------------------------------------------------ one forward

    def forward(
        self,
        latents: torch.Tensor,
        condition: torch.Tensor,
        *,
        start_frame: int,
        video_timestep: Timestep,
        action: torch.Tensor | None = None,
        action_timestep: Timestep | None = None,
        state: torch.Tensor | None = None,
        caches: Sequence[RegisterKV],
        text_kv: Sequence[CrossKV],
        image_kv: Sequence[CrossKV],
    ) -> Flow:
        """The flow of F frames, and of the actions beside them.

        Args:
            latents: [1, 16, F, h, w], noisy or clean, of the model's type.
            condition: [1, 20, F, h, w], mask and image latents of the same frames, of the model's type.
            start_frame: absolute index, in its rollout, of the first frame.
            video_timestep: 0 to 1000: a number, or one a frame [1, F].
            action: [1, A, max_action_dim] noisy actions, of the model's type; None where there are no registers. Then
                timestep and state are None, too.
            action_timestep: 0 to 1000: a number, or one an action [1, A].
            state: [1, S, max_state_dim], of the model's type; A is a multiple of S.
            caches: one handle a layer, prepared for A + S extra tokens; the caller decides whether frames stay.
            text_kv, image_kv: one pair a layer, as projected.

        Raises:
            InvalidArgumentError, InvalidTypeError: an argument is wrong; it is named.
        """
        start_frame = check_start_frame(start_frame)
        grid = self._check_frames(latents, condition)
        for name, layers in (("caches", caches), ("text_kv", text_kv), ("image_kv", image_kv)):
            check_layers(name, layers, self.config.transformer.num_layers)
        steps = expand_timestep("video_timestep", video_timestep, grid[0], self.device)
        video = math.prod(grid)
        x = self._frames(latents, condition)
        spread = torch.arange(grid[0], device=self.device).unsqueeze(1).expand(-1, video // grid[0]).flatten()
        actions = 0
        if self._has_registers(action, action_timestep, state):
            tokens, register_steps = self._registers(action, action_timestep, state)
            x, steps = torch.cat((x, tokens), dim=1), torch.cat((steps, register_steps), dim=1)
            spread = torch.cat((spread, torch.arange(grid[0], steps.shape[1], device=self.device)))
            actions = self.config.transformer.num_action_per_block
        registers = x.shape[1] - video

        embedding, projection = self._time(steps)
        table = rotary(
            start_frame,
            grid,
            self.config.transformer.head_dim,
            block=block_index(start_frame, self.config.num_frame_per_block),
            actions=actions,
            states=registers - actions,
            device=self.device,
        )
        for block, kv, text, image in zip(self._blocks(), caches, text_kv, image_kv, strict=True):
            x = block(x, projection, spread, table, registers=registers, kv=kv, text=text, image=image)

        values = self.head(x[:, :video], embedding, spread[:video])
        made = self.action_decoder(x[:, video : video + actions]) if actions else None
        return Flow(unpatchify(values, grid, PATCH), made)

    def _check_frames(self, latents: object, condition: object) -> tuple[int, int, int]:
        """Frames, rows and columns, in tokens."""
        here: _Place = {"device": self.device, "dtype": self.dtype}
        found = check_tensor("latents", latents, (1, LATENT_CHANNELS, "F", "h", "w"), **here)
        _, _, frames, height, width = found.shape
        check_tensor("condition", condition, (1, CONDITION_CHANNELS, frames, height, width), **here)
        _, rows, columns = PATCH
        if height % rows or width % columns:
            raise InvalidArgumentError(
                f"latents must be whole patches of {rows} x {columns}, got {height} x {width}",
                field="latents",
            )
        return frames, height // rows, width // columns

    def _frames(self, latents: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        """Video tokens [1, T, D]; the stride is the kernel, so a patch is one product."""
        patches = patchify(torch.cat((latents, condition), dim=1), PATCH)
        return F.linear(patches, self.patch_embedding.weight.flatten(1), self.patch_embedding.bias)

    @staticmethod
    def _has_registers(action: object, action_timestep: object, state: object) -> bool:
        given = {"action": action, "action_timestep": action_timestep, "state": state}
        missing = [name for name, value in given.items() if value is None]
        if 0 < len(missing) < len(given):
            raise InvalidArgumentError(
                f"action, action_timestep and state come together: {missing[0]} is missing", field=missing[0]
            )
        return not missing

    def _registers(
        self, action: object, action_timestep: object, state: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [1, A + S, D] and their timesteps [1, A + S]; a state has that of the first action of its share."""
        model, here = self.config.transformer, _Place(device=self.device, dtype=self.dtype)
        count, states = model.num_action_per_block, model.num_state_per_block
        noisy = check_tensor("action", action, (1, count, self.config.max_action_dim), **here)
        known = check_tensor("state", state, (1, states, self.config.max_state_dim), **here)
        steps = expand_timestep("action_timestep", action_timestep, count, self.device)
        tokens = torch.cat((self.action_encoder(noisy, steps), self.state_encoder(known)), dim=1)
        return tokens, torch.cat((steps, steps[:, :: count // states]), dim=1)

    def _time(self, timestep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[1, G] -> the embedding [1, G, D], and its projection [1, G, 6, D]."""
        half = self.config.transformer.freq_dim // 2
        frequencies = 10_000.0 ** (-torch.arange(half, dtype=torch.float64, device=timestep.device) / half)
        angles = timestep.unsqueeze(-1) * frequencies
        embedding = self.time_embedding(torch.cat((angles.cos(), angles.sin()), dim=-1).to(self.dtype))
        return embedding, self.time_projection(embedding).unflatten(-1, (6, -1))

    def _blocks(self) -> Iterator[Block]:
        for block in self.blocks:
            assert isinstance(block, Block)
            yield block
